"""Run the same quick runs in float32 and in bfloat16, and print the returns that students reach.

    python docs/measure_bf16_learning.py --out runs/precision --seeds 1 2 3
    python docs/measure_bf16_learning.py --out runs/precision --seeds 1 2 3 --rounded

``--rounded`` is for a CPU without bfloat16 units, where PyTorch's own kernels are a hundred times slower than
float32. Convolutions and linear layers then take operands rounded to bfloat16, multiply and sum in float32,
and round the result, forwards and backwards: what such units do. The rest is the run's own bfloat16 path.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import reincarnate


def rounded(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``operation`` as bfloat16 units with float32 sums compute it, wherever autocast asks for bfloat16."""

    def compute(*tensors: Tensor | None, **options: Any) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return operation(*tensors, **options)
        with torch.autocast("cpu", enabled=False):
            result = operation(*(_through_bfloat16(tensor) for tensor in tensors), **options)
            return result.to(torch.bfloat16)

    return compute


def _through_bfloat16(tensor: Any) -> Any:
    return tensor.to(torch.bfloat16).float() if isinstance(tensor, Tensor) else tensor


def returns(teacher: str, precision: str, seed: int, out: Path) -> tuple[float, float]:
    """Mean returns after the offline phase and at the end of one quick run."""
    settings = {
        "seed": seed,
        "teacher_seed": 1,  # one G_T and one D_T for all
        "system.device": "cpu",
        "system.precision": precision,
    }
    student = reincarnate.run(teacher, preset="quick", out=out, settings=settings).document["student"]
    return student["offline_return"]["mean"], student["final_return"]["mean"]


def main() -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", default="bundled/Breakout-dqn")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounded", action="store_true")
    args = parser.parse_args()
    if args.rounded:
        functional.conv2d = rounded(functional.conv2d)
        functional.linear = rounded(functional.linear)
    for seed in args.seeds:
        for precision in ("fp32", "bf16"):
            offline, final = returns(args.teacher, precision, seed, args.out / f"{precision}-{seed}")
            print(f"seed {seed}, {precision}: offline {offline:.1f}, final {final:.1f}", flush=True)


if __name__ == "__main__":
    main()
