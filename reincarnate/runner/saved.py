"""What a checkpoint of a run has in it: written from its stage and its record, and restored into them."""

from __future__ import annotations

import dataclasses
from typing import Any

from reincarnate import phases
from reincarnate.checkpoint import CheckpointFolder
from reincarnate.curves import Curves
from reincarnate.errors import UserError
from reincarnate.phases import OfflineState, OnlineState, Stage
from reincarnate.ranks import digest
from reincarnate.replay import Replay
from reincarnate.replay.store import SegmentRecord
from reincarnate.runner.buffers import Buffers
from reincarnate.runner.record import Record
from reincarnate.types import Returns


class SavedState:
    """Saves and restores one run.

    Args:
        stage: of the run: its student, its random numbers, its curves.
        record: of the run.
        buffers: makes the D_S that is filled again.
        checkpoints: of the run directory.
        storage: where the buffers live, by name: a resumed run keeps to it.
    """

    def __init__(
        self, stage: Stage, record: Record, buffers: Buffers, checkpoints: CheckpointFolder, storage: str
    ) -> None:
        self._stage, self._record = stage, record
        self._buffers, self._checkpoints, self._storage = buffers, checkpoints, storage

    # ------------------------------------------------------------ save

    def save(self) -> None:
        """Commit a checkpoint; all ranks call it.

        Raises:
            UserError: the ranks' students are not one and the same any more.
        """
        self._record.tick()
        self._checkpoints.save(self._state(), self._tensors(), self._record.student_data)
        if self._stage.ranks.first:
            self._stage.curves.save(self._stage.folder / "curves.json")

    def _state(self) -> dict[str, Any]:
        stage, record = self._stage, self._record
        return {
            "finished": record.finished,
            "seconds": record.seconds,
            "device": str(stage.device),
            "teacher_return": stage.teacher_return and stage.teacher_return.to_dict(),
            "random_return": stage.random_return and stage.random_return.to_dict(),
            "collected": record.collected,
            "offline": dataclasses.asdict(record.offline),
            "online": dataclasses.asdict(record.online),
            "coefficient": record.coefficient and record.coefficient.state_dict(),
            "curves": stage.curves.to_dict(),
            "tensorboard": stage.logger.sizes(),
            "precision": stage.precision,
            "storage": self._storage,
        }

    def _tensors(self) -> dict[str, Any]:
        tensors = {"student": self._stage.student.state_dict(), **self._random_numbers()}
        if self._stage.ranks.size > 1:
            tensors["ranks"] = self._gather_ranks()
        return tensors

    def _random_numbers(self) -> dict[str, Any]:
        return {
            "generator": self._stage.generator.get_state(),
            "sampler": self._stage.sampler.get_state(),
        }

    def _gather_ranks(self) -> list[dict[str, Any]]:
        """Every rank's random numbers; the size of D_S over all of them goes into the record."""
        stage, replay = self._stage, self._record.student_data
        held = (replay.agent_steps, replay.nbytes) if replay is not None else (0, 0)
        weights = digest(stage.student.network.parameters())
        found = stage.ranks.gather((self._random_numbers(), held, weights))
        if len({weights for _, _, weights in found}) > 1:
            raise UserError(
                f"the ranks have come to different students: {stage.config.student!r} does not average all "
                "of its gradients (reincarnate.ranks.average_gradients); run it without torchrun"
            )
        if replay is not None:
            steps, size = (sum(each) for each in zip(*(held for _, held, _ in found), strict=True))
            self._record.all_student_data = {"agent_steps": steps, "bytes": size}
        return [numbers for numbers, _, _ in found]

    # ------------------------------------------------------------ restore

    def restore(self) -> None:
        """Put stage and record back to where the last checkpoint was made.

        Raises:
            UserError: it is damaged, or does not fit the run's configuration, which was changed, say.
        """
        try:
            self._restore()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise self._checkpoints.damaged(f"or config.json was changed: it does not fit: {told}") from None

    def _restore(self) -> None:
        state, tensors, segments = self._checkpoints.load(self._stage.device)
        self._restore_record(state)
        self._restore_stage(state, tensors)
        self._restore_coefficient(state["coefficient"])
        if segments:
            self._record.student_data = self._filled_again(segments)

    def _restore_record(self, state: dict[str, Any]) -> None:
        record = self._record
        record.finished, record.seconds = state["finished"], state["seconds"]
        record.collected = state["collected"]
        record.offline = OfflineState(**state["offline"])
        record.online = OnlineState(**state["online"])

    def _restore_stage(self, state: dict[str, Any], tensors: dict[str, Any]) -> None:
        stage = self._stage
        stage.curves = Curves.from_dict(state["curves"])
        stage.set_returns(teacher=_returns(state["teacher_return"]), random=_returns(state["random_return"]))
        stage.student.load_state_dict(tensors["student"])
        own = tensors["ranks"][stage.ranks.rank] if stage.ranks.size > 1 else tensors
        stage.generator.set_state(own["generator"].cpu())
        if "sampler" in own:  # not in checkpoints of before buffers had random numbers of their own
            stage.sampler.set_state(own["sampler"].cpu())

    def _restore_coefficient(self, saved: dict[str, Any] | None) -> None:
        if not saved:
            return
        coefficient = self._record.coefficient = phases.make_coefficient(self._stage)
        if coefficient:
            coefficient.load_state_dict(saved)

    def _filled_again(self, segments: list[SegmentRecord]) -> Replay:
        replay = self._buffers.new_student_data()
        self._checkpoints.restore_replay(segments, replay)
        return replay


def _returns(saved: dict[str, Any] | None) -> Returns | None:
    return Returns.from_dict(saved) if saved else None
