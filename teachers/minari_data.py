"""D_T as a Minari dataset: whole games as episodes, what the teacher saw, did and scored, bit for bit.

A lost life does not end an episode: it is marked in ``infos["life_lost"]``. Rows at which the environment
ignored the action (a reset) are no steps; points that a game gives during one belong to the action before.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reincarnate.errors import UserError
from reincarnate.replay import Replay
from reincarnate.teachers.collect import complete_collection, open_teacher_data
from reincarnate.types import EnvSpec

_ROOT_VARIABLE = "MINARI_DATASETS_PATH"


@dataclass(frozen=True)
class Episode:
    """n steps of one game."""

    observations: npt.NDArray[Any]  # [n + 1, *obs_shape] uint8 or float32
    actions: npt.NDArray[np.int64]  # [n]
    rewards: npt.NDArray[np.float64]  # [n] the game's own score
    terminated: bool  # the game was over; else it met its limit, or the collection ended within it
    infos: Mapping[str, npt.NDArray[Any]]  # [n + 1, ...]; the last entry is that of no step


@dataclass(frozen=True)
class MinariExport:
    """What was written."""

    dataset_id: str
    folder: Path
    episodes: int
    steps: int


def export_minari(data: Path, dataset_id: str | None = None, root: Path | None = None) -> MinariExport:
    """Write the D_T in ``data`` as a Minari dataset, episode by episode.

    Args:
        data: what ``teachers collect`` wrote, or a run left in the cache.
        dataset_id: ``[namespace/]name-vN``; ``reincarnate/ENV/teacher-v0`` unless given.
        root: of Minari's datasets; MINARI_DATASETS_PATH or ``~/.minari/datasets`` unless given.

    Raises:
        UserError: Minari is not installed; no D_T there; that name is taken or no name of Minari's.
    """
    minari = _minari()
    env = complete_collection(data, str(data)).env
    name = dataset_id or f"reincarnate/{env.env_id.lower()}/teacher-v0"
    with _root_of(root):
        target = _new_folder(minari, name)
        try:
            storage = _storage(minari, target, env)
            collected = open_teacher_data(data)
            for episode in episodes_of(collected.replay):
                storage.update_episodes([_buffer(minari, episode)])
            storage.update_metadata(_metadata(name, data, minari))
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return MinariExport(name, target, storage.total_episodes, storage.total_steps)


def episodes_of(replay: Replay) -> Iterator[Episode]:
    """The games of each lane in order; games without a whole step are left out."""
    for lane in range(replay.num_envs):
        marks = replay.marks
        marks[lane] = replay.oldest[lane]
        rows, _ = replay.rows_since(marks)  # of this lane alone
        begins = np.flatnonzero(rows["game_start"])
        for begin, end in zip(begins, [*begins[1:], len(rows["action"])], strict=True):
            # Where the data ends at a lost life, nothing tells whether it was the last one.
            over = end < len(rows["action"]) or replay.spec.kind == "vector" or not replay.spec.episodic_life
            episode = _episode({name: rows[name][begin:end] for name in _COLUMNS}, replay.spec, over)
            if episode is not None:
                yield episode


#: Of Minari's infos: the columns that they come from.
_INFOS = {
    "training_reward": "reward",
    "life_lost": "terminal",
    "teacher_outputs": "teacher_outputs",
    "behaviour_log_prob": "behaviour_log_prob",
    "epsilon": "epsilon",
}
_COLUMNS = ("frame", "action", "raw_reward", "truncated", "executed", *_INFOS.values())


def _episode(rows: Mapping[str, npt.NDArray[Any]], spec: EnvSpec, over: bool) -> Episode | None:
    """``rows`` are those of one game from its start on; ``over``: where they end, the game does."""
    steps = np.flatnonzero(rows["executed"])
    if not len(steps):
        return None
    # What an action led to is the observation of the next one; for the last one it is the row after it, if
    # the game ended there. Where the collection ended within a game, the last action leads nowhere.
    last = int(steps[-1])
    ended = over and bool(rows["terminal"][last] | rows["truncated"][last]) and last + 1 < len(rows["action"])
    places = np.append(steps, last + 1) if ended else steps
    steps = places[:-1]
    if not len(steps):
        return None
    # Between two actions of a game there can be rows of a reset, in which the game may give points.
    rewards = np.add.reduceat(rows["raw_reward"][: places[-1]].astype(np.float64), steps)
    terminated = ended and bool(rows["terminal"][last])
    infos = {name: _with_end(rows[column][steps]) for name, column in _INFOS.items()}
    if terminated:
        infos["life_lost"][len(steps) - 1] = False
    observations = _observations(rows["frame"], places, spec)
    return Episode(observations, rows["action"][steps].astype(np.int64), rewards, terminated, infos)


def _observations(frames: npt.NDArray[Any], places: npt.NDArray[Any], spec: EnvSpec) -> npt.NDArray[Any]:
    """Stacks at ``places``; before the game's first frame stands that frame."""
    if spec.kind == "vector":
        which = places
    else:
        which = np.maximum(places[:, None] - np.arange(spec.frame_stack - 1, -1, -1), 0)
    return np.take(frames, which, axis=0)


