"""D_T as a Minari dataset, loaded by Minari and compared with what the environment gave, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from reincarnate import collect_teacher
from reincarnate.cli import main
from reincarnate.errors import UserError
from reincarnate.replay import Replay, RowBatch
from reincarnate.teachers import collect as collecting
from reincarnate.teachers.minari_data import episodes_of, export_minari
from reincarnate.types import EnvSpec, EnvStep

from small_runs import quiet

minari = pytest.importorskip("minari")
pytest.importorskip("h5py")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # gymnasium: bounds in double precision


class Recorder:
    """An environment that keeps what it gave and what it was sent."""

    def __init__(self, env: Any) -> None:
        self._env, self.spec, self.num_envs = env, env.spec, env.num_envs
        self.steps: list[EnvStep] = []
        self.actions: list[np.ndarray] = []

    def reset(self) -> EnvStep:
        self.steps.append(copied(self._env.reset()))
        return self.steps[-1]

    def send(self, action: np.ndarray) -> None:
        self.actions.append(action.copy())
        self._env.send(action)

    def recv(self) -> EnvStep:
        self.steps.append(copied(self._env.recv()))
        return self.steps[-1]

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *args: object) -> None:
        self._env.close()


def copied(step: EnvStep) -> EnvStep:
    return EnvStep(**{name: np.array(value) for name, value in vars(step).items()})


def games_of(recorder: Recorder, lane: int) -> list[dict[str, Any]]:
    """Whole games of one environment, told from its steps alone."""
    games: list[dict[str, Any]] = []
    for before, action, after in zip(recorder.steps, recorder.actions, recorder.steps[1:], strict=False):
        if before.game_start[lane]:
            games.append({"obs": [], "action": [], "reward": [], "terminal": [], "truncated": []})
        game = games[-1]
        if after.reset[lane]:
            continue
        game["obs"].append(before.obs[lane])
        game["action"].append(action[lane])
        game["reward"].append(float(after.raw_reward[lane]))
        game["terminal"].append(bool(after.terminal[lane]))
        game["truncated"].append(bool(after.truncated[lane]))
        game["over"], game["last"] = bool(after.game_over[lane]), after.obs[lane]
    return games


@pytest.mark.parametrize(
    ("teacher", "agent_steps", "lives"),
    [("bundled/CartPole-dqn", 1_500, False), ("bundled/Breakout-dqn", 1_300, True)],
)
def test_minari_reads_what_the_environment_gave(
    teacher: str, agent_steps: int, lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[Recorder] = []
    make_env = collecting.make_env

    def recorded(*arguments: Any) -> Recorder:
        recorders.append(Recorder(make_env(*arguments)))
        return recorders[-1]

    monkeypatch.setattr(collecting, "make_env", recorded)
    # Played at random, so that games end: exploration is all that the teacher's data tells apart.
    data = collect_teacher(
        teacher,
        tmp_path / "data",
        agent_steps=agent_steps,
        epsilon=1.0,
        num_envs=2,
        device="cpu",
        progress=quiet(),
    )
    arguments = ["teachers", "export-data", str(tmp_path / "data"), "--out", str(tmp_path / "root"), "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    dataset = minari.load_dataset(told["dataset_id"])
    games = [
        game
        for recorder in recorders
        for lane in range(recorder.num_envs)
        for game in games_of(recorder, lane)
    ]
    games = [game for game in games if len(game["action"]) > (0 if game["over"] else 1)]
    episodes = list(dataset.iterate_episodes())
    assert len(episodes) == len(games) == told["episodes"] > 2
    over = 0
    for episode, game in zip(episodes, games, strict=True):
        compare(episode, game)
        over += game["over"]
    assert over >= 2
    whole = [sum(game["reward"]) for game in games if game["over"]]
    assert sorted(whole) == sorted(data.game_returns)
    lost = sum(int(episode.infos["life_lost"].sum()) for episode in episodes)
    assert lost == sum(
        sum(game["terminal"][: len(e.actions)]) for e, game in zip(episodes, games, strict=True)
    ) - sum(bool(e.terminations[-1]) for e in episodes)
    assert (lost > 0) == lives  # and yet the episode went on
    assert dataset.observation_space.contains(episodes[0].observations[0])
    assert dataset.total_steps == sum(len(episode) for episode in episodes) == told["agent_steps"]


def compare(episode: Any, game: dict[str, Any]) -> None:
    """Of a game that the data ends in, the last action is left out: what it led to was not stored."""
    count = len(game["action"]) - (not game["over"])
    following = [*game["obs"][1:], game["last"]] if game["over"] else game["obs"][1:]
    expected = np.stack([game["obs"][0], *following])
    assert episode.observations.dtype == expected.dtype
    np.testing.assert_array_equal(episode.observations, expected)
    np.testing.assert_array_equal(episode.actions, game["action"][:count])
    np.testing.assert_array_equal(episode.rewards, game["reward"][:count])
    terminated = game["over"] and game["terminal"][-1]
    np.testing.assert_array_equal(episode.terminations, [False] * (count - 1) + [terminated])
    np.testing.assert_array_equal(episode.truncations, [False] * (count - 1) + [not terminated])


def test_ends_of_every_kind() -> None:
    """A life lost with points in the reset, a truncated game, a game that was cut, and the data's own end."""
    spec = EnvSpec("Breakout-v5", "atari", 4, (2, 1, 1))
    replay = Replay(spec, 1, 100, n_step=1, discount=1.0)
    # action, raw reward, terminal, truncated, executed, game_start
    rows = [
        (1, 1, 0, 0, 1, 1), (2, 0, 1, 0, 1, 0), (3, 5, 0, 0, 0, 0), (0, 2, 0, 1, 1, 0), (1, 0, 0, 0, 0, 0),
        (2, 3, 0, 0, 1, 1), (3, 4, 0, 0, 1, 0),  # cut: what its last action led to was never stored
        (0, 6, 0, 0, 1, 1), (1, 7, 1, 0, 1, 0), (2, 0, 0, 0, 0, 0),
        (3, 8, 0, 0, 1, 1), (0, 9, 1, 0, 1, 0), (1, 0, 0, 0, 0, 0),  # was it the last life?
    ]  # fmt: skip
    for number, (action, reward, terminal, truncated, executed, game_start) in enumerate(rows):
        replay.add(
            np.array([0]),
            RowBatch(
                frame=np.full((1, 1, 1), number, dtype=np.uint8),
                action=np.array([action]),
                reward=np.float32([reward > 0]),
                raw_reward=np.float32([reward]),
                terminal=np.array([bool(terminal)]),
                truncated=np.array([bool(truncated)]),
                executed=np.array([bool(executed)]),
                game_start=np.array([bool(game_start)]),
                teacher_outputs=torch.zeros(1, 4),
                behaviour_log_prob=np.float32([0]),
                epsilon=np.float32([0]),
            ),
        )
    episodes = list(episodes_of(replay))
    assert [episode.actions.tolist() for episode in episodes] == [[1, 2, 0], [2], [0, 1], [3]]
    assert [episode.rewards.tolist() for episode in episodes] == [[1, 5, 2], [3], [6, 7], [8]]
    assert [episode.terminated for episode in episodes] == [False, False, True, False]
    assert [episode.infos["life_lost"].tolist() for episode in episodes] == [
        [False, True, False, False], [False, False], [False, False, False], [False, False],
    ]  # fmt: skip
    stacks = [episode.observations.reshape(-1, 2).tolist() for episode in episodes]
    assert stacks == [
        [[0, 0], [0, 1], [2, 3], [3, 4]], [[5, 5], [5, 6]], [[7, 7], [7, 8], [8, 9]], [[10, 10], [10, 11]],
    ]  # fmt: skip


def test_what_cannot_be_exported_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect_teacher(
        "bundled/CartPole-dqn", tmp_path / "data", agent_steps=200, num_envs=2, device="cpu", progress=quiet()
    )
    export_minari(tmp_path / "data", "mine-v0", tmp_path / "root")
    for name, message in (("mine-v0", "choose another --dataset-id"), ("a b", "no name of a Minari dataset")):
        with pytest.raises(UserError, match=message):
            export_minari(tmp_path / "data", name, tmp_path / "root")
    with pytest.raises(UserError, match="does not exist"):
        export_minari(tmp_path / "nothing", "other-v0", tmp_path / "root")
    assert not (tmp_path / "root" / "other-v0").exists()
    monkeypatch.setitem(__import__("sys").modules, "minari.namespace", None)
    with pytest.raises(UserError, match="pip install"):
        export_minari(tmp_path / "data", "more-v0", tmp_path / "root")
