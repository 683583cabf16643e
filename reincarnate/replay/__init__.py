"""Frame-once replay: lanes of rows, one lane per environment."""

from reincarnate.replay.feed import Feed, Sampler, make_feed
from reincarnate.replay.memory import memory_needed
from reincarnate.replay.ring import Replay
from reincarnate.replay.rows import RowBatch
from reincarnate.replay.storage import Buffer, Choice, Storage

__all__ = [
    "Buffer",
    "Choice",
    "Feed",
    "Replay",
    "RowBatch",
    "Sampler",
    "Storage",
    "make_feed",
    "memory_needed",
]
