"""``reincarnate teachers ...``."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reincarnate.cli.group import PATH, main, print_result, say

if TYPE_CHECKING:
    from reincarnate.api import Explain, TeacherReturn
    from reincarnate.diagnose import Diagnosis, Trial

_PLAIN_WIDTH = 160  # columns of a table that goes to a file or a pipe
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
_ENV = click.option("--env", "env_id", metavar="ID", help="Environment, where the teacher does not tell.")


@main.group()
def teachers() -> None:
    """Look at teachers, evaluate them, collect their data."""


@teachers.command("list")
@click.option("--env", metavar="ID", help="Only this environment, in any version.")
@click.option("--algorithm", metavar="NAME", help="Only this algorithm, e.g. dqn.")
@click.option("--source", type=click.Choice(["bundled", "hub", "cached"]), help="Only teachers from there.")
@_JSON
def teachers_list(env: str | None, algorithm: str | None, source: Any, as_json: bool) -> None:
    """Teachers that ship with the package, are cached, or are known by name."""
    from reincarnate.teachers.zoo import list_teachers

    rows = list_teachers(env, algorithm, source)
    if not rows:
        say("no teacher that is listed fits; any Hub repository, file or run can be a teacher all the same")
    names = ("ref", "env", "algorithm", "source")

    def lines() -> list[str]:
        cells = [[*(str(row[name] or "?") for name in names), "yes" if row["cached"] else ""] for row in rows]
        return table(["reference", *names[1:], "cached"], cells)

    print_result(rows, as_json, lines)


@teachers.command("show")
@click.argument("ref")
@_ENV
@_JSON
def teachers_show(ref: str, env_id: str | None, as_json: bool) -> None:
    """Architecture, environment, hash, returns and what was assumed of one teacher."""
    from reincarnate.teachers.zoo import show_teacher

    described = show_teacher(ref, env_id=env_id, announce=say)
    print_result(described, as_json, lambda: _described(described))


@teachers.command("eval")
@click.argument("ref")
@_ENV
@click.option("--episodes", type=int, default=32, show_default=True, help="Whole games.")
@click.option("--act", "act_rule", default="auto", show_default=True, metavar="auto|greedy|sample|epsilon=X")
@click.option("--backend", default="envpool", show_default=True, type=click.Choice(["envpool", "gymnasium"]))
@click.option(
    "--wrappers",
    type=click.Choice(["common", "sb3", "cleanrl"]),
    help="Atari wrappers of the gymnasium backend.  [default: those of the teacher's source]",
)
@click.option("--claim", metavar="'MEAN +/- STD'", help="Claimed return, instead of the card's.")
@click.option("--diagnose", is_flag=True, help="If the claim does not hold, try likely causes one by one.")
@click.option("--diagnose-always", is_flag=True, help="Try them also if it holds.")
@click.option("--num-envs", type=int, default=8, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda")
@_JSON
def teachers_eval(ref: str, as_json: bool, diagnose: bool, diagnose_always: bool, **options: Any) -> None:
    """Play whole games: the raw return with its interval, beside what the card claims."""
    from reincarnate import api

    explain: Explain = "always" if diagnose_always else "if it differs" if diagnose else "never"
    measured = api.evaluate_teacher(ref, announce=say, explain=explain, **options)
    print_result(measured.to_dict(), as_json, lambda: _measured(measured))


@teachers.command("collect")
@click.argument("ref")
@click.option("--out", type=PATH, required=True, metavar="DIR")
@_ENV
@click.option("--steps", "agent_steps", type=int, default=40_000, show_default=True, help="Agent steps.")
@click.option(
    "--epsilon", type=float, default=0.05, show_default=True, help="A Q-value teacher's exploration."
)
@click.option("--num-envs", type=int, default=8, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda")
@_JSON
def teachers_collect(ref: str, out: Path, as_json: bool, **options: Any) -> None:
    """Write a teacher's rollouts to DIR, for `run --teacher-data DIR`."""
    from reincarnate import api

    done = api.collect_teacher(ref, out, announce=say, **options)
    games = done.game_returns
    document = {
        "path": str(done.folder),
        "agent_steps": done.agent_steps,
        "reused": done.reused,
        "games": len(games),
        "mean_return": sum(games) / len(games) if games else None,
    }
    before = ", collected before" if done.reused else ""
    print_result(document, as_json, lambda: [f"{done.agent_steps} agent steps in {done.folder}{before}"])


