"""The online phase: the student plays, fills D_S, trains on it, and m falls as it catches up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from reincarnate import schedules
from reincarnate.acting import ActRule
from reincarnate.envs import make_env
from reincarnate.evaluate import restart_state
from reincarnate.phases.evaluation import evaluate_student
from reincarnate.phases.learner import Learner, can_learn
from reincarnate.phases.stage import PhaseClock, Stage, points_passed, snapshot
from reincarnate.phases.together import played_by_all
from reincarnate.replay import FreshRows, Replay
from reincarnate.rollout import Acted, ActFunction, Game, Rollout
from reincarnate.schedules import DistillCoefficient
from reincarnate.students.student import SequenceStudent
from reincarnate.teachers.collect import watching
from reincarnate.types import EnvStep

#: Metrics that compare the student with the teacher's stored outputs.
TEACHER_METRICS = ("distill_loss", "teacher_agreement")


@dataclass
class OnlineState:
    """Counters of the online phase, as a checkpoint stores them."""

    agent_steps: int = 0
    updates: int = 0
    target_updates: int = 0
    evaluations: int = 0
    seconds: float = 0.0  # acting and training, without evaluations
    first_m: float | None = None
    last_m: float | None = None
    fresh_rows: list[int] | None = None  # of a student of sequences: per lane, the first row not used yet


def make_coefficient(stage: Stage) -> DistillCoefficient | None:
    """The annealed m of a student that distils; None for one that does not."""
    if not (stage.entry.method.distill and stage.teacher_return and stage.random_return):
        return None
    config, fraction = stage.config, stage.config.distill.stop_fraction
    step = config.env.num_envs * stage.ranks.size  # agent steps of one vector step
    return DistillCoefficient(
        teacher_return=stage.teacher_return.mean,
        random_return=stage.random_return.mean,
        num_envs=config.env.num_envs * stage.ranks.size,
        window_games=config.distill.window_games,
        # A fraction of 1 keeps the teacher to the very end: the last vector step passes the number asked for.
        stop_agent_step=round(fraction * config.online.agent_steps) + (step if fraction == 1.0 else 0),
    )


def online(stage: Stage, replay: Replay, state: OnlineState, coefficient: DistillCoefficient | None) -> None:
    """Train on D_S (``replay``) alone while the student plays.

    Raises:
        Stopped: asked to stop; a checkpoint is written.
    """
    _Online(stage, replay, state, coefficient).run()


class _Online:
    def __init__(
        self, stage: Stage, replay: Replay, state: OnlineState, coefficient: DistillCoefficient | None
    ) -> None:
        self._stage, self._replay, self._state, self._coefficient = stage, replay, state, coefficient
        self._config = stage.config.online
        asked, size = stage.student.batch_spec, stage.config.optimizer.batch_size
        self._fresh_count = asked.fresh_count(size)
        self._fresh = (
            FreshRows(replay, asked.sequence_length, state.fresh_rows)
            if asked.sequence_length is not None and self._fresh_count
            else None
        )
        before = stage.config.offline.updates if stage.entry.method.offline else 0
        self._learner = Learner(stage, replay, coefficient is not None, before + state.updates, self._fresh)
        self._clock = PhaseClock(state)
        self._numbers = {"G_T": stage.teacher_return.mean} if stage.teacher_return else {}
        self._ready = False
        self._recent: deque[float] = deque(maxlen=stage.config.distill.window_games)

    def run(self) -> None:
        self._warn()
        if self._config.agent_steps == 0 and self._evaluated_already():
            return
        stage, state, env_config = self._stage, self._state, self._stage.config.env
        total = self._config.agent_steps
        with (
            make_env(
                stage.spec,
                env_config.num_envs,
                stage.seed("online", state.agent_steps) + stage.ranks.rank * env_config.num_envs,
                env_config.backend,
            ) as env,
            stage.progress.phase("online", total=total, unit="agent steps", done=state.agent_steps) as bar,
        ):
            rollout = Rollout(env, self._act(), stage.device)
            while True:
                self._clock.tick()
                if state.evaluations < points_passed(state.agent_steps, total, self._config.evaluations):
                    self._evaluate()
                if state.agent_steps >= total:
                    break
                stage.safe_point()
                self._step(rollout)
                bar.update(state.agent_steps, **self._numbers)
            self._learn()  # the last ones due
            self._log()
            bar.update(state.agent_steps, **self._numbers)  # with the last evaluation
            self._warn_unless_learnt()
            self._clock.tick()

    def _evaluated_already(self) -> bool:
        """The student that has nothing to play is the one that the offline phase has evaluated at its end.

        That measurement counts as the online phase's too: another one would only cost time and differ by
        chance.
        """
        stage, state, wanted = self._stage, self._state, self._config.evaluations
        evaluations = stage.curves.evaluations
        last = evaluations[-1] if evaluations and state.evaluations < wanted else None
        if last is not None and last.phase == "offline" and last.updates == stage.config.offline.updates:
            stage.curves.add_evaluation("online", 0, 0, last.act, last.returns, 0.0)
            state.evaluations = wanted
        return state.evaluations == wanted

    def _warn(self) -> None:
        if 0 < self._config.agent_steps <= self._config.learning_starts_agent_steps:
            self._stage.progress.say(
                f"warning: learning starts at {self._config.learning_starts_agent_steps} agent steps and the "
                f"online phase has {self._config.agent_steps}: no update will be made there; set "
                "online.learning_starts_agent_steps"
            )

    def _warn_unless_learnt(self) -> None:
        learning = self._config.agent_steps > self._config.learning_starts_agent_steps
        if learning and self._state.updates == 0:
            self._stage.progress.say(
                "warning: the online phase made no update: D_S never held what one takes "
                "(its batch or sequences are longer than the buffer or the phase)"
            )

    def _step(self, rollout: Rollout) -> None:
        state = self._state
        m = self._coefficient.value(state.agent_steps) if self._coefficient else 0.0
        state.first_m = m if state.first_m is None else state.first_m
        state.last_m = m
        self._learner.set_coefficient(m)
        rollout.begin()
        self._learn()  # while the environments step
        outcome = rollout.finish()
        self._replay.add(outcome.lanes, outcome.rows)
        played = played_by_all(self._stage, outcome)
        state.agent_steps += played.agent_steps
        for game in played.games:
            self._observe(game)
        if self._learner.flush_due:
            self._log()

    def _learn(self) -> None:
        """Make the updates that are due: an exact ratio to the agent steps, whatever the timing."""
        state, config = self._state, self._config
        if not self._can_learn():
            return
        due = self._due()
        self._learner.expect(max(0, due - state.updates))
        while state.updates < due:
            self._learner()
            state.updates += 1
        if self._fresh is not None:
            state.fresh_rows = self._fresh.next_rows
        target_updates = state.agent_steps // config.target_update_every_agent_steps
        if target_updates > state.target_updates:
            self._stage.student.sync_target()
            state.target_updates = target_updates

    def _can_learn(self) -> bool:
        """Here, and on all ranks: they agree on it once, for there is more and more to learn from."""
        here = can_learn(self._stage.student, self._replay)
        if self._stage.ranks.size == 1:
            return here
        self._ready = self._ready or self._stage.ranks.all(here)
        return self._ready

    def _due(self) -> int:
        """Updates that there should be by now: by the ratio, or as many as there are fresh sequences for."""
        state, config = self._state, self._config
        played = state.agent_steps - config.learning_starts_agent_steps
        if self._fresh is None:
            return played // config.agent_steps_per_update
        return state.updates + (self._fresh.waiting // self._fresh_count if played >= 0 else 0)

    def _evaluate(self) -> None:
        stage, state = self._stage, self._state
        self._learn()
        self._log()
        self._clock.tick()
        returns = evaluate_student(stage, "online", state.updates, state.agent_steps, state.seconds)
        self._numbers["evaluation"] = returns.mean
        state.evaluations = points_passed(
            state.agent_steps, self._config.agent_steps, self._config.evaluations
        )
        snapshot(stage, f"online-{state.agent_steps}")
        self._clock.skip()

    def _observe(self, game: Game) -> None:
        stage, state = self._stage, self._state
        if self._coefficient:
            self._coefficient.observe_game(game.env_id, game.raw_return)
        self._recent.append(game.raw_return)
        self._numbers["training_return"] = sum(self._recent) / len(self._recent)
        stage.curves.add_game(state.agent_steps, game.raw_return)
        stage.logger.scalars("online", {"game_return": game.raw_return}, state.agent_steps)

    def _log(self) -> None:
        stage, step = self._stage, self._state.agent_steps
        if self._coefficient and self._coefficient.latched_at_agent_step is not None:
            self._learner.forget(TEACHER_METRICS)  # the teacher is not asked any more
        self._numbers |= self._learner.log("online", step)
        scalars = {"epsilon": self._epsilon(), "updates": float(self._state.updates)}
        if self._coefficient:
            m, student_return = self._coefficient.value(step), self._coefficient.student_return
            stage.curves.add_coefficient(step, m, student_return)
            self._numbers["m"] = scalars["m"] = m
        stage.logger.scalars("online", scalars, step)

    def _epsilon(self) -> float:
        config = self._config
        return schedules.linear(
            config.epsilon_start,
            config.epsilon_end,
            config.epsilon_decay_agent_steps,
            self._state.agent_steps,
        )

    def _act(self) -> ActFunction:
        """The student's exploration policy."""
        student, extras = self._stage.student, self._replay.extras
        num_envs = self._stage.config.env.num_envs
        initial = memory = student.initial_state(num_envs)
        teacher = self._stage.teacher
        watch = None if teacher is None else watching(teacher)

        def act(obs: Tensor, step: EnvStep) -> Acted:
            nonlocal memory
            memory = restart_state(memory, initial, torch.from_numpy(step.game_start))
            epsilon = self._epsilon() if student.outputs == "q_values" else 0.0
            rule = ActRule("epsilon", epsilon) if student.outputs == "q_values" else ActRule("sample")
            advice = watch(obs, step) if watch is not None and self._asks_teacher() else None
            if not extras.names():
                action, log_prob, memory = student.act(obs, memory, rule)
                return Acted(action, log_prob, epsilon, advice)
            before = memory
            action, policy, memory = cast(SequenceStudent, student).act_with_policy(obs, memory, rule)
            log_prob = policy.gather(1, action[:, None])[:, 0]
            return Acted(
                action, log_prob, epsilon, advice, policy, before if extras.state_shape is not None else None
            )

        return act

    def _asks_teacher(self) -> bool:
        """The teacher's outputs are stored until m is 0 for good."""
        return self._coefficient is not None and self._coefficient.latched_at_agent_step is None
