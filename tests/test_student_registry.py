"""Which students there are: methods, names, broken packages, precision."""

from importlib.metadata import EntryPoint

import pytest
import torch

from reincarnate.errors import UserError
from reincarnate.students import dqn, student
from reincarnate.students.student import Method, StudentEntry, get_student, registry

from student_cases import (
    ATARI,
    CPU,
    STUDENTS,
    VECTOR,
    config,
)


def test_the_methods() -> None:
    scratch, qdagger = get_student("dqn"), get_student("qdagger-dqn")
    assert scratch.factory is qdagger.factory
    assert scratch.method == Method(needs_teacher=False, offline=False, distill=False)
    assert qdagger.method == Method(needs_teacher=True, offline=True, distill=True)


def test_unknown_students_are_answered_with_the_nearest_name() -> None:
    with pytest.raises(
        UserError, match=r"no student 'qdager-dqn' \(did you mean 'qdagger-dqn'\?\); known: dqn, muesli, q"
    ):
        get_student("qdager-dqn")


OWN = [
    EntryPoint("dqn", "reincarnate.students.dqn:SCRATCH", student.GROUP),
    EntryPoint("qdagger-dqn", "reincarnate.students.dqn:QDAGGER", student.GROUP),
    EntryPoint("muesli", "reincarnate.students.muesli.student:SCRATCH", student.GROUP),
    EntryPoint("qdagger-muesli", "reincarnate.students.muesli.student:QDAGGER", student.GROUP),
]


def offer(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    extra = [EntryPoint(name.split("__")[0], value, student.GROUP) for name, value in points.items()]
    monkeypatch.setattr(student.importlib.metadata, "entry_points", lambda group: [*extra, *OWN])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_package:ENTRY", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("reincarnate.errors:NOTHING", "AttributeError"),
        ("math:pi", "math:pi is a float, not a StudentEntry"),
        ("reincarnate.students.dqn:SCRATCH", "its entry calls itself 'dqn'"),
    ],
)
def test_a_broken_package_breaks_nobody_else(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    offer(monkeypatch, theirs=value)
    assert list(registry()) == ["dqn", "muesli", "qdagger-dqn", "qdagger-muesli"]
    assert get_student("dqn") is dqn.SCRATCH
    with pytest.raises(UserError, match=f"student 'theirs' of .* cannot be used: {message}"):
        get_student("theirs")


def test_nobody_takes_our_names_and_two_packages_cannot_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, dqn="math:pi", new__1="math:pi", new__2="math:e")
    assert get_student("dqn") is dqn.SCRATCH
    assert list(registry()) == ["dqn", "muesli", "qdagger-dqn", "qdagger-muesli"]
    with pytest.raises(UserError, match="both offer that name; uninstall one"):
        get_student("new")


@pytest.mark.parametrize("name", STUDENTS)
def test_precision_is_timed_for_images_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry: StudentEntry = get_student(name)
    timed: list[str] = []

    def choose(device: torch.device, work) -> str:
        for precision in ("fp32", "bf16"):
            work(precision)()
            timed.append(precision)
        return "bf16"

    monkeypatch.setattr(student, "choose_precision", choose)
    assert entry.choose_precision(config(), VECTOR, CPU) == "fp32"
    assert entry.choose_precision(config(system__precision="bf16"), VECTOR, CPU) == "bf16"
    assert entry.choose_precision(config(system__precision="fp32"), ATARI, CPU) == "fp32"
    assert timed == []
    assert entry.choose_precision(config(), ATARI, CPU) == "bf16"
    assert timed == ["fp32", "bf16"]
