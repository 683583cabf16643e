"""``report.html``: one page that needs nothing else, the pictures inside it. Every text is escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reincarnate.errors import UserError
from reincarnate.report.rundir import RunData
from reincarnate.students.student import get_student, settings_read_by
from reincarnate.types import Returns

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .5rem 0; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid #ddd;
         overflow-wrap: break-word; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { font-weight: 600; } .note { color: #555; font-size: .9rem; } summary { cursor: pointer; }
"""


def page(run: RunData, curves: bytes, losses: bytes | None) -> str:
    """The whole page; the pictures are PNG files, ``losses`` None where nothing was learnt."""
    title = run.title
    parts = [sentences([verdict(run)]), picture("curves of this run", curves)]
    parts += [section("Returns", _returns_table(run), _returns_note(run))]
    if run.teacher is not None:
        parts.append(section(teacher_title(run), table(("", ""), teacher_rows(run), numbers=())))
    parts += [section("Phases", _phases_table(run)), section("Buffers", _buffers_table(run))]
    if losses is not None:
        parts.append(section("Losses", picture("losses of this run", losses)))
    parts.append(_folded("Settings", table(("setting", "value"), settings_read(run), numbers=())))
    parts.append(_folded("Machine and versions", table(("", ""), _machine_rows(run), numbers=())))
    return document(title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A page under ``title`` that needs nothing else; ``parts`` are HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join((f"<h1>{_text(title)}</h1>", *parts))
        + "\n</body>\n</html>\n"
    )


def verdict(run: RunData) -> str:
    """The outcome in a sentence or two."""
    status, teacher, random = run.result["status"], run.returns("teacher"), run.returns("random")
    said = [] if status == "done" else [f"This run is {status}; what follows is what it knows so far."]
    above = teacher is not None and random is not None and teacher.mean > random.mean
    if teacher is not None and random is not None and not above:
        said.append("The teacher's mean return is not above random play's.")
    if teacher is not None and not run.reincarnated:
        said.append("The student learnt from scratch; the teacher was only measured beside it.")
    for name in ("offline", "final"):
        returns, share = run.returns(name), run.normalized(name)
        if returns is not None:
            of_teacher = ""
            if above and share is not None:
                of_teacher = f", {100 * share:.0f} % of the teacher's (random play is 0 %)"
            moment = run.moment(name)
            said.append(f"After {moment} the student's mean return is {number(returns.mean)}{of_teacher}.")
    latched = run.result["distill"].get("latched_at_agent_step")
    if latched is not None:
        said.append(f"From agent step {latched:,} on it learnt without the teacher.")
    return " ".join(said) or "The student has not been evaluated yet."


def teacher_title(run: RunData) -> str:
    """Of the section that describes the teacher."""
    return "Teacher" if run.reincarnated else "Teacher, not learnt from"


def teacher_rows(run: RunData) -> list[tuple[str, Any]]:
    """Where the teacher came from and what was assumed of it; empty without a teacher."""
    teacher = run.teacher or {}
    names = ("ref", "resolved", "revision", "file", "sha256", "format", "algorithm", "architecture")
    rows = [(name, teacher[name]) for name in names if teacher.get(name) is not None]
    reported = teacher.get("reported")
    if reported:
        spread = "" if reported.get("std") is None else f" ± {number(reported['std'])}"
        rows.append(("reported return", f"{number(reported['mean'])}{spread} ({reported.get('source')})"))
    assumed = teacher.get("assumed") or {}
    return rows + [(f"assumed {name}", why) for name, why in assumed.items()]


def settings_read(run: RunData) -> list[tuple[str, Any]]:
    """The run's settings that its student reads; all of them where the student is not installed here."""
    settings = dict(flat({name: value for name, value in run.config.items() if name != "versions"}))
    try:
        return list(settings_read_by(get_student(run.result["student"]["name"]), settings).items())
    except UserError:
        return list(settings.items())


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as dotted names."""
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value))
    return rows


def number(value: float | None) -> str:
    """One decimal and thousands separated; a dash for None."""
    return "–" if value is None else f"{value:,.1f}"


def shares(run: RunData, name: str) -> list[str]:
    """One of the run's returns on each of its scales; a dash where it has no place there."""
    found = [place(name) for place in run.scales.values()]
    return ["–" if share is None else f"{share:.3f}" for share in found]


