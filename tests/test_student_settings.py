"""Which settings a student reads: the others make no difference, and are refused where they are given."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from reincarnate.config import RunConfig, field_names, override
from reincarnate.errors import UserError
from reincarnate.runner import Run
from reincarnate.students.student import (
    StudentEntry,
    get_student,
    refuse_unread,
    settings_read_by,
    with_teacher,
)

from cli_calls import invoke, refused
from small_runs import TEACHER, quiet, same_tensors, small_config, student_weights

SCRATCH, QDAGGER = ("dqn", "muesli"), ("qdagger-dqn", "qdagger-muesli")


def unread(entry: StudentEntry) -> list[str]:
    return [name for name in field_names() if not entry.does_read(name)]


def another(config: RunConfig, name: str) -> Any:
    """A value of the setting that is not the one it has; None where there is no telling."""
    part, _, leaf = name.rpartition(".")
    value, hint = getattr(getattr(config, part), leaf), field_names()[name]
    if typing.get_origin(hint) is typing.Literal:
        return next(each for each in typing.get_args(hint) if each != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value / 2 if isinstance(value, float) else None


@pytest.mark.parametrize("name", [*SCRATCH, *QDAGGER])
def test_a_setting_that_a_student_does_not_read_makes_no_difference(
    name: str, cache: Path, tmp_path: Path
) -> None:
    short = {"offline__updates": 20, "online__agent_steps": 400, "online__evaluations": 1}
    config = small_config(student=name, **short, optimizer__batch_size=4)
    names = unread(get_student(name))
    values = {each: another(config, each) for each in names}
    changed = override(config, {each: value for each, value in values.items() if value is not None})
    assert changed != config
    for which, each in (("config", config), ("changed", changed)):
        Run.start(each, tmp_path / which, quiet()).execute()
    assert same_tensors(student_weights(tmp_path / "config"), student_weights(tmp_path / "changed"))


def test_every_setting_is_read_by_some_student() -> None:
    entries = [get_student(name) for name in (*SCRATCH, *QDAGGER)]
    assert [name for name in field_names() if not any(entry.does_read(name) for entry in entries)] == []
    parts = {name.partition(".")[0] for name in unread(get_student("qdagger-dqn"))}
    assert parts == {"muesli"}
    assert {"muesli", "collect", "offline"} <= {name.partition(".")[0] for name in unread(entries[0])}
    assert "td.n_step" in unread(get_student("qdagger-muesli"))


@pytest.mark.parametrize(
    ("student", "setting", "message"),
    [
        (
            "qdagger-dqn",
            "muesli.discount=0.9",
            "muesli.discount is a setting of muesli and qdagger-muesli; student qdagger-dqn does not read "
            "it: leave it out",
        ),
        (
            "qdagger-muesli",
            "td.n_step=1",
            "td.n_step is a setting of dqn and qdagger-dqn; student qdagger-muesli does not",
        ),
        (
            "dqn",
            "collect.agent_steps=9",
            "collect.agent_steps is a setting of qdagger-dqn and qdagger-muesli; student dqn does not read "
            "it: leave it out, or pass --student qdagger-dqn",
        ),
        ("muesli", "distill.coefficient=1", "leave it out, or pass --student qdagger-muesli"),
        ("dqn", "muesli.discont=1", "did you mean 'muesli.discount'?"),
    ],
)
def test_a_setting_of_others_is_refused_in_a_line(
    student: str, setting: str, message: str, tmp_path: Path
) -> None:
    out = ["--preset", "quick", "--out", str(tmp_path / "run")]
    line = refused(invoke("run", "--teacher", TEACHER, "--student", student, "--set", setting, *out))
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option", [["--teacher-data", "data/cartpole"], ["--collect-steps", "9"], ["--offline-updates", "9"]]
)
def test_options_for_a_teacher_s_pupil_are_refused_for_a_scratch_student(
    option: list[str], tmp_path: Path
) -> None:
    beside = ["--teacher", TEACHER, "--student", "dqn", "--out", str(tmp_path / "run")]
    assert "student dqn does not read it: leave it out, or pass --student qdagger-dqn" in refused(
        invoke("run", *beside, *option)
    )


def test_somebody_else_s_student_may_read_anything() -> None:
    theirs = dataclasses.replace(get_student("dqn"), name="theirs", reads=None)
    assert unread(theirs) == []
    refuse_unread([theirs], field_names())


def test_of_several_students_one_is_enough_and_each_gets_its_own() -> None:
    both = [get_student("qdagger-dqn"), get_student("muesli")]
    given = {"muesli.discount": "0.9", "offline.updates": "5", "seed": "3"}
    refuse_unread(both, given)
    assert settings_read_by(both[0], given) == {"offline.updates": "5", "seed": "3"}
    assert settings_read_by(both[1], given) == {"muesli.discount": "0.9", "seed": "3"}
    refuse_unread(both, ["muesli.discont"])  # `override` knows the nearest name
    assert settings_read_by(both[0], {"muesli.discont": "1"}) == {"muesli.discont": "1"}
    with pytest.raises(UserError, match=r"students dqn, qdagger-dqn do not read it: leave it out$"):
        refuse_unread([get_student("dqn"), get_student("qdagger-dqn")], given)


def test_the_student_of_the_same_learner_that_learns_from_a_teacher() -> None:
    for scratch, taught in zip(SCRATCH, QDAGGER, strict=True):
        assert with_teacher(get_student(scratch)) is get_student(taught)
    nobody_s = dataclasses.replace(get_student("dqn"), factory=lambda *_: None)
    assert with_teacher(nobody_s) is None
