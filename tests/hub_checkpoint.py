"""A teacher's checkpoint on the loopback Hub, and loading it from there as a user would."""

from __future__ import annotations

import pytest

from reincarnate.errors import UserError
from reincarnate.teachers.hub import Downloaded, find_and_download
from reincarnate.teachers.reference import parse_reference

from loopback_repository import Repository

SHORT = "cleanrl/Breakout-v5-dqn_atari_jax"
FULL = "cleanrl/BreakoutNoFrameskip-v4-dqn_atari_jax-seed1"
FILE = "dqn_atari_jax.cleanrl_model"
WEIGHTS = bytes(range(256)) * 400  # 100 kB, with NUL bytes: stored apart from git
OTHER = bytes(reversed(range(256))) * 400
CARD = b"# A card without NUL bytes: stored in git\n"


def checkpoint_repository() -> Repository:
    """What stands at :data:`FULL`."""
    return Repository({FILE: WEIGHTS, "README.md": CARD, "dqn_atari_jax.py": b"import jax\n"})


def load(ref: str = FULL, lines: list[str] | None = None) -> Downloaded:
    return find_and_download(parse_reference(ref), announce=None if lines is None else lines.append)


def fails(match: str, ref: str = FULL, lines: list[str] | None = None) -> None:
    with pytest.raises(UserError, match=match) as caught:
        load(ref, lines)
    assert "\n" not in str(caught.value)
    assert ref.partition("@")[0].partition(":")[0] in str(caught.value)
