"""The grid of a comparison (``grid.json``): which runs it is made of, checked before any of them starts."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reincarnate import files
from reincarnate.config import RunConfig, override
from reincarnate.device import pick_device
from reincarnate.envs import env_spec
from reincarnate.errors import UserError
from reincarnate.launching.cell import Cell
from reincarnate.prepare import ENV_OVERRIDES, configured, refuse_unfit
from reincarnate.replay.storage import refuse_impossible
from reincarnate.report.rundir import short_path
from reincarnate.runfiles import GRID_FILE, exact_reference
from reincarnate.students.student import StudentEntry, get_student, refuse_unread, settings_read_by
from reincarnate.teachers.shared_data import exact_text
from reincarnate.teachers.teacher import Teacher
from reincarnate.teachers.zoo import load_teacher
from reincarnate.types import EnvSpec

FORMAT = 1
#: Of the teacher's part (G_T, G_random, D_T), which all cells share, unless ``teacher_seed`` is set.
TEACHER_SEED = 1
_OPTIONS = {
    "teacher": "--teacher",
    "student": "--student",
    "preset": "--preset",
    "seed": "--seeds",
    "env.id": "--env",
}


@dataclass(frozen=True)
class Grid:
    """All cells, in the order in which they start."""

    cells: tuple[Cell, ...]
    teachers: tuple[dict[str, str], ...]  # ref, exact (reference), sha256, env
    settings: dict[str, str]
    preset: str

    def to_dict(self) -> dict[str, Any]:
        """What ``grid.json`` holds."""
        return {"format": FORMAT} | dataclasses.asdict(self)

    def save(self, folder: Path) -> None:
        """Make ``folder`` a comparison."""
        files.write_json(folder / GRID_FILE, self.to_dict())

    @classmethod
    def load(cls, folder: Path) -> Grid:
        """Read back what :meth:`save` wrote.

        Raises:
            UserError: no comparison there, damaged, or of another version.
        """
        path = folder / GRID_FILE
        if not path.is_file():
            raise UserError(f"{folder} holds no comparison (no {GRID_FILE}); start one with --out {folder}")
        values = files.read_json(path)
        try:
            if values["format"] != FORMAT:
                raise UserError(f"{path} has format {values['format']!r}, known is {FORMAT}")
            cells = tuple(Cell(**cell | {"arguments": tuple(cell["arguments"])}) for cell in values["cells"])
            return cls(cells, tuple(values["teachers"]), values["settings"], values["preset"])
        except (KeyError, TypeError):
            raise UserError(f"{path} is damaged; start a new comparison") from None


def plan(
    teachers: Sequence[str],
    students: Sequence[str],
    seeds: Sequence[int],
    *,
    preset: str,
    env: str | None,
    settings: Mapping[str, Any],
    announce: Callable[[str], None],
    here: bool = True,
) -> Grid:
    """Teacher x student x seed; a student that needs no teacher once per environment and seed.

    ``here``: the cells run on this machine, which must have their device.

    Raises:
        UserError: anything in it that no run would accept; nothing to compare.
    """
    for what, values in (("teacher", teachers), ("student", students), ("seed", seeds)):
        repeated = {value for value in values if list(values).count(value) > 1}
        if repeated:
            raise UserError(f"{what} {repeated.pop()!r} is given twice; every {what} once")
    for seed in seeds:
        override(RunConfig(), {"seed": seed})
    entries = [get_student(name) for name in students]
    needing = [entry.name for entry in entries if entry.method.needs_teacher]
    if needing and not teachers:
        raise UserError(f"student {needing[0]!r} needs a teacher: pass --teacher REF")
    if teachers and not needing:
        raise UserError("no student in it learns from a teacher; add one, e.g. --student qdagger-dqn")
    given = _checked(settings)
    refuse_unread(entries, given)
    loaded = [(ref, load_teacher(ref, env_id=env, announce=announce)) for ref in teachers]
    _refuse_same(loaded)
    builder = _Builder(preset, given, env, announce, here)
    cells: list[Cell] = []
    for seed in seeds:
        for entry in entries:
            if not entry.method.needs_teacher:
                cells += builder.scratch(entry, seed, [teacher for _, teacher in loaded])
            else:
                cells += [builder.from_teacher(entry, seed, ref, teacher) for ref, teacher in loaded]
    described = tuple(_described(ref, teacher) for ref, teacher in loaded)
    return Grid(tuple(cells), described, given, preset)


def _checked(settings: Mapping[str, Any]) -> dict[str, str]:
    for name, option in _OPTIONS.items():
        if name in settings:
            raise UserError(f"{name} is not a setting of a comparison; pass it as {option}")
    texts = {name: "none" if value is None else str(value) for name, value in settings.items()}
    if "collect.teacher_data" in texts:  # cells run in other folders and on other machines
        texts["collect.teacher_data"] = exact_text(texts["collect.teacher_data"])
    return {"teacher_seed": str(TEACHER_SEED)} | texts


def _refuse_same(loaded: Sequence[tuple[str, Teacher]]) -> None:
    """One policy twice, be it in two files: as two teachers it would seem to differ by noise alone."""
    for (one, first), (other, second) in itertools.combinations(loaded, 2):
        if _same_policy(first, second):
            raise UserError(f"{one} and {other} are the same policy; every teacher once")


def _same_policy(one: Teacher, other: Teacher) -> bool:
    first, second = (
        (spec.env.env_id, spec.network, spec.network_options, spec.outputs) for spec in (one.spec, other.spec)
    )
    ours, theirs = one.network.state_dict(), other.network.state_dict()
    return first == second and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def _described(ref: str, teacher: Teacher) -> dict[str, str]:
    card = teacher.card
    return {"ref": ref, "exact": _exact(teacher), "sha256": card.sha256, "env": teacher.spec.env.env_id}


def _exact(teacher: Teacher) -> str:
    return exact_reference(teacher.to_json())


class _Builder:
    """Cells of one preset and one set of settings, every combination checked as its run would be."""

    def __init__(
        self,
        preset: str,
        settings: Mapping[str, str],
        env: str | None,
        announce: Callable[[str], None],
        here: bool,
    ) -> None:
        self._preset, self._settings, self._env = preset, dict(settings), env
        self._announce, self._here = announce, here
        self._names: set[str] = set()
        self._sound: set[tuple[str, str | None, str]] = set()  # student, teacher, environment

    def from_teacher(self, entry: StudentEntry, seed: int, ref: str, teacher: Teacher) -> Cell:
        env, exact = teacher.spec.env.env_id, _exact(teacher)
        given = settings_read_by(entry, self._settings)
        self._check(entry, teacher, exact, env, given | ({"env.id": self._env} if self._env else {}))
        where = ["--env", self._env] if self._env is not None else []
        arguments = ["--teacher", exact, *where, *self._common(entry, seed, given)]
        name = self._name(f"{_slug(ref)}--{entry.name}", seed)
        return Cell(name, ref, entry.name, env, seed, entry.method.offline, tuple(arguments))

    def scratch(self, entry: StudentEntry, seed: int, teachers: Sequence[Teacher]) -> list[Cell]:
        """One cell per environment: those of the teachers, else the one that is named."""
        specs: dict[str, EnvSpec] = {}
        for teacher in teachers:
            specs.setdefault(teacher.spec.env.env_id, teacher.spec.env)
        if not specs:
            if self._env is None:
                raise UserError("without a --teacher the environment must be named: pass --env ID")
            specs = {env_spec(self._env).env_id: env_spec(self._env)}
        return [self._scratch(entry, seed, spec, as_teacher=bool(teachers)) for spec in specs.values()]

    def _scratch(self, entry: StudentEntry, seed: int, spec: EnvSpec, as_teacher: bool) -> Cell:
        fields = ENV_OVERRIDES if spec.kind == "atari" else ("max_agent_steps",)
        same = {f"env.{name}": str(getattr(spec, name)) for name in fields} if as_teacher else {}
        given = settings_read_by(entry, same | self._settings)
        self._check(entry, None, None, spec.env_id, given | {"env.id": spec.env_id})
        arguments = ["--env", spec.env_id, *self._common(entry, seed, given)]
        place = f"{spec.env_id}--" if as_teacher else ""
        name = self._name(f"scratch--{place}{entry.name}", seed)
        return Cell(name, None, entry.name, spec.env_id, seed, False, tuple(arguments))

    def _common(self, entry: StudentEntry, seed: int, settings: Mapping[str, str]) -> list[str]:
        head = ["--student", entry.name, "--preset", self._preset, "--seed", str(seed)]
        return [*head, *(part for item in settings.items() for part in ("--set", "=".join(item)))]

    def _check(
        self, entry: StudentEntry, teacher: Teacher | None, ref: str | None, env: str, given: dict[str, str]
    ) -> None:
        """Refuse what ``reincarnate run`` would refuse, once for all seeds."""
        if (entry.name, ref, env) in self._sound:
            return
        config = configured(entry, ref, self._preset, given)
        if self._here:
            refuse_impossible(config.system.buffer, pick_device(config.system.device), config.system.compress)
        try:
            refuse_unfit(config, teacher, self._announce)
        except UserError as error:
            origin = short_path(teacher.card.ref) if teacher else "scratch"
            raise UserError(f"{entry.name} from {origin}: {error}") from None
        self._sound.add((entry.name, ref, env))

    def _name(self, stem: str, seed: int) -> str:
        """A folder name that no other cell has, also where names differ in capitals alone."""
        name, number = f"{stem}--s{seed}", 1
        while name.lower() in self._names:
            number += 1
            name = f"{stem}-{number}--s{seed}"
        self._names.add(name.lower())
        return name


def _slug(ref: str) -> str:
    """The end of a reference, in letters that every file system takes."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(ref.rstrip("/").split("/")[-2:])).strip("-.")
    return words[-60:] or "teacher"
