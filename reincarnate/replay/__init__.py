"""Frame-once replay: lanes of rows, one lane per environment."""

from reincarnate.replay.feed import Feed, Sampler, make_feed
from reincarnate.replay.memory import memory_needed
from reincarnate.replay.ring import Replay
from reincarnate.replay.rows import NO_EXTRAS, Extras, RowBatch
from reincarnate.replay.sequences import (
    FreshRows,
    SequenceDraws,
    SequenceFeed,
    sequences_stored,
)
from reincarnate.replay.storage import Buffer, Choice, Storage

__all__ = [
    "NO_EXTRAS",
    "Buffer",
    "Choice",
    "Extras",
    "Feed",
    "FreshRows",
    "Replay",
    "RowBatch",
    "Sampler",
    "SequenceDraws",
    "SequenceFeed",
    "Storage",
    "make_feed",
    "memory_needed",
    "sequences_stored",
]
