"""Measure updates of the DQN student with torch.compile around its networks, beside the same without it.

    python docs/measure_compile.py --network nature --network impala

Both learners take turns in one process; what is printed per network is the seconds that compiling took, the
median over the rounds of how much faster the compiled update is, and the range of that.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import cast

import torch

from reincarnate import config as configuration
from reincarnate.device import Precision, tune
from reincarnate.envs import env_spec
from reincarnate.networks import Network
from reincarnate.students.dqn import Dqn
from reincarnate.students.student import TRANSITIONS, blank_batch
from reincarnate.types import Batch

CPU = torch.device("cpu")


def learner(network: str, precision: Precision, compiled: bool) -> Dqn:
    """The quick preset's learner for Breakout; its two networks compiled if asked."""
    config = configuration.override(configuration.preset("quick"), {"network": network})
    made = Dqn(config, env_spec("Breakout-v5"), CPU, precision, torch.Generator().manual_seed(0))
    if compiled:
        made.network = cast(Network, torch.compile(made.network))
        made.target = cast(Network, torch.compile(made.target))
    return made


def seconds_per_update(made: Dqn, batch: Batch, updates: int) -> float:
    """Mean over ``updates``, with the distillation term."""
    policy = torch.log_softmax(torch.zeros(len(batch.action), batch.teacher_outputs.shape[1]), dim=1)
    one, started = torch.ones(()), time.perf_counter()
    for _ in range(updates):
        made.update(batch, policy, one)
    return (time.perf_counter() - started) / updates


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", action="append", choices=["nature", "impala"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--updates", type=int, default=20, help="per round")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    tune(CPU)
    batch = cast(Batch, blank_batch(TRANSITIONS, 32, env_spec("Breakout-v5"), CPU))
    for network in args.network or ["nature", "impala"]:
        plain, compiled = (learner(network, args.precision, choice) for choice in (False, True))
        seconds_per_update(plain, batch, 3)
        compiling = seconds_per_update(compiled, batch, 1)
        seconds_per_update(compiled, batch, 3)
        ratios = [
            seconds_per_update(plain, batch, args.updates) / seconds_per_update(compiled, batch, args.updates)
            for _ in range(args.rounds)
        ]
        print(
            f"{network}: compiled in {compiling:.0f} s, then {statistics.median(ratios):.2f} times as fast "
            f"({min(ratios):.2f} to {max(ratios):.2f}), {torch.get_num_threads()} threads",
            flush=True,
        )


if __name__ == "__main__":
    main()
