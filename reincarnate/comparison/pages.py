"""``compare.html``: one page that needs nothing else; its tables are those of the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reincarnate.comparison.cells import SHARES, Method, short_names
from reincarnate.comparison.document import interval
from reincarnate.report.page import document as html_document
from reincarnate.report.page import note, number, picture, section, sentences, table
from reincarnate.report.rundir import short_path

#: Title, column names, rows.
Table = tuple[str, list[str], list[list[str]]]
#: Of a table: each column's name, and what it says of one entry of the document.
Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]
_TITLES = {
    "learning": "Learning curves",
    "learning-time": "Learning curves on time",
    "profiles": "Performance profiles",
    "matrix": "Teacher against student",
}
#: Columns that hold words: they stand on the left, and long ones go over several lines.
_WORDS = ("teacher", "student", "environment", "first", "second", "cell", "status", "reference", "what")
_NOTES = {
    "Teachers": "G_T: mean undiscounted raw score of whole games, with a bootstrap interval over games.",
    "Students": "Score: 0 is random play, 1 what the scale says below. Interquartile mean over runs and "
    "environments; intervals by stratified bootstrap (Agarwal et al. 2021). With a handful of seeds, "
    "intervals are too narrow rather than too wide.",
    "On the way to the teacher": "The first evaluation at 50, 90 and 100 % of the run's teacher (from "
    "scratch: of the strongest one): median of the runs that got there, and how many did. Steps are the "
    "student's own, 0 is in the offline phase; time is that of training, without evaluations and the "
    "collection of the teacher's data. In all: mean over the runs, all phases; the teacher's part is in the "
    "run that paid it.",
    "Pairs": "Probability that a run of the first has a higher score than one of the second. More seeds: how "
    "many of each would decide it at level 5 % with power 80 %, if the probability stays what it is (Noether "
    "1987); 0 where it is decided.",
    "Reference curves": "What other programs logged while they trained: returns of training games, with the "
    "exploration of that moment, and no evaluations; means over the last tenth of the steps until then. They "
    "are in no other number here.",
    "Cells": "Teacher-normalised: by the run's own teacher, as it is in the table of teachers; score: by the "
    "strongest one.",
}


def tables(document: Mapping[str, Any]) -> list[Table]:
    """Every table that has a row."""
    document = _with_origins(document)
    found = [
        _table("Teachers", _TEACHERS, document["teachers"], may_be_empty="human-normalised"),
        _summary(document),
        _reaching(document),
        _table("Students over all teachers and environments", _STUDENTS, _over_all(document)),
        _table("Pairs", _PAIRS, document["pairs"]),
        _table("Reference curves", _REFERENCES, document["references"]),
        _table("Cells", _CELLS, document["cells"]),
    ]
    return [each for each in found if each[2]]


def _with_origins(document: Mapping[str, Any]) -> dict[str, Any]:
    """With the name in tables of every row's teacher: ``origin``."""
    names = short_names([teacher["ref"] for teacher in document["teachers"]])
    parts = {"teachers": "ref", "summary": "teacher", "cells": "teacher"}
    return dict(document) | {
        part: [dict(row) | {"origin": names.get(row[key]) or short_path(row[key])} for row in document[part]]
        for part, key in parts.items()
    }


