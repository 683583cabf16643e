"""The library's verbs: what the command line does, as calls.

import reincarnate

teacher = reincarnate.load_teacher("bundled/CartPole-dqn")
print(reincarnate.evaluate_teacher(teacher, episodes=32).returns)
result = reincarnate.run("bundled/CartPole-dqn", preset="quick", out="runs/cartpole")
print(result.document["student"]["teacher_normalized"])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from reincarnate import config as configuration
from reincarnate import seeds
from reincarnate.acting import parse_act_rule
from reincarnate.config import CollectConfig, RunConfig
from reincarnate.device import pick_device
from reincarnate.diagnose import Diagnosis, Setting, diagnose
from reincarnate.errors import UserError
from reincarnate.evaluate import RecurrentPolicy, evaluate
from reincarnate.prepare import configured
from reincarnate.progress import Progress
from reincarnate.ranks import Ranks
from reincarnate.replay import Buffer, Replay, storage
from reincarnate.runner import Run
from reincarnate.students.student import get_student
from reincarnate.teachers import measured
from reincarnate.teachers.claims import LEVEL, agrees, p_value, parse_claim
from reincarnate.teachers.collect import Collected, Collection, collect
from reincarnate.teachers.shared_data import exact_text
from reincarnate.teachers.teacher import Reported, Teacher
from reincarnate.teachers.zoo import load_teacher
from reincarnate.team import connect
from reincarnate.types import Backend, EnvSpec, Returns, Wrappers

#: When to find out why a return is not the claimed one.
Explain = Literal["never", "if it differs", "always"]
#: Formats whose Atari agents were trained behind wrappers that the gymnasium backend can build.
_SOURCE_WRAPPERS: dict[str, Wrappers] = {"cleanrl": "cleanrl", "sb3": "sb3"}


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    folder: Path
    document: dict[str, Any]  # result.json


@dataclass(frozen=True)
class TeacherReturn:
    """A teacher's measured return beside the one that its card claims."""

    ref: str
    resolved: str
    act: str
    returns: Returns
    reported: Reported | None
    agrees: bool | None  # Welch test p > 0.05; None if nothing is claimed
    diagnosis: Diagnosis | None = None  # where it was asked for and something had to be explained
    asked: bool = False  # for a diagnosis
    name: str = ""  # of the teacher, for people

    @property
    def remark(self) -> str | None:
        """That the claim was made under another acting rule, if it says so."""
        claimed = self.reported.act if self.reported else None
        if claimed is None or claimed == self.act:
            return None
        return f"the claim was made with --act {claimed}, this measurement with {self.act}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``teachers eval --json``."""
        return {
            "ref": self.ref,
            "resolved": self.resolved,
            "act": self.act,
            "return": self.returns.to_dict(),
            "reported": self.reported and self.reported.to_dict(),
            "agrees": self.agrees,
        } | ({"diagnosis": self.diagnosis and self.diagnosis.to_dict()} if self.asked else {})


