"""``reincarnate run``."""

from __future__ import annotations

import os
import textwrap
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reincarnate.cli.group import PATH, main, say
from reincarnate.config import field_names
from reincarnate.errors import UserError

if TYPE_CHECKING:
    from reincarnate.api import RunResult

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


def _settings_help() -> str:
    """Every setting by name, a paragraph per part; click leaves what follows a ``\\b`` as it is."""
    dotted = [name.partition(".") for name in field_names()]
    parts = groupby((name for name in dotted if name[1]), key=lambda name: name[0])
    lines = ["\b", "Settings for --set: network, teacher_seed, and as PART.NAME:"]
    for part, names in parts:
        text = f"{part}: " + ", ".join(leaf for _, _, leaf in names)
        lines += textwrap.wrap(text, 76, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


@main.command(epilog=_settings_help())
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
@click.option("--device", metavar="auto|cpu|cuda", help="[default: auto]")
@click.option("--precision", metavar="auto|fp32|bf16", help="Of the updates.  [default: auto]")
@click.option(
    "--buffer",
    metavar="auto|ram|cuda|disk",
    help="Where buffers are held; auto: where they fit, fastest first.",
)
@click.option(
    "--teacher-data",
    metavar="PATH|OWNER/NAME",
    help="Use this D_T, a folder or a Hub dataset, instead of collecting one.",
)
@click.option(
    "--act", metavar="RULE", help="Teacher's acting rule when evaluated: auto, greedy, sample, epsilon=X."
)
@click.option(
    "--backend", metavar="envpool|gymnasium", help="Who steps the environments.  [default: envpool]"
)
@click.option("--seed", type=str, metavar="N", help="Of everything random.  [default: 1]")
@click.option(
    "--out",
    type=PATH,
    metavar="DIR",
    help="Run directory.  [default: a new one in runs]",
)
@click.option("--checkpoint-every", type=str, metavar="SECONDS", help="For --resume.  [default: 300]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any other setting, e.g. td.n_step=1; may be repeated.",
)
@click.option(
    "--resume",
    type=PATH,
    metavar="DIR",
    help="Go on with a stopped run, as it was configured; no other option.",
)
def run(
    teacher: str | None,
    student: str | None,
    preset: str | None,
    settings: tuple[str, ...],
    out: Path | None,
    resume: Path | None,
    **options: Any,
) -> None:
    """Reincarnate a teacher into a student (or train a student from scratch).

    A student that needs no teacher (dqn, muesli) does not learn from one; it is only measured beside it.
    """
    from reincarnate import api

    given = {RUN_OPTIONS[name]: value for name, value in options.items() if value is not None}
    if resume is not None:
        if teacher or student or preset or settings or out or given:
            raise UserError("--resume goes on with the run as it was configured; pass no other option")
        _tell(api.resume(resume))
        return
    given = dict(key_value(text) for text in settings) | given  # an option of its own wins
    _tell(api.run(teacher, student or "qdagger-dqn", preset=preset or "default", out=out, settings=given))


def _tell(done: RunResult) -> None:
    """What the run came to, in one line; of several ranks the first says it."""
    from reincarnate.ranks import launched

    if os.environ.get("RANK", "0") != "0" and launched():
        return
    student, teacher = done.document["student"], done.document["teacher"]
    final = student["final_return"]
    told = [f"student {final['mean']:.1f} ± {final['std']:.1f}" if final else "student not evaluated"]
    told += [f"teacher {teacher['return']['mean']:.1f}"] if teacher else []
    told += [f"random play {done.document['random']['mean']:.1f}"]
    scales = {
        "teacher_normalized": "on the way from random play (0) to the teacher (1)",
        "human_normalized": "human-normalised (published scores)",
    }
    shares = {words: student[name]["final"] for name, words in scales.items()}
    normalised = [f"{share:.2f} {words}" for words, share in shares.items() if share is not None]
    say("; ".join((", ".join(told), *normalised, f"see {done.folder / 'report.html'}")))


def key_value(text: str) -> tuple[str, str]:
    """The two sides of a ``--set`` option."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set takes key=value, got {text!r}")
    return key.strip(), value.strip()