def page(document: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The whole page; ``pictures`` are PNG files by the stem of their name."""
    title = "Comparison: " + ", ".join(sorted({cell["env"] for cell in document["cells"]}))
    parts = [sentences(document["verdict"])]
    for name, png in pictures.items():
        stem = next(known for known in sorted(_TITLES, key=len, reverse=True) if name.startswith(known))
        parts.append(section(_TITLES[stem], picture(_TITLES[stem], png)))
    for heading, head, rows in tables(document):
        told = note(_told(heading, document)) if heading in _NOTES else ""
        numbers = [column for column, name in enumerate(head) if name not in _WORDS]
        parts.append(section(heading, table(head, rows, numbers), told))
    return html_document(title, [*parts, note(_scales(document))])


# ---------------------------------------------------------------- tables


_TEACHERS: Columns = {
    "teacher": lambda teacher: teacher["origin"],
    "environment": lambda teacher: teacher["env"],
    "G_T": lambda teacher: number(teacher["return"]["mean"]),
    "95 % interval": lambda teacher: "[{}, {}]".format(*map(number, teacher["return"]["ci95"])),
    "games": lambda teacher: str(teacher["return"]["n"]),
    "random": lambda teacher: number(teacher["random"] and teacher["random"]["mean"]),
    "human-normalised": lambda teacher: _share(teacher["human_normalized"]),
    "D_T steps": lambda teacher: (
        " / ".join(f"{n:,}" for n in teacher["collected_agent_steps_of_runs"]) or "–"
    ),
}
_STUDENTS: Columns = {
    "student": lambda row: Method(None, row["student"], row["variant"]).learner,
    "score, IQM": lambda row: interval(row["iqm"], row["ci95"]),
    "runs": lambda row: str(row["n"]),
}
_PAIRS: Columns = {
    "first": lambda pair: pair["a"],
    "second": lambda pair: pair["b"],
    "probability of improvement": lambda pair: interval(pair["probability_of_improvement"], pair["ci95"]),
    "more seeds": lambda pair: (
        "no number" if pair["more_seeds_needed"] is None else str(pair["more_seeds_needed"])
    ),
}
_REFERENCES: Columns = {
    "reference": lambda each: each["name"],
    "environment": lambda each: each["env"],
    "what": lambda each: f"{each['kind']} ({each['tag']})",
    "runs": lambda each: str(each["runs"]),
    "agent steps": lambda each: f"{each['agent_steps']:,}",
    "at step": lambda each: f"{each['return_at']['agent_steps']:,}",
    "return there": lambda each: number(each["return_at"]["mean"]),
    "last return": lambda each: number(each["last_return"]),
}
_CELLS: Columns = {
    "cell": lambda cell: f"{Method.of(cell).learner} {'from ' if cell['teacher'] else ''}{cell['origin']}",
    "environment": lambda cell: cell["env"],
    "seed": lambda cell: str(cell["seed"]),
    "status": lambda cell: cell["status"] + (f": {cell['error']}" if cell["error"] else ""),
    "offline": lambda cell: number(cell["offline"]),
    "final": lambda cell: number(cell["final"]),
    "teacher-norm.": lambda cell: _share(cell["teacher_normalized"]),
    "score": lambda cell: _share(cell["score"]),
    "steps to 90%": lambda cell: _or_dash(cell["agent_steps_to"]["0.9"], "{:,}"),
}


def _table(
    title: str, columns: Columns, entries: Sequence[Mapping[str, Any]], may_be_empty: str | None = None
) -> Table:
    rows = [[write(entry) for write in columns.values()] for entry in entries]
    if may_be_empty is None:
        return title, list(columns), rows
    return title, *_without_empty(may_be_empty, list(columns), rows)


def _over_all(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Students over all teachers and environments, where the summary does not say the same already."""
    rows = document["students"]["summary"]
    several = len(document["summary"]) > len(rows)
    return [row for row in rows if several and row["iqm"] is not None]


def _summary(document: Mapping[str, Any]) -> Table:
    """Means over the finished cells of each teacher and student, the best first."""
    head = ["student", "teacher", "score, IQM", "runs", "offline", "final", "teacher-norm.", "human-norm."]
    rows = [_summary_row(row, _done(document, row)) for row in _ranked(document)]
    return "Students", *_without_empty("human-norm.", head, rows)


def _summary_row(row: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> list[str]:
    one_env = len({cell["env"] for cell in cells}) == 1
    return [
        *_method(row),
        "–" if row["iqm"] is None else interval(row["iqm"], row["ci95"]),
        str(row["n"]),
        *(number(_mean(cells, name)) if one_env else "–" for name in ("offline", "final")),
        *(_share(_mean(cells, name)) for name in ("teacher_normalized", "human_normalized")),
    ]


def _reaching(document: Mapping[str, Any]) -> Table:
    """When the finished cells of each teacher and student first played like the teacher, and their cost."""
    head = ["student", "teacher", *(f"steps to {share:.0%}" for share in SHARES)]
    head += [*(f"time to {share:.0%}" for share in SHARES), "time in all"]
    rows = []
    for row in _ranked(document):
        cells = _done(document, row)
        steps = [_reached([cell["agent_steps_to"][str(share)] for cell in cells], _count) for share in SHARES]
        times = [_reached([cell["seconds_to"][str(share)] for cell in cells], _duration) for share in SHARES]
        rows.append([*_method(row), *steps, *times, _duration(_mean(cells, "seconds"))])
    return "On the way to the teacher", head, rows


def _ranked(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The summary, the best first."""
    return sorted(document["summary"], key=lambda row: math.inf if row["iqm"] is None else -row["iqm"])


def _done(document: Mapping[str, Any], row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The finished cells of a teacher and student."""
    return [
        cell for cell in document["cells"] if Method.of(cell) == Method.of(row) and cell["status"] == "done"
    ]


def _method(row: Mapping[str, Any]) -> tuple[str, str]:
    return Method.of(row).learner, row["origin"]


def _mean(cells: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [cell[name] for cell in cells if cell[name] is not None]
    return sum(values) / len(values) if values else None


def _without_empty(name: str, head: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Without the column of this name where it says nothing, as human scores of CartPole: lines are short."""
    column = head.index(name)
    if any(row[column] != "–" for row in rows):
        return head, rows
    return [each for each in head if each != name], [row[:column] + row[column + 1 :] for row in rows]


# ---------------------------------------------------------------- words


def _reached(values: Sequence[float | None], written: Callable[[float], str]) -> str:
    """Median of those that got there, and how many did: ``2,400 (2 of 3)``."""
    got = sorted(value for value in values if value is not None)
    if not got:
        return "never" if values else "–"
    middle = (got[(len(got) - 1) // 2] + got[len(got) // 2]) / 2
    return written(middle) + ("" if len(got) == len(values) else f" ({len(got)} of {len(values)})")


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    """E.g. ``42 s``, ``3.5 min``, ``12.1 h``."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _told(heading: str, document: Mapping[str, Any]) -> str:
    """The note of a table."""
    if heading != "Teachers":
        return _NOTES[heading]
    once = all(teacher["measurements"] == 1 for teacher in document["teachers"])
    how = (
        "Each was measured once and is" if once else "The games of all measurements of a teacher are pooled:"
    )
    return f"{_NOTES[heading]} {how} the same for all students."


def _scales(document: Mapping[str, Any]) -> str:
    told = [
        f"{env}: 0 is {number(scale['zero'])}, 1 is {number(scale['one'])} ({short_path(scale['one_is'])})"
        for env, scale in document["scales"].items()
    ]
    return f"Scales of the score. {'; '.join(told)}." if told else "Nothing was measured yet."


def _share(value: float | None) -> str:
    return _or_dash(value, "{:.2f}")


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
