"""The command line: thin, one function per command; the work is in the library."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from reincarnate.errors import UserError

EXIT_USER_ERROR = 2
EXIT_STOPPED = 130

#: ``run`` option -> dotted setting; a test holds them against the configuration's own fields.
RUN_OPTIONS: dict[str, str] = {
    "env": "env.id",
    "collect_steps": "collect.agent_steps",
    "offline_updates": "offline.updates",
    "online_steps": "online.agent_steps",
    "eval_episodes": "evaluate.games",
    "num_envs": "env.num_envs",
    "batch_size": "optimizer.batch_size",
    "device": "system.device",
    "precision": "system.precision",
    "buffer": "system.buffer",
    "teacher_data": "collect.teacher_data",
    "act": "evaluate.teacher_act",
    "backend": "env.backend",
    "seed": "seed",
    "checkpoint_every": "system.checkpoint_every_seconds",
}


class _Group(click.Group):
    """Turns what a user caused into one line and exit code 2, and a stop into exit code 130."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        from reincarnate.phases import Stopped

        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.Exit as exit_:
            sys.exit(exit_.exit_code)
        except click.ClickException as error:
            _fail(error.format_message())
        except UserError as error:
            _fail(str(error))
        except OSError as error:  # full or unwritable disks; whatever else it is, it is said
            place = f"{error.filename}: " if error.filename else ""
            _fail(f"{place}{error.strerror or error}; check that it exists and can be written")
        except (Stopped, KeyboardInterrupt, click.Abort):
            sys.exit(EXIT_STOPPED)


def _fail(message: str) -> None:
    click.echo(f"reincarnate: {' '.join(message.split())}", err=True)
    sys.exit(EXIT_USER_ERROR)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="reincarnate")
def main() -> None:
    """Reincarnating reinforcement learning: reuse a policy that somebody already trained."""


@main.command()
@click.option("--teacher", metavar="REF", help="Hub repo, file, folder, run directory or bundled/NAME.")
@click.option("--student", metavar="NAME", help="See `reincarnate students list`.  [default: qdagger-dqn]")
@click.option("--env", metavar="ID", help="Environment, where the teacher does not say or there is none.")
@click.option(
    "--preset", metavar="NAME", help="quick (minutes), default, paper or cleanrl.  [default: default]"
)
@click.option("--collect-steps", type=str, metavar="N", help="Teacher agent steps in D_T.")
@click.option("--offline-updates", type=str, metavar="N", help="Updates on D_T.")
@click.option("--online-steps", type=str, metavar="N", help="Student agent steps.")
@click.option("--eval-episodes", type=str, metavar="N", help="Whole games per evaluation.")
@click.option("--num-envs", type=str, metavar="N", help="Environments stepped together.")
@click.option("--batch-size", type=str, metavar="N", help="Transitions per update.")
@click.option("--device", metavar="auto|cpu|cuda")
@click.option("--precision", metavar="auto|fp32|bf16")
@click.option(
    "--buffer", metavar="auto|ram|cuda|disk", help="Where buffers are held; so far: with the learner."
)
@click.option("--teacher-data", metavar="PATH", help="Use this D_T instead of collecting one.")
@click.option(
    "--act", metavar="RULE", help="Teacher's acting rule when evaluated: auto, greedy, sample, epsilon=X."
)
@click.option("--backend", metavar="envpool|gymnasium")
@click.option("--seed", type=str, metavar="N")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Run directory.")
@click.option("--checkpoint-every", type=str, metavar="SECONDS")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any other setting, e.g. td.n_step=1."
)
@click.option("--resume", type=click.Path(path_type=Path), metavar="DIR", help="Go on with a stopped run.")
def run(
    teacher: str | None,
    student: str | None,
    preset: str | None,
    settings: tuple[str, ...],
    out: Path | None,
    resume: Path | None,
    **options: Any,
) -> None:
    """Reincarnate a teacher into a student (or train a student from scratch)."""
    from reincarnate import api

    given = {RUN_OPTIONS[name]: value for name, value in options.items() if value is not None}
    if resume is not None:
        if teacher or student or preset or settings or out or given:
            raise UserError("--resume goes on with the run as it was configured; pass no other option")
        api.resume(resume)
        return
    given = dict(_key_value(text) for text in settings) | given  # an option of its own wins
    api.run(teacher, student or "qdagger-dqn", preset=preset or "default", out=out, settings=given)


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set takes key=value, got {text!r}")
    return key.strip(), value.strip()


@main.group()
def teachers() -> None:
    """Look at teachers, evaluate them, collect their data."""


@main.group()
def students() -> None:
    """Look at students."""


def _print(value: Any, as_json: bool, lines: Callable[[], list[str]]) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False) if as_json else "\n".join(lines()))


@students.command("list")
@click.option("--json", "as_json", is_flag=True)
def students_list(as_json: bool) -> None:
    """Every student that can be named in --student."""
    from reincarnate.students.student import registry

    rows = [{"name": e.name, "summary": e.summary, "paper": e.paper} for e in registry().values()]
    width = max(len(row["name"]) for row in rows)
    _print(
        rows, as_json, lambda: [f"{row['name']:<{width}}  {row['summary']} ({row['paper']})" for row in rows]
    )


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

    _print(rows, as_json, lines)


@teachers.command("show")
@click.argument("ref")
@click.option("--env", "env_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True)
def teachers_show(ref: str, env_id: str | None, as_json: bool) -> None:
    """Architecture, environment, hash and what was assumed of one teacher."""
    from reincarnate.teachers.zoo import show_teacher

    described = show_teacher(ref, env_id=env_id, announce=_say)
    _print(described, as_json, lambda: [f"{name}: {value}" for name, value in described.items()])


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

    measured = api.evaluate_teacher(ref, announce=_say, **options)

    def lines() -> list[str]:
        agrees = {True: "agrees with", False: "differs from", None: ""}[measured.agrees]
        claim = f"{agrees} the reported {measured.reported}" if measured.reported else "nothing is reported"
        return [f"{measured.resolved} ({measured.act}): {measured.returns}", claim]

    _print(measured.to_dict(), as_json, lines)


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

    collected = api.collect_teacher(ref, out, announce=_say, **options)
    click.echo(f"{collected.agent_steps} agent steps in {collected.folder}")


def _say(line: str) -> None:
    click.echo(line, err=True)
