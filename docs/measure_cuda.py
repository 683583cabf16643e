"""Ten minutes on a GPU: updates captured and not, in both precisions; copies, draws, acting.

    python docs/measure_cuda.py --json measured.json

Every line of output is one measurement; a part that fails says why and the others go on. ``--device cpu``
tries the script itself. ``pytest -m cuda`` comes before it; ``reincarnate bench`` has whole phases.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from reincarnate import config as configuration
from reincarnate.acting import ActRule
from reincarnate.device import (
    PRECISIONS,
    WARM_UP_UPDATES,
    Precision,
    Step,
    host_memory,
    synchronize,
    tune,
    warm_up,
)
from reincarnate.envs import env_spec
from reincarnate.replay import Replay, RowBatch
from reincarnate.students.student import Student, blank_batch, get_student

SPEC = env_spec("Breakout-v5")
LANES = 64
Figures = dict[str, Any]


def per_second(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median of five turns; the device is waited for at the end of each."""
    rates = []
    for _ in range(5):
        synchronize(device)
        count, started = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - started < seconds / 5:
            work()
            count += 1
        synchronize(device)
        rates.append(count / (time.perf_counter() - started))
    return statistics.median(rates)


def make_update(
    name: str, network: str, batch_size: int, precision: Precision, device: torch.device
) -> tuple[Callable[[], None], torch.Generator]:
    """A student's update on a blank batch, with the distillation term."""
    settings = {"network": network, "optimizer.batch_size": batch_size}
    config = configuration.override(configuration.preset("quick", student=name), settings | {"student": name})
    generator = torch.Generator(device).manual_seed(0)
    student = get_student(name).factory(config, SPEC, device, precision, generator)
    batch = blank_batch(student.batch_spec, batch_size, SPEC, device)
    assert batch.teacher_outputs is not None
    policy, one = torch.log_softmax(batch.teacher_outputs, dim=-1), torch.ones((), device=device)

    def update() -> None:
        student.update(batch, policy, one)

    return update, generator


def updates(device: torch.device, seconds: float, sizes: list[int]) -> Iterator[Figures]:
    """Updates/s, eager and captured."""
    cases = [("qdagger-dqn", network, size) for network in ("nature", "impala") for size in sizes]
    cases += [("qdagger-muesli", "nature", size) for size in sizes if size <= 64]
    for name, network, size in cases:
        for precision in PRECISIONS:
            update, generator = make_update(name, network, size, precision, device)
            step = Step(update, device, [generator])
            warm_up(step, device)
            eager, captured = (per_second(work, device, seconds) for work in (update, step))
            found = {"eager_per_s": round(eager, 1), "captured_per_s": round(captured, 1)}
            yield {"student": name, "network": network, "batch_size": size, "precision": precision} | found


def kernels(device: torch.device, seconds: float, sizes: list[int]) -> Iterator[Figures]:
    """What one eager update launches, and whether it copies from the host or waits."""
    for network in ("nature", "impala"):
        update, _ = make_update("qdagger-dqn", network, sizes[0], "fp32", device)
        for _ in range(WARM_UP_UPDATES):
            update()
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        with profile(activities=kinds) as seen:
            update()
            synchronize(device)
        names = [event.name for event in seen.events()]
        on_device = [event for event in seen.events() if "CUDA" in str(event.device_type)]
        yield {
            "network": network,
            "kernels": len(on_device),
            "copies_from_host": sum("HtoD" in name for name in names),
            "waits": max(0, sum("Synchronize" in name for name in names) - 1),  # without this script's
        }


def copies(device: torch.device, seconds: float, sizes: list[int]) -> Iterator[Figures]:
    """GB/s from host memory, ordinary and pinned, and on the device."""
    size = 64 << 20
    there, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    sources = {
        "pageable": torch.zeros(size, dtype=torch.uint8),
        "pinned": host_memory(size, device),
        "device": other,
    }
    for name, source in sources.items():
        rate = per_second(lambda source=source: there.copy_(source, non_blocking=True), device, seconds)  # type: ignore[misc]
        yield {"copy_from": name, "gigabytes_per_s": round(rate * size / 1e9, 1)}


def draws(device: torch.device, seconds: float, sizes: list[int]) -> Iterator[Figures]:
    """Batches/s from a buffer on the device, as part of a captured step."""
    replay = Replay(SPEC, LANES, 100 * LANES, n_step=3, discount=0.99, device=device)
    for row in range(100):
        replay.add(np.arange(LANES), _rows(row, device))
    generator = torch.Generator(device).manual_seed(0)
    for size in sizes:
        step = Step(_draw(replay, size, generator), device, [generator])
        warm_up(step, device)
        yield {"draw_of": size, "per_s": round(per_second(step, device, seconds), 1)}


def _draw(replay: Replay, size: int, generator: torch.Generator) -> Callable[[], None]:
    def draw() -> None:
        replay.sample(size, generator)

    return draw


def _rows(step: int, device: torch.device) -> RowBatch:
    zeros, no = np.zeros(LANES, dtype=np.float32), np.zeros(LANES, dtype=np.bool_)
    return RowBatch(
        frame=np.full((LANES, *SPEC.obs_shape[1:]), step, dtype=np.uint8),
        action=torch.zeros(LANES, dtype=torch.int64, device=device),
        reward=zeros,
        raw_reward=zeros,
        terminal=no,
        truncated=no,
        executed=~no,
        game_start=no if step else ~no,
        teacher_outputs=torch.zeros((LANES, SPEC.num_actions), device=device),
        behaviour_log_prob=torch.zeros(LANES, device=device),
        epsilon=zeros,
    )


def acting(device: torch.device, seconds: float, sizes: list[int]) -> Iterator[Figures]:
    """Round trips/s: stacks from the host, actions back to it."""
    config = configuration.preset("quick")
    student: Student = get_student("dqn").factory(config, SPEC, device, "fp32", torch.Generator(device))
    for count in (8, 64, 256):
        obs = torch.zeros((count, *SPEC.obs_shape), dtype=torch.uint8)
        rule = ActRule("epsilon", 0.01)
        rate = per_second(
            lambda obs=obs, rule=rule: student.act(obs.to(device), None, rule)[0].cpu(),  # type: ignore[misc]
            device,
            seconds,
        )
        yield {"acting_for": count, "round_trips_per_s": round(rate, 1)}


def attempted(part: Callable[..., Iterator[Figures]], *arguments: object) -> Iterator[Figures]:
    """A part's figures; where it fails, why: the other parts are worth having."""
    try:
        yield from part(*arguments)
    except Exception as error:
        yield {"failed": f"{type(error).__name__}: {error}"}


def machine(device: torch.device) -> Figures:
    """What it was measured on."""
    found: Figures = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": str(device)}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        found |= {"memory_gb": round(total / 1e9, 1), "free_gb": round(free / 1e9, 1)}
    return found


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=1.0, help="of every measurement")
    parser.add_argument("--batch-size", type=int, action="append", help="repeat it; default 32, 256, 512")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    device = torch.device(args.device)
    tune(device)
    found = [machine(device)]
    print(found[0], flush=True)
    for part in (copies, kernels, draws, acting, updates):
        for figures in attempted(part, device, args.seconds, args.batch_size or [32, 256, 512]):
            found.append({"part": part.__name__} | figures)
            print(found[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
