"""``reincarnate compare`` and ``reincarnate report``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reincarnate.cli.group import PATH, main, print_result, say
from reincarnate.cli.run import key_value
from reincarnate.errors import UserError

if TYPE_CHECKING:
    from reincarnate.comparison import Comparison

_OUT = click.option("--out", type=PATH, metavar="DIR", help="Where the files go.")
_JSON = click.option("--json", "as_json", is_flag=True, help="compare.json on standard output.")
_TRACKER = click.option("--tracker", metavar="NAME", help="Tell a tracker of the finished runs, e.g. wandb.")


@main.command()
@click.option("--teacher", "teachers", multiple=True, metavar="REF", help="Repeat it for more teachers.")
@click.option(
    "--student", "students", multiple=True, metavar="NAME", help="Repeat it.  [default: qdagger-dqn]"
)
@click.option("--seeds", type=int, metavar="N", help="Runs of each, with seeds 1 to N.  [default: 3]")
@click.option("--preset", metavar="NAME", help="quick, default, paper or cleanrl.  [default: default]")
@click.option("--env", metavar="ID", help="Environment, where the teachers do not say or there is none.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of every run.")
@click.option("--launcher", type=click.Choice(["local", "ray", "slurm"]), default="local", show_default=True)
@click.option("--jobs", type=int, metavar="K", help="Runs at a time.  [default: local 1, else all that fit]")
@click.option("--cpus-per-cell", type=int, metavar="N", help="Cores of each run, and threads.")
@click.option("--gpus-per-cell", type=float, metavar="X", help="GPUs of each run; ray takes parts of one.")
@click.option("--ray-address", metavar="HOST:PORT", help="The cluster.  [default: the one of this machine]")
@click.option("--slurm", "slurm", multiple=True, metavar="KEY[=VALUE]", help="Option of sbatch; repeat it.")
@click.option("--no-wait", is_flag=True, help="slurm: submit the jobs and leave.")
@click.option("--resume", type=PATH, metavar="DIR", help="Go on with a comparison.")
@_TRACKER
@_OUT
@_JSON
def compare(
    teachers: tuple[str, ...],
    students: tuple[str, ...],
    seeds: int | None,
    preset: str | None,
    env: str | None,
    settings: tuple[str, ...],
    launcher: Any,
    jobs: int | None,
    cpus_per_cell: int | None,
    gpus_per_cell: float | None,
    ray_address: str | None,
    slurm: tuple[str, ...],
    no_wait: bool,
    resume: Path | None,
    tracker: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run every teacher x student x seed, and say which differences are real."""
    from reincarnate import comparison

    _check(tracker)
    options = {key: value for key, _, value in (text.partition("=") for text in slurm)}
    launch = comparison.Launch(
        launcher, cpus_per_cell, gpus_per_cell, ray_address, slurm=options, wait=not no_wait
    )
    if resume is not None:
        if teachers or students or seeds is not None or preset or env or settings or out:
            raise UserError(
                "--resume goes on with the comparison as it was planned; pass where to run it at most"
            )
        found = comparison.resume(resume, jobs=jobs, launch=launch, announce=say)
    else:
        found = comparison.compare(
            teachers,
            students or ("qdagger-dqn",),
            seeds=3 if seeds is None else seeds,
            preset=preset or "default",
            env=env,
            settings=dict(key_value(text) for text in settings),
            jobs=jobs,
            launch=launch,
            out=out,
            announce=say,
        )
    _show(found, as_json, tracker)
    if found.failed:
        _refuse_failed(found)


@main.command()
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN [RUN ...]")
@_TRACKER
@_OUT
@_JSON
def report(runs: tuple[Path, ...], tracker: str | None, out: Path | None, as_json: bool) -> None:
    """Write the report of one RUN again, or compare several RUNs (or whole comparisons) that exist.

    TensorBoard logs of CleanRL or Stable-Baselines3 among them are drawn as reference curves.
    """
    from reincarnate.comparison import report_runs, track_runs
    from reincarnate.report import read_run, write_report
    from reincarnate.runfiles import GRID_FILE

    _check(tracker)
    if len(runs) == 1 and out is None and not (runs[0] / GRID_FILE).exists():
        read = read_run(runs[0])
        written = write_report(runs[0])
        print_result(read.result, as_json, lambda: [f"wrote {path}" for path in written])
        if tracker:
            track_runs(runs, tracker, runs[0], announce=say)
        return
    _show(report_runs(runs, out), as_json, tracker)


def _check(tracker: str | None) -> None:
    """Refuse a tracker that is not there before anything runs."""
    if tracker is not None:
        from reincarnate.comparison import trackers

        trackers.load(tracker)


def _refuse_failed(found: Comparison) -> None:
    """A line per failed cell where it is seen, after hours of others, and exit code 2."""
    for name, why in found.failed.items():
        say(f"{name}: failed: {why}")
    count, of = len(found.failed), len(found.document["cells"])
    raise UserError(f"{count} of {of} cells failed; try again with --resume {found.folder}")


def _show(found: Comparison, as_json: bool, tracker: str | None) -> None:
    print_result(found.document, as_json, lambda: _lines(found.document))
    say(f"wrote {', '.join(path.name for path in found.files)} in {found.folder}")
    if tracker:
        found.track(tracker, say)


def _lines(document: Mapping[str, Any]) -> list[str]:
    from reincarnate.cli.teachers import table
    from reincarnate.comparison import pages

    lines: list[str] = []
    for title, head, rows in pages.tables(document):
        lines += [title, *table(head, rows), ""]
    return [*lines, *document["verdict"]]
