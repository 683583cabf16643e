"""``reincarnate teachers export``."""

from __future__ import annotations

from pathlib import Path

import click

from reincarnate.cli.group import PATH, print_result, say
from reincarnate.cli.teachers import teachers


@teachers.command("export")
@click.argument("ref")
@click.option("--format", required=True, metavar="native|cleanrl|cleanrl-jax", help="See docs/sharing.md.")
@click.option(
    "--out",
    type=PATH,
    required=True,
    metavar="FILE",
    help="A file, or a folder, in which the file gets its format's usual name.",
)
@click.option("--env", "env_id", metavar="ID", help="Environment, where the teacher does not tell.")
@click.option("--force", is_flag=True, help="Write over a file that exists.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def teachers_export(ref: str, format: str, out: Path, env_id: str | None, force: bool, as_json: bool) -> None:
    """Write a teacher, or a run's student, in this project's format or in CleanRL's."""
    from reincarnate.teachers.export import export_teacher

    exported = export_teacher(ref, format, out, env_id=env_id, force=force, announce=say)

    def lines() -> list[str]:
        made_for = f" (CleanRL's {exported.script}, {exported.env_id})" if exported.script else ""
        return [f"{exported.path}{made_for}", *(f"note: {note}" for note in exported.notes)]

    print_result(exported.to_dict(), as_json, lines)
