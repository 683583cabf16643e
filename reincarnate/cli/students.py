"""``reincarnate students ...``."""

from __future__ import annotations

import click

from reincarnate.cli.group import main, print_result


@main.group()
def students() -> None:
    """Look at students."""


@students.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def students_list(as_json: bool) -> None:
    """Every student that can be named in --student."""
    from reincarnate.students.student import registry

    rows = [{"name": e.name, "summary": e.summary, "paper": e.paper} for e in registry().values()]
    width = max(len(row["name"]) for row in rows)
    print_result(
        rows, as_json, lambda: [f"{row['name']:<{width}}  {row['summary']} ({row['paper']})" for row in rows]
    )