def run(
    teacher: str | None = None,
    student: str = "qdagger-dqn",
    *,
    preset: str = "default",
    out: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Reincarnate ``teacher`` into ``student``, or train a student from scratch.

    Args:
        teacher: a reference (Hub repo, file, folder, run directory, ``bundled/NAME``), or None.
        student: a registered student.
        preset: ``quick``, ``default``, ``paper`` or ``cleanrl``.
        out: the run directory; named after the run under ``runs/`` if not given.
        settings: dotted settings over the preset, e.g. ``{"online.agent_steps": 20_000}``.
        progress: where to show progress; standard error unless given.

    Raises:
        UserError: anything that the caller can put right, in one line.
    """
    folder = Path(out) if out is not None else None
    with connect() as ranks:
        config = ranks.lead(lambda: _run_config(teacher, student, preset, dict(settings or {})))
        return _execute(Run.start(config, folder, _progress(progress, ranks), ranks))


def _run_config(teacher: str | None, student: str, preset: str, given: dict[str, Any]) -> RunConfig:
    for name in ("teacher", "student", "preset"):
        if name in given:
            raise UserError(f"{name} is not a setting; pass it as --{name}")
    if given.get("collect.teacher_data"):  # found again from any folder on resume
        given["collect.teacher_data"] = exact_text(given["collect.teacher_data"])
    return configured(get_student(student), teacher, preset, given)


def resume(folder: Path | str, progress: Progress | None = None) -> RunResult:
    """Go on with a stopped run from its last checkpoint; a finished one is returned as it is."""
    with connect() as ranks:
        return _execute(Run.resume(Path(folder), _progress(progress, ranks), ranks))


def evaluate_teacher(
    teacher: str | Teacher,
    *,
    episodes: int = 32,
    act_rule: str = "auto",
    env_id: str | None = None,
    backend: Backend = "envpool",
    wrappers: Wrappers | None = None,
    num_envs: int = 8,
    seed: int = 1,
    device: str = "auto",
    claim: str | None = None,
    explain: Explain = "never",
    announce: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> TeacherReturn:
    """G_T over ``episodes`` whole games on the raw score, every environment playing the same number.

    Args:
        teacher: a reference, or a loaded teacher.
        episodes: whole games; as many again, at most, for every cause that is tried.
        act_rule: ``auto | greedy | sample | epsilon=X``.
        env_id: the environment, where the teacher does not tell.
        backend: ``envpool`` or ``gymnasium``.
        wrappers: whose the gymnasium backend builds for Atari; those of the teacher's source unless given.
        num_envs: at most so many environments.
        seed: of environments and acting.
        device: ``auto | cpu | cuda``.
        claim: ``MEAN`` or ``MEAN +/- STD``, instead of what stands beside the checkpoint.
        explain: whether to find out why the return is not the claimed one.
        announce: told what is resolved and downloaded, a line at a time.
        progress: where to show progress; standard error unless given.

    Raises:
        UserError: no such teacher, environment or acting rule; nothing is claimed that could be explained,
            or the teacher cannot be diagnosed.
    """
    _check({"evaluate.games": episodes, "env.num_envs": num_envs, "seed": seed, "env.backend": backend})
    loaded = _load(teacher, env_id, pick_device(device), announce)
    if explain != "never":
        _refuse_memory(loaded)
    reported = _claim(loaded, claim, explain != "never")
    rule = parse_act_rule(act_rule, loaded.spec.outputs)
    setting = Setting(loaded.spec.env, rule, backend, wrappers or source_wrappers(loaded))
    shown = progress or Progress()
    returns = _played(loaded, setting, episodes, num_envs, seed, shown)
    diagnosis = None
    if reported is not None and _to_be_explained(explain, returns, reported):
        diagnosis = diagnose(
            loaded, setting, returns, reported, games=episodes, num_envs=num_envs, seed=seed, progress=shown
        )
    return TeacherReturn(
        loaded.card.ref,
        loaded.card.resolved,
        str(rule),
        returns,
        reported,
        agrees(returns, reported),
        diagnosis,
        asked=explain != "never",
        name=loaded.card.name,
    )


def _refuse_memory(teacher: Teacher) -> None:
    """Before anything is played: the causes of a diagnosis are played without a state."""
    if teacher.recurrent:
        raise UserError(
            f"{teacher.card.name} has an LSTM, and a diagnosis plays single observations without a memory: "
            "leave out --diagnose"
        )


def _to_be_explained(explain: Explain, returns: Returns, reported: Reported) -> bool:
    return explain == "always" or (explain == "if it differs" and p_value(returns, reported) <= LEVEL)


def source_wrappers(teacher: Teacher) -> Wrappers:
    """Whose Atari wrappers the teacher was trained behind, as its format tells."""
    return _SOURCE_WRAPPERS.get(teacher.card.format.partition("_")[0], "common")


def _claim(teacher: Teacher, given: str | None, needed: bool) -> Reported | None:
    """What is claimed: as the caller says, else as stands beside the checkpoint."""
    reported = teacher.card.reported
    if given is not None:
        reported = parse_claim(given, "given")
        if reported is None:
            raise UserError(f"no claim {given!r}; give a mean, or MEAN +/- STD, e.g. '295.5 +/- 12.3'")
    if needed and reported is None:
        raise UserError(
            f"nothing is claimed for {teacher.card.name}, so there is nothing to diagnose; "
            "pass what it should reach as --claim 'MEAN +/- STD'"
        )
    return reported


def _played(
    teacher: Teacher, setting: Setting, episodes: int, num_envs: int, seed: int, progress: Progress
) -> Returns:
    """Play, and keep what was measured for ``teachers show``."""
    generator = torch.Generator(device=teacher.device).manual_seed(seeds.derive(seed, "act"))
    policy = RecurrentPolicy(teacher, setting.rule, teacher.temperature, generator)
    with progress.phase("evaluate", total=episodes, unit="games") as bar:
        returns = evaluate(
            policy,
            setting.env,
            episodes,
            num_envs=num_envs,
            seed=seeds.derive(seed, "evaluate teacher"),
            device=teacher.device,
            backend=setting.backend,
            wrappers=setting.wrappers,
            progress=lambda done, total, mean: bar.update(done, **({"return": mean} if done else {})),
        )
    measured.remember(teacher, setting.env, setting.backend, setting.wrappers, str(setting.rule), returns)
    return returns


def collect_teacher(
    teacher: str | Teacher,
    out: Path | str | None = None,
    *,
    agent_steps: int = 40_000,
    epsilon: float = 0.05,
    env_id: str | None = None,
    num_envs: int = 8,
    seed: int = 1,
    device: str = "auto",
    announce: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Collected:
    """Fill a teacher buffer D_T with ``agent_steps`` transitions and keep it in ``out`` (or the cache).

    Raises:
        UserError: no such teacher; ``out`` holds something else; the data does not fit in memory.
    """
    _check({"collect.agent_steps": agent_steps, "collect.epsilon_start": epsilon, "env.num_envs": num_envs})
    _check({"seed": seed})
    where = pick_device(device)
    loaded = _load(teacher, env_id, where, announce)
    settings = CollectConfig(agent_steps=agent_steps, epsilon_start=epsilon, epsilon_end=epsilon)
    collection = Collection.of(
        loaded, loaded.spec.env, settings, num_envs, "envpool", seeds.derive(seed, "collect")
    )
    folder = Path(out) if out is not None else collection.folder
    replay = _replay_beside_disk(loaded.spec.env, Buffer(num_envs, agent_steps, folder), where)
    with (progress or Progress()).phase("collect", total=agent_steps, unit="agent steps") as bar:
        return collect(
            loaded,
            collection,
            replay,
            device=where,
            on_step=lambda done, mean: bar.update(done, **({} if mean is None else {"return": mean})),
            on_found=bar.found,
            folder=folder,
        )


def _replay_beside_disk(env: EnvSpec, buffer: Buffer, device: torch.device) -> Replay:
    """Nothing is sampled from it: its rows go to the artefact, and only the newest are held in memory."""
    sizes, room = storage.sizes_of(env, [buffer]), storage.room_for(env, [buffer], device)
    storage.choose("disk", sizes, room, device, "none")
    defaults = RunConfig().td
    return Replay(
        env,
        buffer.num_envs,
        buffer.agent_steps,
        n_step=defaults.n_step,
        discount=defaults.discount,
        frames_on_disk=True,
    )


def _progress(given: Progress | None, ranks: Ranks) -> Progress:
    """Of several ranks, only rank 0 shows anything."""
    if ranks.first:
        return given or Progress()
    return Progress(stream=open(os.devnull, "w"))


def _check(values: Mapping[str, Any]) -> None:
    """Refuse what a run's configuration would refuse, in the same words."""
    configuration.override(RunConfig(), values)


def _execute(prepared: Run) -> RunResult:
    return RunResult(prepared.folder, prepared.execute())


def _load(
    teacher: str | Teacher,
    env_id: str | None,
    device: torch.device,
    announce: Callable[[str], None] | None,
) -> Teacher:
    if isinstance(teacher, Teacher):
        return teacher.to(device)
    return load_teacher(teacher, env_id=env_id, device=device, announce=announce)