def _with_end(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Minari keeps an info with every observation, that of the last one too."""
    return np.concatenate((values, np.zeros_like(values[:1])))


# ---------------------------------------------------------------- Minari


def _buffer(minari: Any, episode: Episode) -> Any:
    count = len(episode.actions)
    terminations, truncations = np.zeros((2, count), dtype=np.bool_)
    (terminations if episode.terminated else truncations)[-1] = True
    return minari.data_collector.episode_buffer.EpisodeBuffer(
        observations=episode.observations,
        actions=episode.actions,
        rewards=episode.rewards,
        terminations=terminations,
        truncations=truncations,
        infos=dict(episode.infos),
    )


def _storage(minari: Any, target: Path, env: EnvSpec) -> Any:
    from gymnasium import spaces

    low, high = (0, 255) if env.kind == "atari" else (-np.inf, np.inf)
    dtype: Any = np.uint8 if env.kind == "atari" else np.float32
    target.mkdir(parents=True)
    return minari.dataset.minari_storage.MinariStorage.new(
        target / "data",
        observation_space=spaces.Box(low, high, env.obs_shape, dtype),
        action_space=spaces.Discrete(env.num_actions),
        data_format="hdf5",
        jpeg_encoding=False,  # which would change the frames
    )


def _metadata(name: str, data: Path, minari: Any) -> dict[str, Any]:
    collection = complete_collection(data, str(data))
    return {
        "dataset_id": name,
        "minari_version": minari.__version__,
        "algorithm_name": "the teacher of a reincarnate D_T",
        "description": "Teacher data of reincarnate; rewards are raw scores, lost lives are in infos",
        "reincarnate": collection.to_dict(),
    }


def _new_folder(minari: Any, name: str) -> Path:
    """Where Minari looks for a dataset of that name; its namespace exists then."""
    module = minari.dataset.minari_dataset
    match = module.DATASET_ID_RE.fullmatch(name)
    if match is None or match["version"] is None:
        raise UserError(f"{name!r} is no name of a Minari dataset; give [namespace/]name-v0")
    target = Path(minari.storage.datasets_root_dir.get_dataset_path(name))
    if target.exists():
        raise UserError(f"{target} exists; choose another --dataset-id, e.g. of the next version")
    namespace = match["namespace"]
    if namespace is not None and namespace not in minari.namespace.list_local_namespaces():
        minari.namespace.create_namespace(namespace)
    return target


@contextlib.contextmanager
def _root_of(root: Path | None) -> Iterator[None]:
    """Minari finds its datasets through a variable."""
    before = os.environ.get(_ROOT_VARIABLE)
    if root is not None:
        os.environ[_ROOT_VARIABLE] = str(root.absolute())
    try:
        yield
    finally:
        if root is not None:
            if before is None:
                del os.environ[_ROOT_VARIABLE]
            else:
                os.environ[_ROOT_VARIABLE] = before


def _minari() -> Any:
    try:
        importlib.import_module("h5py")
        importlib.import_module("minari.namespace")
        return importlib.import_module("minari")
    except ImportError:
        raise UserError("a Minari dataset needs Minari: pip install 'reincarnate[minari]'") from None
