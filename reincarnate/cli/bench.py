"""``reincarnate bench``."""

from __future__ import annotations

from typing import Any

import click

from reincarnate.cli.group import main, print_result, say


@main.command()
@click.option("--env", "env_id", default="Breakout-v5", show_default=True, metavar="ID")
@click.option("--student", default="qdagger-dqn", show_default=True, metavar="NAME")
@click.option("--network", default="auto", show_default=True, metavar="auto|nature|impala|mlp")
@click.option("--batch-size", type=int, help="[default: the student's own in the quick preset]")
@click.option("--num-envs", type=int, default=8, show_default=True)
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda")
@click.option("--precision", default="auto", show_default=True, metavar="auto|fp32|bf16")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="Per phase, and per bound.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def bench(as_json: bool, **options: Any) -> None:
    """Rate of each phase beside what this machine could do, measured in turns.

    Rate, bound and share (`fraction` in the JSON document) are medians over the turns, each by itself: the
    share is the median of the turns' own shares, not the quotient of the two medians.
    """
    from reincarnate.bench import bench as measure
    from reincarnate.meter import TURNS

    found = measure(announce=say, **options)

    def lines() -> list[str]:
        about = ("student", "device", "precision", "network", "batch_size", "num_envs", "env")
        sample, update = found["sample"]["seconds_per_batch"], found["sample"]["fraction_of_update"]
        return [
            ", ".join(f"{name} {found[name]}" for name in about),
            f"medians of {TURNS} turns; a share is the median of the turns' shares, not the rates' quotient",
            *(_phase_line(name, found[name]) for name in ("collect", "offline", "online")),
            f"sample   {1e3 * sample:10.2f} ms per batch, {update:.1%} of an update",
            f"memory   {found['memory']['bytes_per_transition']:10,} bytes per transition",
        ]

    print_result(found, as_json, lines)


def _phase_line(name: str, phase: dict[str, float]) -> str:
    (unit, rate), bound = next(iter(phase.items())), phase["bound"]
    words = unit.removesuffix("_per_s").replace("_", " ")
    return f"{name:<8} {rate:10,.1f} {words}/s of {bound:,.1f} possible, share {phase['fraction']:.0%}"