@teachers.command("export-data")
@click.argument("data", type=PATH, metavar="DATA")
@click.option("--dataset-id", metavar="[NAMESPACE/]NAME-vN", help="Minari's name of it.")
@click.option("--out", type=PATH, metavar="DIR", help="Root of Minari's datasets.")
@_JSON
def teachers_export_data(data: Path, dataset_id: str | None, out: Path | None, as_json: bool) -> None:
    """Write DATA, the folder of a `teachers collect`, as a Minari dataset."""
    from reincarnate.teachers.minari_data import export_minari

    done = export_minari(data, dataset_id, out)
    document = {
        "dataset_id": done.dataset_id,
        "path": str(done.folder),
        "episodes": done.episodes,
        "agent_steps": done.steps,
    }
    told = f"{done.dataset_id}: {done.steps:,} agent steps of {done.episodes} episodes in {done.folder}"
    print_result(document, as_json, lambda: [told])


def _measured(measured: TeacherReturn) -> list[str]:
    agrees = {True: "agrees with the reported", False: "differs from the reported", None: "reported:"}
    reported = measured.reported
    claim = f"{agrees[measured.agrees]} {reported}" if reported else "nothing is reported"
    lines = [f"{measured.name} ({measured.act}): {measured.returns}", claim]
    lines += [measured.remark] if measured.remark else []
    if measured.diagnosis is not None:
        lines += _diagnosed(measured.diagnosis)
    elif measured.asked:
        lines.append("nothing to diagnose; --diagnose-always tries the causes all the same")
    return lines


def _diagnosed(diagnosis: Diagnosis) -> list[str]:
    def cells(trial: Trial) -> list[str]:
        if trial.returns is None:
            return [trial.cause.name, trial.cause.words, trial.problem or "", "", "", ""]
        returns = f"{trial.returns.mean:.1f} ± {trial.returns.std:.1f} ({trial.returns.n})"
        verdict = f"{trial.p:.2g} {'agrees' if trial.agrees else 'differs'}"
        cause = trial.cause
        return [cause.name, cause.words, returns, verdict, f"{trial.share:.0%}", f"{trial.p_change:.2g}"]

    head = ["cause", "setting", "return (games)", "p of the claim", "likelihood", "p of no change"]
    return ["", *table(head, [cells(trial) for trial in diagnosis.trials]), "", diagnosis.verdict]


def _described(described: dict[str, Any]) -> list[str]:
    """What ``teachers show`` holds, for people."""
    env, reported = described["env"], described["reported"]
    plain = ("ref", "resolved", "revision", "file", "sha256", "format", "algorithm", "architecture")
    rows = [[name, str(described[name])] for name in plain if described[name] is not None]
    rows.append(["parameters", f"{described['parameters']:,}"])
    rows.append(["environment", env["env_id"]])
    rows.append(["claimed return", _claimed(reported)])
    rows += [["measured return", _recalled(each)] for each in described["measured"]]
    assumed = described["assumed"]
    settings = [[name, str(value), assumed.get(name, "")] for name, value in env.items()]
    settings += [[name, "", why] for name, why in assumed.items() if name not in env]
    return [*table(None, rows), "", *table(["environment", "value", "assumed from"], settings)]


def _claimed(reported: dict[str, Any] | None) -> str:
    if reported is None:
        return "none"
    spread = "" if reported["std"] is None else f" ± {reported['std']:.1f}"
    details = [reported["source"], f"{reported['n']} games" if reported["n"] else "", reported["act"] or ""]
    return f"{reported['mean']:.1f}{spread} ({', '.join(part for part in details if part)})"


def _recalled(measured: dict[str, Any]) -> str:
    returns = measured["return"]
    where = measured["backend"] + (f" with {measured['wrappers']} wrappers" if measured["wrappers"] else "")
    return (
        f"{returns['mean']:.1f} ± {returns['std']:.1f} ({returns['n']} games, {measured['act']}, {where}, "
        f"{measured['env']['env_id']}, {measured['date'][:10]})"
    )


def table(head: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; cells may hold anything that stands in a file."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from reincarnate.wording import printable

    drawn = Table(box=None, show_header=head is not None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in head or [""] * max(map(len, rows), default=0):
        drawn.add_column(name, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(" ".join(printable(cell).split())) for cell in row))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PLAIN_WIDTH
    output = io.StringIO()
    Console(file=output, width=width, color_system=None, highlight=False).print(drawn)
    return [line.rstrip() for line in output.getvalue().splitlines()]
