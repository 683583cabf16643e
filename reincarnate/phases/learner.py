"""One update, sample -> ``student.update``: the CPU calls it, CUDA captures it once and replays it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reincarnate import schedules
from reincarnate.acting import behaviour_log_policy, distillation_temperature
from reincarnate.device import Step
from reincarnate.phases.stage import Stage
from reincarnate.replay import Feed, FreshRows, Replay, SequenceFeed, make_feed, sequences_stored
from reincarnate.replay.sampling import Behaviour
from reincarnate.students.student import Student

#: Updates whose metrics are added up on the device before the host reads their mean.
UPDATES_PER_FLUSH = 50


class Learner:
    """Owns sampling, the coefficient and the metrics; the student owns the gradient step.

    Args:
        stage: of the run.
        replay: what is learnt from.
        distill: whether the student is told what the teacher would do.
        done: updates made before these, in this phase and earlier ones.
        fresh: for a student of sequences that plays, its rows that were not used yet.
    """

    def __init__(
        self, stage: Stage, replay: Replay, distill: bool, done: int = 0, fresh: FreshRows | None = None
    ) -> None:
        self._stage, self._done = stage, done
        self._total = total_updates(stage)
        self._feed = _feed(stage, replay, fresh)
        self._distill = distill
        self._temperature = _teacher_temperature(stage)
        self._m = torch.zeros((), device=stage.device)
        self._sums: dict[str, Tensor] = {}
        self._count = 0
        self._forgotten: frozenset[str] = frozenset()
        # A buffer on the host is drawn from outside what is captured.
        generators = (stage.generator, stage.sampler.generator)
        on_device = [each for each in generators if each.device.type == stage.device.type]
        self._step = Step(self._update, stage.device, on_device, in_pieces=stage.ranks.size > 1)

    def set_coefficient(self, m: float) -> None:
        """m of the next updates, and the learning rate that goes with it."""
        self._m.fill_(m)
        rates = self._stage.config.optimizer
        high, low = rates.learning_rate, rates.learning_rate_final
        if rates.schedule == "m":
            self._stage.student.set_learning_rate(
                schedules.learning_rate(m, high, low) if self._distill else high
            )

    def expect(self, updates: int) -> None:
        """The buffer does not change before ``updates`` more updates."""
        self._feed.expect(updates)

    def __call__(self) -> None:
        """One update."""
        rates = self._stage.config.optimizer
        if rates.schedule == "linear":
            rate = schedules.linear(
                rates.learning_rate, rates.learning_rate_final, max(1, self._total), self._done
            )
            self._stage.student.set_learning_rate(rate)
        self._feed.advance()
        self._step()
        self._count += 1
        self._done += 1

    @property
    def flush_due(self) -> bool:
        """Whether enough updates have passed to read the metrics."""
        return self._count >= UPDATES_PER_FLUSH

    def forget(self, metrics: Sequence[str]) -> None:
        """Log these metrics no more."""
        self._forgotten = frozenset(metrics)

    def log(self, phase: str, step: int) -> dict[str, float]:
        """Read the mean metrics since the last time, and log them at ``step``; empty when there are none.

        The only place where the host waits for the learner's device.
        """
        if not self._count:
            return {}
        values = torch.stack(list(self._sums.values())).tolist()
        means = {
            name: value / self._count
            for name, value in zip(self._sums, values, strict=True)
            if name not in self._forgotten
        }
        for total in self._sums.values():
            total.zero_()
        self._count = 0
        self._stage.logger.scalars(phase, means, step)
        self._stage.curves.add_losses(phase, step, means)
        return means

    def _update(self) -> None:
        batch = self._feed.batch()
        log_policy = None
        if self._distill:
            assert batch.teacher_outputs is not None  # the buffer always gives them
            log_policy = torch.log_softmax(batch.teacher_outputs / self._temperature, dim=-1)
        with self._stage.ranks.averaging():
            metrics = self._stage.student.update(batch, log_policy, self._m)
        for name, value in metrics.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(value)
            self._sums[name] += value


def can_learn(student: Student, replay: Replay) -> bool:
    """Whether there is anything in ``replay`` that the student could be given."""
    length = student.batch_spec.sequence_length
    return replay.can_sample() if length is None else sequences_stored(replay, length) > 0


def total_updates(stage: Stage) -> int:
    """Updates of the whole run, as planned: both phases."""
    config = stage.config
    size = config.optimizer.batch_size
    every = stage.student.batch_spec.agent_steps_per_update(size) or config.online.agent_steps_per_update
    playing = max(0, config.online.agent_steps - config.online.learning_starts_agent_steps) // every
    return playing + (config.offline.updates if stage.entry.method.offline else 0)


def _feed(stage: Stage, replay: Replay, fresh: FreshRows | None) -> Feed | SequenceFeed:
    size, asked = stage.config.optimizer.batch_size, stage.student.batch_spec
    if asked.sequence_length is None:
        return make_feed(replay, size, stage.sampler, stage.device)
    return SequenceFeed(
        replay,
        size,
        asked.sequence_length,
        stage.sampler,
        stage.device,
        fresh=fresh,
        fresh_count=asked.fresh_count(size),
        behaviour=None if replay.extras.behaviour_log_policy else _teacher_behaviour(stage),
    )


def _teacher_behaviour(stage: Stage) -> Behaviour | None:
    """How the teacher acted when D_T was collected, from what is stored of it."""
    teacher = stage.teacher
    if teacher is None:
        return None
    kind, temperature = teacher.spec.outputs, teacher.temperature
    return lambda outputs, epsilon: behaviour_log_policy(outputs, epsilon, kind, temperature)


def _teacher_temperature(stage: Stage) -> float:
    chosen = stage.config.distill.teacher_temperature
    if chosen is not None or stage.teacher is None:
        return chosen or 1.0
    return distillation_temperature(stage.teacher.spec.outputs, stage.student.outputs)
