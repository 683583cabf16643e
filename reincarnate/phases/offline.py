"""The offline phase: the student trains on the teacher's data alone, at m = 1."""

from __future__ import annotations

from dataclasses import dataclass

from reincarnate.errors import UserError
from reincarnate.phases.evaluation import evaluate_student
from reincarnate.phases.learner import Learner, can_learn
from reincarnate.phases.stage import PhaseClock, Stage, points_passed, snapshot
from reincarnate.replay import Replay


@dataclass
class OfflineState:
    """Counters of the offline phase, as a checkpoint stores them."""

    updates: int = 0
    evaluations: int = 0
    seconds: float = 0.0  # training alone, without evaluations


def offline(stage: Stage, replay: Replay, state: OfflineState) -> None:
    """Train on D_T (``replay``) alone (Agarwal et al. 2022: QDagger's offline pretraining).

    Raises:
        UserError: too little data to learn from.
        Stopped: asked to stop; a checkpoint is written.
    """
    config = stage.config.offline
    if config.updates and not can_learn(stage.student, replay):
        length = stage.student.batch_spec.sequence_length
        what = f"{replay.n_step}-step transition" if length is None else f"sequence of {length} rows"
        raise UserError(
            f"the teacher's data ({replay.agent_steps} agent steps in {replay.num_envs} environments) holds "
            f"no whole {what}; raise --collect-steps"
        )
    learner = Learner(stage, replay, stage.entry.method.distill, state.updates)
    learner.set_coefficient(1.0)
    learner.expect(config.updates - state.updates)
    clock = PhaseClock(state)
    with stage.progress.phase("offline", total=config.updates, unit="updates", done=state.updates) as bar:
        numbers = {"G_T": stage.teacher_return.mean} if stage.teacher_return else {}
        while True:
            clock.tick()
            if state.evaluations < points_passed(state.updates, config.updates, config.evaluations):
                learner.log("offline", state.updates)
                numbers["evaluation"] = _evaluate(stage, state)
                bar.update(state.updates, **numbers)  # the last one is made after the last update
                clock.skip()
            if state.updates >= config.updates:
                break
            stage.safe_point()
            learner()
            state.updates += 1
            if state.updates % config.target_update_every_updates == 0:
                stage.student.sync_target()
            if learner.flush_due:
                numbers |= learner.log("offline", state.updates)
            bar.update(state.updates, **numbers)
    learner.log("offline", state.updates)
    stage.student.sync_target()


def _evaluate(stage: Stage, state: OfflineState) -> float:
    returns = evaluate_student(stage, "offline", state.updates, 0, state.seconds)
    config = stage.config.offline
    state.evaluations = points_passed(state.updates, config.updates, config.evaluations)
    snapshot(stage, f"offline-{state.updates}")
    return returns.mean
