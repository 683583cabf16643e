"""Frame-once replay: lanes of rows, one lane per environment."""

from reincarnate.replay.memory import check_fits, memory_needed
from reincarnate.replay.ring import Replay
from reincarnate.replay.rows import RowBatch

__all__ = ["Replay", "RowBatch", "check_fits", "memory_needed"]
