"""Measure CleanRL's own PyTorch QDagger script beside this project's phases, in turns on one machine.

    python docs/measure_beside_cleanrl.py --cleanrl CHECKOUT --cleanrl-python PYTHON --json ratios.json

CHECKOUT is a clone of CleanRL, PYTHON an interpreter with what its script imports (gymnasium 0.29, ale-py,
stable-baselines3, tyro, rich, tensorboard, the same torch). The script runs unchanged: its progress loops are
timed from outside and its teacher is a file instead of a download. Each round runs both, with the same number
of threads; what is reported are medians of the rounds' ratios. Asserts nothing about absolute time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import reincarnate
from reincarnate.bench import bench

#: Loop of CleanRL's script, by its description -> this project's phase and rate.
LOOPS = {
    "filling teacher's replay buffer": ("collect", "agent_steps_per_s"),
    "offline student training": ("offline", "updates_per_s"),
    "online student training": ("online", "agent_steps_per_s"),
}
#: The first iterations evaluate, fill buffers and choose convolution algorithms.
WARM_UP = {"collect": 200, "offline": 5, "online": 200}

# Runs in CleanRL's interpreter: argv is (teacher file, where to write, the script, its arguments...).
DRIVER = """
import json, runpy, sys, time
import torch
import ale_py.registration
ale_py.registration.register_v0_v4_envs()  # newer ones leave this to gymnasium 1
import huggingface_hub, rich.progress
teacher, written, script, *arguments = sys.argv[1:]
times = {}
def track(items, description=""):
    stamps = times.setdefault(description, [])
    for item in items:
        stamps.append(time.perf_counter())
        yield item
    stamps.append(time.perf_counter())
rich.progress.track = track
huggingface_hub.hf_hub_download = lambda **_: teacher
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
json.dump({"times": times, "threads": torch.get_num_threads()}, open(written, "w"))
"""


def cleanrl_rates(args: argparse.Namespace, teacher: Path, folder: Path) -> dict[str, float]:
    """Iterations per second of each loop of CleanRL's script; one is an agent step or an update."""
    script = Path(args.cleanrl).resolve() / "cleanrl" / "qdagger_dqn_atari_impalacnn.py"
    written = folder / "times.json"
    options = {
        "no-cuda": None,
        "teacher-eval-episodes": 1,
        "teacher-steps": args.agent_steps,
        "offline-steps": args.updates,
        "total-timesteps": args.agent_steps,
        "learning-starts": args.updates + 100,  # its counter goes on from the offline phase
        "buffer-size": 10_000,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", value) if text is not None]
    ended = subprocess.run(
        [args.cleanrl_python, "-c", DRIVER, str(teacher), str(written), str(script), *map(str, flags)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(script.parents[1]), "OMP_NUM_THREADS": str(args.threads)},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        sys.exit(f"{script} failed:\n{ended.stderr[-2_000:]}")
    found = json.loads(written.read_text())
    assert found["threads"] == args.threads, f"CleanRL ran with {found['threads']} threads"
    rates = {}
    for loop, (phase, _) in LOOPS.items():
        stamps = found["times"][loop][WARM_UP[phase] :]
        rates[phase] = (len(stamps) - 1) / (stamps[-1] - stamps[0])
    return rates


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both in turns; for each phase the rates of every round and the median ratio."""
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher = folder / "dqn_atari.cleanrl_model"
        reincarnate.export_teacher("bundled/Breakout-dqn", "cleanrl", teacher)
        for number in range(args.rounds):
            theirs = cleanrl_rates(args, teacher, folder)
            ours = bench("Breakout-v5", network="impala", num_envs=args.num_envs, seconds=args.seconds)
            rounds.append({"cleanrl": theirs, "reincarnate": ours})
            print(f"round {number + 1}/{args.rounds}: CleanRL {theirs}", file=sys.stderr)
    return {"threads": args.threads, "num_envs": args.num_envs, "rounds": rounds, "phases": _ratios(rounds)}


def _ratios(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    table = {}
    for phase, unit in LOOPS.values():
        theirs = [each["cleanrl"][phase] for each in rounds]
        ours = [each["reincarnate"][phase][unit] for each in rounds]
        table[phase] = {
            "unit": unit,
            "cleanrl": statistics.median(theirs),
            "reincarnate": statistics.median(ours),
            "ratio": statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True)),
            "fraction_of_bound": statistics.median(each["reincarnate"][phase]["fraction"] for each in rounds),
        }
    return table


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cleanrl", required=True, help="a clone of CleanRL")
    parser.add_argument("--cleanrl-python", default=sys.executable, help="interpreter for its script")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="per phase of `reincarnate bench`")
    parser.add_argument("--num-envs", type=int, default=16, help="of this project; CleanRL's script has one")
    parser.add_argument(
        "--agent-steps", type=int, default=1_000, help="of CleanRL's collecting and online loops"
    )
    parser.add_argument("--updates", type=int, default=60, help="of CleanRL's offline loop")
    parser.add_argument("--json", help="where to write everything")
    args = parser.parse_args()
    import torch

    args.threads = torch.get_num_threads()
    found = measure(args)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    for phase, row in found["phases"].items():
        print(
            f"{phase}: CleanRL {row['cleanrl']:.1f}, reincarnate {row['reincarnate']:.1f} {row['unit']}: "
            f"{row['ratio']:.2f} times, {row['fraction_of_bound']:.0%} of the bound"
        )


if __name__ == "__main__":
    main()
