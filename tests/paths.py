"""Where the real checkpoints are; users elsewhere lack them and skip those tests."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_CHECKPOINTS = REPOSITORY.parent / "shared" / "checkpoints"
needs_checkpoints = pytest.mark.skipif(
    not SHARED_CHECKPOINTS.is_dir(), reason="the shared checkpoints are not beside this checkout"
)