def normalised(run: RunData) -> list[str]:
    """A sentence on each scale that the run's returns are on."""
    said = []
    if run.returns("teacher") is not None:
        said.append("Teacher-normalised is (return − random) / (teacher − random).")
    if run.human_scores is not None:
        random, human = map(number, run.human_scores)
        said.append(
            "Human-normalised is (return − random) / (human − random) with the published scores of this "
            f"game, random {random} and human {human} (Mnih et al. 2015, Wang et al. 2016)."
        )
    return said


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] | None = None) -> str:
    """An HTML table; columns in ``numbers`` (all but the first, unless given) are right-aligned."""
    right = set(range(1, len(head)) if numbers is None else numbers)

    def row(cells: Sequence[Any], tag: str) -> str:
        marks = [' class="number"' if column in right else "" for column in range(len(cells))]
        inside = (f"<{tag}{mark}>{_text(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True))
        return f"<tr>{''.join(inside)}</tr>"

    header = [row(head, "th")] if any(head) else []
    return "\n".join(("<table>", *header, *(row(cells, "td") for cells in rows), "</table>"))


def _text(value: Any) -> str:
    return html.escape("–" if value is None else str(value))


def section(title: str, *parts: str) -> str:
    """A heading and what stands below it; empty parts are left out."""
    return "\n".join((f"<h2>{_text(title)}</h2>", *(part for part in parts if part)))


def _folded(title: str, inside: str) -> str:
    return f"<details>\n<summary><strong>{_text(title)}</strong></summary>\n{inside}\n</details>"


def sentences(said: Iterable[str]) -> str:
    """A paragraph."""
    return f"<p>{_text(' '.join(said))}</p>"


def note(text: str) -> str:
    """A paragraph in small print."""
    return f'<p class="note">{_text(text)}</p>'


def picture(words: str, png: bytes) -> str:
    """A PNG file inside the page; ``words`` for those who do not see it."""
    data = base64.b64encode(png).decode()
    return f'<p><img alt="{_text(words)}" src="data:image/png;base64,{data}"></p>'


def _returns_table(run: RunData) -> str:
    student = run.result["student"]
    rules = {"teacher": (run.result["teacher"] or {}).get("act"), "random": "uniform"}
    names = {
        "teacher": "teacher (G_T)",
        "random": "random policy (G_random)",
        "offline": f"{student['name']} after {run.moment('offline')}",
        "final": f"{student['name']} after {run.moment('final')}",
    }
    rows = []
    for name, label in names.items():
        returns = run.returns(name)
        if returns is not None:
            rule = rules.get(name, student["act"])
            rows.append((label, *_return_cells(returns), rule, *shares(run, name)))
    head = ("", "mean return", "95 % interval", "std", "games", "acts by", *run.scales)
    return table(head, rows, numbers=(1, 2, 3, 4, 6, 7))


def _return_cells(returns: Returns) -> tuple[str, ...]:
    low, high = returns.ci95
    interval = f"[{number(low)}, {number(high)}]"
    return number(returns.mean), interval, number(returns.std), f"{returns.n:,}"


def _returns_note(run: RunData) -> str:
    measured = "Undiscounted raw score of whole games; the interval is a bootstrap over games."
    return note(" ".join((measured, *normalised(run))))


def _phases_table(run: RunData) -> str:
    phases = run.result["phases"]
    rows = [
        _phase_row("evaluate teacher and random", phases["evaluate"], None, None, ""),
        _phase_row("collect", phases["collect"], "agent_steps", "agent_steps_per_s", "agent steps"),
        _phase_row("offline", phases["offline"], "updates", "updates_per_s", "updates"),
        _phase_row("online", phases["online"], "agent_steps", "agent_steps_per_s", "agent steps"),
    ]
    return table(("phase", "amount", "seconds", "rate"), [row for row in rows if row is not None])


def _phase_row(
    label: str, phase: Mapping[str, Any], amount: str | None, rate: str | None, unit: str
) -> tuple[str, ...] | None:
    if phase.get("seconds") is None:
        return None
    done = "" if amount is None else f"{phase[amount]:,} {unit}"
    if phase.get("reused"):
        done += " (reused)"
    per_second = "" if rate is None or phase[rate] is None else f"{number(phase[rate])} {unit}/s"
    return label, done, number(phase["seconds"]), per_second


def _buffers_table(run: RunData) -> str:
    rows = []
    for name, label in (("teacher", "teacher data D_T"), ("student", "student data D_S")):
        buffer = run.result["buffers"][name]
        if buffer.get("agent_steps"):
            size = buffer.get("bytes")
            rows.append(
                (label, f"{buffer['agent_steps']:,}", "–" if size is None else f"{size / 2**20:,.1f}")
            )
    return table(("buffer", "agent steps", "MiB"), rows)


def _machine_rows(run: RunData) -> list[tuple[str, Any]]:
    result = run.result
    machine = [(name, result.get(name)) for name in ("device", "precision", "seed")]
    return [*machine, *result["versions"].items()]
