"""``reincarnate teachers ...``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reincarnate.cli.group import main, print_result, say


@main.group()
def teachers() -> None:
    """Look at teachers, evaluate them, collect their data."""


@teachers.command("list")
@click.option("--json", "as_json", is_flag=True)
def teachers_list(as_json: bool) -> None:
    """Teachers that ship with the package, are cached, or are known by name."""
    from reincarnate.teachers.zoo import list_teachers

    rows = list_teachers()

    def lines() -> list[str]:
        width = max(len(row["ref"]) for row in rows)
        return [
            f"{row['ref']:<{width}}  {row['env']}  {row['algorithm']}  {row['source']}"
            f"{'  (cached)' if row['cached'] else ''}"
            for row in rows
        ]

    print_result(rows, as_json, lines)


@teachers.command("show")
@click.argument("ref")
@click.option("--env", "env_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True)
def teachers_show(ref: str, env_id: str | None, as_json: bool) -> None:
    """Architecture, environment, hash and what was assumed of one teacher."""
    from reincarnate.teachers.zoo import show_teacher

    described = show_teacher(ref, env_id=env_id, announce=say)
    print_result(described, as_json, lambda: [f"{name}: {value}" for name, value in described.items()])


@teachers.command("eval")
@click.argument("ref")
@click.option("--env", "env_id", metavar="ID")
@click.option("--episodes", type=int, default=32, show_default=True, help="Whole games.")
@click.option("--act", "act_rule", default="auto", show_default=True, metavar="auto|greedy|sample|epsilon=X")
@click.option("--backend", default="envpool", show_default=True, type=click.Choice(["envpool", "gymnasium"]))
@click.option("--num-envs", type=int, default=8, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def teachers_eval(ref: str, as_json: bool, **options: Any) -> None:
    """Play whole games: the raw return with its interval, beside what the card claims."""
    from reincarnate import api

    measured = api.evaluate_teacher(ref, announce=say, **options)

    def lines() -> list[str]:
        agrees = {True: "agrees with", False: "differs from", None: ""}[measured.agrees]
        claim = f"{agrees} the reported {measured.reported}" if measured.reported else "nothing is reported"
        return [f"{measured.resolved} ({measured.act}): {measured.returns}", claim]

    print_result(measured.to_dict(), as_json, lines)


@teachers.command("collect")
@click.argument("ref")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR")
@click.option("--env", "env_id", metavar="ID")
@click.option("--steps", "agent_steps", type=int, default=40_000, show_default=True, help="Agent steps.")
@click.option("--epsilon", type=float, default=0.05, show_default=True, help="Of a Q-value teacher.")
@click.option("--num-envs", type=int, default=8, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--device", default="auto", show_default=True)
def teachers_collect(ref: str, out: Path, **options: Any) -> None:
    """Write a teacher's rollouts to DIR, for `run --teacher-data DIR`."""
    from reincarnate import api

    collected = api.collect_teacher(ref, out, announce=say, **options)
    click.echo(f"{collected.agent_steps} agent steps in {collected.folder}")
