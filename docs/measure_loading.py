"""Measure how long a D_T takes to load, into memory and mapped from disk.

    reincarnate teachers collect bundled/Breakout-dqn --out data --steps 500000
    python docs/measure_loading.py data --teacher bundled/Breakout-dqn

Beside it the same bytes are read once without looking at them: what the disk and the page cache allow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import reincarnate
from reincarnate.replay import Replay
from reincarnate.teachers.collect import load_teacher_data
from reincarnate.teachers.teacher import Teacher


def load(folder: Path, teacher: Teacher, frames_on_disk: bool) -> int:
    """Load as a run does; agent steps in the buffer."""

    def empty(num_envs: int, capacity: int) -> Replay:
        return Replay(
            teacher.spec.env, num_envs, capacity, n_step=3, discount=0.99, frames_on_disk=frames_on_disk
        )

    return load_teacher_data(folder, empty, teacher, teacher.spec.env).agent_steps


def read(folder: Path) -> int:
    """Every byte of the segments, once."""
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            while part := stream.read(1 << 24):
                size += len(part)
    return size


def timed(work: Callable[[], int]) -> tuple[int, float]:
    """What it returned, and seconds."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--teacher", default="bundled/Breakout-dqn")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    teacher = reincarnate.load_teacher(args.teacher)
    for number in range(args.rounds):
        size, reading = timed(lambda: read(args.folder))
        steps, ram = timed(lambda: load(args.folder, teacher, False))
        _, disk = timed(lambda: load(args.folder, teacher, True))
        print(
            f"round {number + 1}: {steps:,} agent steps, {size / 1e9:.2f} GB: reading {reading:.1f} s, "
            f"into memory {ram:.1f} s, mapped from disk {disk:.1f} s"
        )


if __name__ == "__main__":
    main()
