"""Measure the storages of a replay buffer against each other, in one process, on frames of a real game.

    python docs/measure_buffers.py --agent-steps 50000 --json buffers.json

Fills a buffer with random play, writes it to segments as a checkpoint would, and samples it from memory, from
disk with the system's page cache warm and dropped, and compressed. Each figure is the median of several
rounds taken in turns. Asserts only that all storages give the same batches.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reincarnate.envs import env_spec, make_env
from reincarnate.replay import Replay, Sampler, make_feed
from reincarnate.replay.frames import DiskFrames, PackedFrames
from reincarnate.replay.store import SegmentStore
from reincarnate.rollout import Acted, Rollout

CPU = torch.device("cpu")


def new_replay(spec: Any, args: argparse.Namespace, **storage: Any) -> Replay:
    """An empty buffer of the size that was asked for."""
    return Replay(spec, args.num_envs, args.agent_steps, n_step=3, discount=0.99, **storage)


def play(replay: Replay, args: argparse.Namespace) -> None:
    """Random play until the buffer is full."""
    generator = torch.Generator().manual_seed(0)
    actions = replay.spec.num_actions
    with make_env(replay.spec, args.num_envs, 0, "envpool") as env:

        def act(obs: torch.Tensor, step: Any) -> Acted:
            action = torch.randint(0, actions, (args.num_envs,), generator=generator)
            zeros = torch.zeros(args.num_envs)
            return Acted(action, zeros, 1.0, torch.zeros(args.num_envs, actions))

        rollout = Rollout(env, act, CPU)
        while replay.agent_steps < args.agent_steps:
            outcome = rollout.step()
            replay.add(outcome.lanes, outcome.rows)


def drop_page_cache(folder: Path, replay: Replay) -> None:
    """Make the system forget the segments, without any rights: their pages are unmapped first."""
    frames = replay._frames
    assert isinstance(frames, DiskFrames)
    for mapped in frames._files.values():
        mapped._map.madvise(mmap.MADV_DONTNEED)
    for path in folder.glob("rows-*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """Mean seconds of a call."""
    started = time.perf_counter()
    for _ in range(rounds):
        work()
    return (time.perf_counter() - started) / rounds


def load(spec: Any, args: argparse.Namespace, segments: SegmentStore, **storage: Any) -> tuple[Replay, float]:
    """A buffer read from the segments, and the seconds that took."""
    started = time.perf_counter()
    replay = new_replay(spec, args, **storage)
    segments.load_into(replay)
    replay.freeze()
    return replay, time.perf_counter() - started


def same_batches(replays: dict[str, Replay], batch_size: int) -> None:
    """All of them give the same batches, bit for bit."""
    for number in range(3):
        generators = {name: torch.Generator().manual_seed(number) for name in replays}
        batches = [vars(replay.sample(batch_size, generators[name])) for name, replay in replays.items()]
        for batch in batches[1:]:
            assert all(torch.equal(batch[name], value) for name, value in batches[0].items())


def fed(replay: Replay, args: argparse.Namespace, update_seconds: float) -> float:
    """Seconds per update that a learner busy for ``update_seconds`` waits for batches."""
    feed = make_feed(replay, args.batch_size, Sampler(CPU, 0), CPU)
    feed.expect(args.batches)
    started = time.perf_counter()
    for _ in range(args.batches):
        feed.advance()
        feed.batch()
        time.sleep(update_seconds)
    per_update: float = (time.perf_counter() - started) / args.batches
    return per_update - update_seconds


def main() -> None:
    """Read the options, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="Breakout-v5")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--agent-steps", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=50, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the segments go; a temporary folder unless given")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        figures = measure(args, Path(name))
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures, by name."""
    spec = env_spec(args.env)
    played, segments = new_replay(spec, args), SegmentStore(folder)
    play(played, args)
    writing = time.perf_counter()
    segments.append_new(played, np.zeros(args.num_envs, dtype=np.int64))
    writing = time.perf_counter() - writing
    kinds: dict[str, dict[str, Any]] = {
        "ram": {},
        "disk": {"frames_on_disk": True},
        "zlib": {"compression": "zlib"},
    }
    if importlib.util.find_spec("lz4"):
        kinds["lz4"] = {"compression": "lz4"}
    del played
    loaded = {name: load(spec, args, segments, **kind) for name, kind in kinds.items()}
    replays = {name: replay for name, (replay, _) in loaded.items()}
    same_batches(replays, args.batch_size)
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {}

    def sample(replay: Replay) -> Callable[[], Any]:
        return lambda: replay.sample(args.batch_size, generator)

    for _ in range(args.rounds):
        for path in folder.glob("rows-*.safetensors"):
            path.read_bytes()  # the page cache is warm again
        for name, replay in replays.items():
            times.setdefault(name, []).append(seconds(sample(replay), args.batches))
        drop_page_cache(folder, replays["disk"])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        times.setdefault("disk, cache dropped", []).append(seconds(sample(replays["disk"]), args.batches))
        blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before
        times.setdefault("disk, waited for beside 15 ms of work", []).append(
            fed(replays["disk"], args, 0.015)
        )
        drop_page_cache(folder, replays["disk"])
        times.setdefault("the same, cache dropped", []).append(fed(replays["disk"], args, 0.015))
    packed = {
        name: replay._frames.packed_bytes / replay.rows
        for name, replay in replays.items()
        if isinstance(replay._frames, PackedFrames)
    }
    return {
        "env": args.env,
        "agent_steps": args.agent_steps,
        "batch_size": args.batch_size,
        "bytes_per_transition": replays["ram"].bytes_per_transition,
        "milliseconds_per_batch": {
            name: round(1e3 * statistics.median(values), 3) for name, values in times.items()
        },
        "megabytes_read_per_batch_when_dropped": round(blocks * 512 / 1e6 / args.batches, 3),
        "bytes_per_packed_frame": {name: round(value) for name, value in packed.items()},
        "seconds_to_write": round(writing, 2),
        "seconds_to_load": {name: round(spent, 2) for name, (_, spent) in loaded.items()},
    }


if __name__ == "__main__":
    main()
