"""Teacher rollouts into the teacher buffer D_T, an artefact that later runs reuse.

D_T lives in a folder named by what it depends on: the teacher's weights, its environment, the collection
settings and the seed. It is written in segments while it grows, so a stopped collection goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from reincarnate import files, schedules
from reincarnate.acting import epsilon_greedy, sample
from reincarnate.config import CollectConfig
from reincarnate.device import beside_environments
from reincarnate.envs import make_env
from reincarnate.errors import UserError
from reincarnate.evaluate import group_lanes, restart_state
from reincarnate.replay import Replay
from reincarnate.replay.store import SegmentRecord, SegmentStore
from reincarnate.rollout import Acted, ActFunction, Rollout
from reincarnate.teachers.teacher import Teacher
from reincarnate.types import Backend, EnvSpec, EnvStep, State

FORMAT = 2  # 1 knew the teacher by its file alone, without the statistics that may lie beside it
#: Called after every vector step with agent steps so far and the mean raw return of finished games (or None).
OnStep = Callable[[int, float | None], None]


@dataclass(frozen=True)
class Collection:
    """Everything D_T depends on."""

    teacher_sha256: str  # of its file
    policy_sha256: str  # of all its numbers: statistics that lie beside the file are in them
    env: EnvSpec
    backend: Backend
    num_envs: int
    agent_steps: int
    epsilon_start: float
    epsilon_end: float
    epsilon_decay_agent_steps: int
    seed: int

    @classmethod
    def of(
        cls, teacher: Teacher, env: EnvSpec, config: CollectConfig, num_envs: int, backend: Backend, seed: int
    ) -> Collection:
        """The collection of ``teacher`` in ``env`` with the settings of a run."""
        return cls(
            teacher.card.sha256,
            teacher.policy_sha256,
            env,
            backend,
            num_envs,
            config.agent_steps,
            config.epsilon_start,
            config.epsilon_end,
            config.epsilon_decay_agent_steps,
            seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self) | {"env": self.env.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Collection:
        """Inverse of :meth:`to_dict`; ``KeyError``, ``TypeError`` or ``ValueError`` on other values."""
        collection = cls(**(values | {"env": EnvSpec.from_dict(values["env"])}))
        counts = collection.num_envs, collection.agent_steps
        if any(type(count) is not int or count < 1 for count in counts):
            raise ValueError(f"counts of {counts}")
        if not all(isinstance(values[name], str) for name in ("teacher_sha256", "policy_sha256")):
            raise TypeError("hashes that are no text")
        return collection

    @property
    def key(self) -> str:
        """Name of the artefact: environment and the first 16 hex digits of a hash of all fields."""
        text = json.dumps({"format": FORMAT} | self.to_dict(), sort_keys=True)
        return f"{self.env.env_id}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def folder(self) -> Path:
        """Where the artefact is cached."""
        return files.cache_folder() / "teacher-data" / self.key


@dataclass(frozen=True)
class Collected:
    """A complete D_T, in memory and on disk."""

    replay: Replay
    folder: Path
    agent_steps: int
    reused: bool
    game_returns: tuple[float, ...]


def teacher_act(
    teacher: Teacher, epsilon: Callable[[], float], generator: torch.Generator | None
) -> ActFunction:
    """Act as D_T wants it: a Q-value teacher epsilon-greedily, a policy teacher by sampling.

    For the environments of one rollout: it has the memory of a recurrent teacher.
    """
    watch = watching(teacher)

    def act(obs: torch.Tensor, step: EnvStep) -> Acted:
        outputs = watch(obs, step)
        if teacher.spec.outputs == "policy_logits":
            action, log_prob = sample(outputs, teacher.temperature, generator)
            return Acted(action, log_prob, 0.0, outputs)
        now = epsilon()
        action, log_prob = epsilon_greedy(outputs, now, generator)
        return Acted(action, log_prob, now, outputs)

    return act


def watching(teacher: Teacher) -> Callable[[torch.Tensor, EnvStep], torch.Tensor]:
    """Raw outputs [N, A] for the observations of one rollout; a memory is reset where a game starts."""
    memory: State = None

    def outputs(obs: torch.Tensor, step: EnvStep) -> torch.Tensor:
        nonlocal memory
        if not teacher.recurrent:
            return teacher.outputs(obs)
        initial = teacher.initial_state(len(obs))
        start = torch.from_numpy(step.game_start)
        memory = initial if memory is None else restart_state(memory, initial, start)
        found, memory = teacher.step(obs, memory)
        return found

    return outputs


def collect(
    teacher: Teacher,
    collection: Collection,
    replay: Replay,
    *,
    device: torch.device,
    checkpoint: Callable[[], bool] = lambda: False,
    on_step: OnStep = lambda steps, mean_return: None,
    on_found: Callable[[int], None] = lambda steps: None,
    folder: Path | None = None,
) -> Collected:
    """Fill ``replay`` with ``collection.agent_steps`` transitions of the teacher, or reuse the artefact.

    Args:
        teacher: on ``device``.
        replay: empty, with a lane per environment and room for the collection; frozen on return. If its
            frames are on disk, they are in the artefact itself.
        checkpoint: asked after every vector step whether to write a segment now.
        on_step: progress; may raise to stop: what was collected is written first.
        on_found: told how many agent steps are there already, if any, before a collection goes on.
        folder: where D_T lives; the cache unless given.

    Raises:
        UserError: the artefact is damaged, or was made of something else.
    """
    folder = folder or collection.folder
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, lambda: on_step(0, None)):
        artefact = _Artefact(folder, collection)
        artefact.load_into(replay)
        replay.spill = artefact.spill
        reused = artefact.complete
        on_found(replay.agent_steps)
        if not reused:
            _grow(teacher, collection, replay, artefact, device, checkpoint, on_step)
    replay.spill = None
    replay.freeze()
    return Collected(replay, folder, replay.agent_steps, reused, tuple(artefact.game_returns))


def read_teacher_data(folder: Path, teacher: Teacher, env: EnvSpec, name: str | None = None) -> Collection:
    """What the D_T in ``folder`` was made of, if ``teacher`` made it in ``env``; reads only the manifest.

    ``name`` is what errors call it; the folder unless given.

    Raises:
        UserError: no complete D_T there, damaged, or made with another teacher or environment.
    """
    what = name or str(folder)
    collection = complete_collection(folder, what)
    if collection.teacher_sha256 != teacher.card.sha256:
        raise UserError(
            f"{what} was collected with another teacher (sha256 {collection.teacher_sha256[:12]}..., "
            f"this one has {teacher.card.sha256[:12]}...); pass the matching --teacher or collect it again"
        )
    if collection.policy_sha256 != teacher.policy_sha256:
        raise UserError(
            f"{what} was collected with another policy of the same file (the statistics of observations "
            "beside it have changed); put the old ones back or collect it again"
        )
    theirs, ours = collection.env.to_dict(), env.to_dict()
    differing = [f"{name}={theirs[name]} (run: {ours[name]})" for name in ours if theirs[name] != ours[name]]
    if differing:
        raise UserError(
            f"{what} was collected in another environment: {', '.join(differing)}; collect it again"
        )
    return collection


def complete_collection(folder: Path, what: str) -> Collection:
    """What the D_T in ``folder`` was made of, whoever made it; ``what`` is what errors call it.

    Raises:
        UserError: no complete D_T there, or a damaged one.
    """
    manifest = files.read_json(folder / "manifest.json")
    try:
        collection = Collection.from_dict(manifest["collection"])
        complete = manifest["complete"] and manifest["format"] == FORMAT
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{what} holds no teacher data of a known format; collect it again") from None
    if not complete:
        raise UserError(f"{what} holds an unfinished collection; run the collection again to complete it")
    return collection


def open_teacher_data(folder: Path) -> Collected:
    """A D_T without its teacher, to be read: its frames stay on disk.

    Raises:
        UserError: no complete D_T there, or a segment is damaged.
    """
    collection = complete_collection(folder, str(folder))
    artefact = _Artefact(folder, collection)
    replay = Replay(
        collection.env,
        collection.num_envs,
        collection.agent_steps,
        n_step=1,
        discount=1.0,
        frames_on_disk=True,
    )
    artefact.load_into(replay)
    replay.freeze()
    return Collected(replay, folder, replay.agent_steps, True, tuple(artefact.game_returns))


def load_teacher_data(
    folder: Path, replay_of: Callable[[int, int], Replay], teacher: Teacher, env: EnvSpec
) -> Collected:
    """A D_T that somebody made, from its folder; ``replay_of(num_envs, agent_steps)`` makes the empty buffer.

    Raises:
        UserError: as :func:`read_teacher_data`, or a segment is damaged.
    """
    collection = read_teacher_data(folder, teacher, env)
    artefact = _Artefact(folder, collection)
    replay = replay_of(collection.num_envs, collection.agent_steps)
    artefact.load_into(replay)
    replay.freeze()
    return Collected(replay, folder, replay.agent_steps, True, tuple(artefact.game_returns))


class _Artefact:
    """The folder of a D_T: segments and the manifest that lists them."""

    def __init__(self, folder: Path, collection: Collection) -> None:
        self._folder, self._collection = folder, collection
        self.complete = False
        self.game_returns: list[float] = []
        records: list[SegmentRecord] = []
        if (folder / "manifest.json").exists():
            records = self._read_manifest()
        self._store = SegmentStore(folder, records)
        if not self.complete:  # what a crash left behind; a complete one is only read
            self._store.sweep()

    def _read_manifest(self) -> list[SegmentRecord]:
        manifest = files.read_json(self._folder / "manifest.json")
        try:
            if manifest["format"] != FORMAT or manifest["collection"] != self._collection.to_dict():
                raise self._of_something_else(manifest)
            self.complete, self.game_returns = manifest["complete"], _finite(manifest["game_returns"])
            return [SegmentRecord(**record) for record in manifest["segments"]]
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{self._folder / 'manifest.json'} is damaged; delete {self._folder}") from None

    def _of_something_else(self, manifest: dict[str, Any]) -> UserError:
        theirs, ours = manifest["collection"], self._collection.to_dict()
        differing = [name for name in ours if theirs[name] != ours[name]]
        plain = [f"{name}={theirs[name]} (asked: {ours[name]})" for name in differing if name != "env"]
        plain += ["another environment"] if "env" in differing else []
        told = f" ({', '.join(plain)})" if plain else ""
        return UserError(f"{self._folder} holds teacher data of something else{told}; choose another folder")

    def load_into(self, replay: Replay) -> None:
        self._store.load_into(replay)
        self._marks = replay.marks

    def spill(self, replay: Replay) -> None:
        """Write what is new, so that a buffer on disk has room again."""
        self.append(replay, complete=False)

    def append(self, replay: Replay, complete: bool) -> None:
        """Write what is new as a segment, then the manifest that counts it."""
        self._marks = self._store.append_new(replay, self._marks)
        manifest = {
            "format": FORMAT,
            "complete": complete,
            "collection": self._collection.to_dict(),
            "agent_steps": replay.agent_steps,
            "game_returns": self.game_returns,
            "segments": [dataclasses.asdict(record) for record in self._store.records],
        }
        files.write_json(self._folder / "manifest.json", manifest)
        self.complete = complete


def _finite(numbers: Any) -> list[float]:
    """A list of finite numbers; ``TypeError`` or ``ValueError`` on anything else."""
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError("a return that is no number")
    return list(numbers)


def _grow(
    teacher: Teacher,
    collection: Collection,
    replay: Replay,
    artefact: _Artefact,
    device: torch.device,
    checkpoint: Callable[[], bool],
    on_step: OnStep,
) -> None:
    # A continued collection starts new games; its randomness must not repeat the first part's.
    seed = (collection.seed + replay.agent_steps) % 2**31
    generator = torch.Generator(device=device).manual_seed(seed)

    def epsilon() -> float:
        return schedules.linear(
            collection.epsilon_start,
            collection.epsilon_end,
            collection.epsilon_decay_agent_steps,
            replay.agent_steps,
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(beside_environments(device))
        rollouts = []
        for first, size in group_lanes(collection.num_envs):
            env = stack.enter_context(make_env(collection.env, size, seed + first, collection.backend))
            rollouts.append(Rollout(env, teacher_act(teacher, epsilon, generator), device, first))
        stack.enter_context(_writing_on_the_way_out(lambda: artefact.append(replay, complete=False)))
        for rollout in rollouts:
            rollout.begin()
        while replay.agent_steps < collection.agent_steps:
            for rollout in rollouts:  # the teacher acts for one group while the other steps
                outcome = rollout.finish()
                rollout.begin()
                replay.add(outcome.lanes, outcome.rows)
                artefact.game_returns.extend(game.raw_return for game in outcome.games)
            recent = artefact.game_returns[-100:]
            on_step(replay.agent_steps, sum(recent) / len(recent) if recent else None)
            if checkpoint():
                artefact.append(replay, complete=False)
    artefact.append(replay, complete=True)


@contextlib.contextmanager
def _locked(folder: Path, while_waiting: Callable[[], None]) -> Iterator[None]:
    """Own the artefact; another run that collects the same one is waited for, and then finds it complete."""
    lock = FileLock(folder / "lock")
    while True:
        try:
            lock.acquire(timeout=1.0)
            break
        except Timeout:
            while_waiting()  # may raise to stop
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _writing_on_the_way_out(write: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        write()
        raise
