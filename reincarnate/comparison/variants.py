"""Runs that were made one by one, told apart: by their settings, and one reference for each teacher.

The runs of a method must differ in their seeds alone, or their spread is not one of seeds. Where a student's
runs have other settings too, each set of them is a method of its own: a *variant*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reincarnate.comparison.cells import Outcome, grouped, numbered
from reincarnate.errors import UserError
from reincarnate.report.page import settings_read
from reincarnate.report.rundir import short_path

#: Settings that do not change what a run learns: where it runs, how well and how often it is measured.
_NO_VARIANT = (
    "teacher",
    "teacher_seed",
    "student",
    "seed",
    "env.id",
    "env.backend",
    "evaluate.games",
    "offline.evaluations",
    "online.evaluations",
)
_NO_VARIANT_PARTS = ("system.", "versions.")
_NAMED_SETTINGS = 3  # of a variant's name
#: What makes another problem of the same environment.
_RULES = (
    "full_action_set",
    "sticky_probability",
    "frame_skip",
    "noop_max",
    "fire_reset",
    "max_agent_steps",
)


def told_apart(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same outcomes, every method of one teacher file and one set of settings.

    Raises:
        UserError: a reference that is not the same policy everywhere; one teacher that was measured under
            different acting rules.
    """
    return _with_variants(_with_one_reference(outcomes))


def other_rules(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for every environment that is not the same problem in all runs."""
    said = []
    for env, cells in grouped([each for each in outcomes if each.data], lambda each: each.env).items():
        specs = [each.data.env for each in cells if each.data]
        differing = {
            rule: sorted({str(spec[rule]) for spec in specs if rule in spec})
            for rule in _RULES
            if len({str(spec[rule]) for spec in specs if rule in spec}) > 1
        }
        if differing:
            named = "; ".join(f"{rule} {' and '.join(values)}" for rule, values in differing.items())
            said.append(f"{env} is not one problem in all runs ({named}): their scores do not compare.")
    return said


# ---------------------------------------------------------------- settings


def _with_variants(outcomes: Sequence[Outcome]) -> list[Outcome]:
    names: dict[int, str | None] = {}
    for runs in grouped(outcomes, lambda outcome: outcome.method.student).values():
        found = _variants(runs)
        # A cell that has no run yet is of the variant that its comparison's other cells are of.
        beside = {(run.method, run.run.parent): name for run, name in zip(runs, found, strict=True) if name}
        for run, name in zip(runs, found, strict=True):
            names[id(run)] = name if run.data else beside.get((run.method, run.run.parent))
    return [
        replace(outcome, method=replace(outcome.method, variant=names[id(outcome)])) for outcome in outcomes
    ]


def _variants(runs: Sequence[Outcome]) -> list[str | None]:
    """Of each run of one student, its variant; None where all have the same settings, or it has no run."""
    settings = [_settings(run) for run in runs]
    names = _varied(runs, settings)
    chosen = [{name: each[name] for name in names if name in each} for each in settings]
    distinct = list({tuple(each.items()): None for each in chosen if each})
    titles = _titles(distinct)
    return [titles.get(tuple(each.items())) for each in chosen]


def _settings(run: Outcome) -> dict[str, str]:
    """What the student reads; of the environment as it was, not as far as it was given."""
    if run.data is None:
        return {}
    rules, settings = run.data.env, {}
    for name, value in settings_read(run.data):
        part, _, leaf = name.rpartition(".")
        known = name in _NO_VARIANT or name.startswith(_NO_VARIANT_PARTS)
        if not known and (run.data.reincarnated or name != "evaluate.teacher_act"):
            settings[name] = str(rules.get(leaf, value) if part == "env" else value)
    return settings


def _varied(runs: Sequence[Outcome], settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of settings that all runs know and that differ.

    Those of the environment within one environment; of runs of different presets the preset alone, and what
    differs within one.
    """
    there = [(run, each) for run, each in zip(runs, settings, strict=True) if each]
    common = [name for name in (there[0][1] if there else {}) if all(name in each for _, each in there)]

    def place(run: Outcome, each: Mapping[str, str], name: str) -> tuple[Any, ...]:
        env = run.env if name.startswith("env.") else None
        return env, None if name == "preset" else each.get("preset")

    varied = []
    for name in common:
        values: dict[tuple[Any, ...], set[str]] = {}
        for run, each in there:
            values.setdefault(place(run, each, name), set()).add(each[name])
        if any(len(found) > 1 for found in values.values()):
            varied.append(name)
    return varied


def _titles(variants: Sequence[tuple[tuple[str, str], ...]]) -> dict[tuple[tuple[str, str], ...], str]:
    """``offline.updates=500``; of many settings the first few, and a number where those are the same."""
    short = [_title(variant, short_path) for variant in variants]
    titles = [
        title if short.count(title) == 1 else _title(variant, str)
        for variant, title in zip(variants, short, strict=True)
    ]
    return dict(zip(variants, numbered(titles), strict=True))


def _title(variant: tuple[tuple[str, str], ...], told: Callable[[str], str]) -> str:
    named = [f"{name}={told(value)}" for name, value in variant[:_NAMED_SETTINGS]]
    more = len(variant) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


# ---------------------------------------------------------------- teachers


def _with_one_reference(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """One policy that was named in two ways is one teacher, by its first name."""
    _refuse_one_name(outcomes)
    first: list[Outcome] = []
    names: dict[tuple[str | None, str], str | None] = {}
    for outcome in _taught(outcomes):
        same = next((each for each in first if _same_policy(each, outcome)), None)
        if same is None:
            first.append(outcome)
        names[outcome.method.teacher, outcome.env] = (same or outcome).method.teacher
    renamed = [
        replace(each, method=replace(each.method, teacher=names.get(key, each.method.teacher)))
        for each in outcomes
        for key in [(each.method.teacher, each.env)]
    ]
    _refuse_two_rules(renamed)
    return renamed


def _taught(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [each for each in outcomes if each.data is not None and each.method.teacher is not None]


def _same_policy(one: Outcome, other: Outcome) -> bool:
    """One file, and the same statistics of observations beside it as far as the runs know them."""
    files, policies = set(), set()
    for outcome in (one, other):
        assert outcome.data is not None
        files.add(outcome.data.result["teacher"]["sha256"])
        policies.add((outcome.data.teacher or {}).get("policy_sha256"))
    return one.env == other.env and len(files) == 1 and len(policies - {None}) <= 1


def _refuse_one_name(outcomes: Sequence[Outcome]) -> None:
    """Two teachers of one reference (``./model.pt`` of two folders) would become one."""
    known: dict[tuple[str | None, str], Outcome] = {}
    for outcome in _taught(outcomes):
        first = known.setdefault((outcome.method.teacher, outcome.env), outcome)
        if not _same_policy(first, outcome):
            raise UserError(
                f"{outcome.method.teacher} is another policy in {outcome.run} than in {first.run}; "
                "report the runs of each teacher apart"
            )


def _refuse_two_rules(outcomes: Sequence[Outcome]) -> None:
    """Games of a greedy teacher and of an exploring one have no common mean."""
    known: dict[tuple[str | None, str], Outcome] = {}
    for outcome in _taught(outcomes):
        first = known.setdefault((outcome.method.teacher, outcome.env), outcome)
        one, other = (each.data and each.data.result["teacher"]["act"] for each in (first, outcome))
        if one != other:
            raise UserError(
                f"{outcome.method.teacher} was measured with {one} in {first.run} and with {other} in "
                f"{outcome.run}; report them apart"
            )
