"""A run's resumable state: written aside, committed by renaming one small file.

``checkpoint/state.json`` names the files that belong to it, so a crash between two files leaves the previous
checkpoint whole. The student's buffer D_S is appended in segments and never rewritten.
"""

from __future__ import annotations

import dataclasses
import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reincarnate import files
from reincarnate.errors import UserError
from reincarnate.ranks import ALONE, Ranks
from reincarnate.replay import Replay
from reincarnate.replay.store import SegmentRecord, SegmentStore

FORMAT = 1
_TENSORS = re.compile(r"tensors-\d{6,}\.pt")


def student_data_folder(run_folder: Path, rank: int = 0) -> Path:
    """Where the segments of D_S are, or of a rank's share of it."""
    return run_folder / "checkpoint" / ("student-data" if rank == 0 else f"student-data-{rank}")


class CheckpointFolder:
    """``checkpoint/`` of a run directory; of several ranks, each writes its segments and rank 0 the rest."""

    def __init__(self, run_folder: Path, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._folder = run_folder / "checkpoint"
        self._state_file = self._folder / "state.json"
        self._replay_folder = student_data_folder(run_folder, ranks.rank)
        self._store: SegmentStore | None = None
        self._marks: Any = None
        self._number = 0

    def exists(self) -> bool:
        """Whether there is a committed checkpoint."""
        return self._state_file.exists()

    def save(self, state: dict[str, Any], tensors: dict[str, Any], replay: Replay | None) -> None:
        """Commit ``state`` (JSON), ``tensors`` (nested) and D_S, if there is one; all ranks call it."""
        self._folder.mkdir(exist_ok=True)
        shards = self._ranks.gather(self._append(replay) if replay is not None else [])
        if self._ranks.first:
            self._commit(state, tensors, shards)
        self._ranks.meet()  # the old segments go only once the new list is on disk
        if self._store is not None:
            self._store.sweep()

    def _commit(
        self, state: dict[str, Any], tensors: dict[str, Any], shards: list[list[dict[str, Any]]]
    ) -> None:
        self._number += 1
        name = f"tensors-{self._number:06d}.pt"
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        files.write_bytes(self._folder / name, buffer.getvalue())
        document = {"format": FORMAT, "number": self._number, "tensors": name, "state": state}
        others = {"other_ranks": shards[1:]} if len(shards) > 1 else {}
        files.write_json(self._state_file, document | {"student_data": shards[0]} | others)
        # The tensors of the checkpoint before, and what a kill left half-written.
        for pattern in ("tensors-*.pt", ".tensors-*", ".state.json.*"):
            for stale in self._folder.glob(pattern):
                if stale.name != name:
                    stale.unlink()

    def load(self, device: torch.device) -> tuple[dict[str, Any], dict[str, Any], list[SegmentRecord]]:
        """State, tensors on ``device``, and the records of D_S's segments, of this rank's.

        Raises:
            UserError: no checkpoint, of another format, or damaged.
        """
        document = self._document()
        path = self._folder / document["tensors"]
        try:
            tensors = torch.load(path, map_location=device, weights_only=True)
        except Exception as error:
            raise UserError(
                f"{path} is missing or damaged ({type(error).__name__}); start a new run"
            ) from None
        if not isinstance(tensors, dict):
            raise UserError(f"{path} is missing or damaged (no tensors by name); start a new run")
        self._number = document["number"]
        return document["state"], tensors, document["student_data"]

    def _document(self) -> dict[str, Any]:
        """``state.json``, its entries of their kinds and D_S's segments as records."""
        document = files.read_json(self._state_file)
        if not isinstance(document, dict):
            raise self.damaged("no object")
        if document.get("format") != FORMAT:
            raise UserError(f"{self._state_file} is of another version of reincarnate; start a new run")
        if self._ranks.rank:
            document["student_data"] = self._shard(document)
        kinds = {"number": int, "tensors": str, "state": dict, "student_data": list}
        if not all(isinstance(document.get(name), kind) for name, kind in kinds.items()):
            raise self.damaged("an entry is missing or of another kind")
        if not _TENSORS.fullmatch(document["tensors"]):
            raise self.damaged(f"{document['tensors']!r} is no name of its own")
        try:
            records = [SegmentRecord(**record) for record in document["student_data"]]
        except TypeError:
            raise self.damaged("its list of segments") from None
        return document | {"student_data": records}

    def _shard(self, document: dict[str, Any]) -> Any:
        try:
            return document["other_ranks"][self._ranks.rank - 1]
        except (KeyError, IndexError, TypeError):
            raise self.damaged(f"nothing of rank {self._ranks.rank}") from None

    def damaged(self, what: str) -> UserError:
        """The error of a state that contradicts itself or the run's configuration."""
        return UserError(f"{self._state_file} is damaged ({what}); start a new run")

    def restore_replay(self, records: list[SegmentRecord], replay: Replay) -> None:
        """Fill an empty D_S from its segments; later segments, not part of the checkpoint, are dropped."""
        self._store = SegmentStore(self._replay_folder)
        self._store.restore(records)
        self._store.load_into(replay)
        self._marks = replay.marks

    def spill(self, replay: Replay) -> None:
        """Give D_S's new rows to segments between two checkpoints, so that a buffer on disk has room again.

        They count from the next checkpoint on; after a crash before it they are deleted.
        """
        self._append(replay)

    def _append(self, replay: Replay) -> list[dict[str, Any]]:
        """Write D_S's new rows, and list the segments that still hold rows of the ring."""
        if self._store is None:
            self._store = SegmentStore(self._replay_folder)
            self._store.restore([])
            self._marks = np.zeros(replay.num_envs, dtype=np.int64)
        self._marks = self._store.append_new(replay, self._marks)
        self._store.discard_before(replay.oldest)
        return [dataclasses.asdict(record) for record in self._store.records]


class CheckpointClock:
    """Says when the next checkpoint is due."""

    def __init__(self, every_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now = every_seconds, now
        self._last = now()

    def due(self) -> bool:
        """Whether ``every_seconds`` have passed since the last time it said so."""
        if self._now() - self._last < self._every:
            return False
        self.restart()
        return True

    def restart(self) -> None:
        """Count from now on."""
        self._last = self._now()
