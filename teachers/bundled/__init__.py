"""Small teachers that ship with the package: one folder each, a safetensors file and its model card."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def bundled_teachers() -> dict[str, Path]:
    """Name -> weights of every teacher that ships with the package; ``bundled/NAME`` refers to it."""
    root = Path(str(files(__package__)))
    return {path.parent.name: path for path in sorted(root.glob("*/teacher.safetensors"))}
