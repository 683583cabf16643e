"""One run seed, many independent random streams."""

from __future__ import annotations

import zlib

import numpy as np


def derive(seed: int, purpose: str, count: int = 0) -> int:
    """A seed in 0..2^30 for ``purpose``: distinct per run seed, purpose and count.

    EnvPool adds the environment's number to its seed and wants an int32, hence the bound.
    """
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), count])
    return int(sequence.generate_state(1)[0] % 2**30)
