"""What RL Zoo and the course put beside a Stable-Baselines3 model: which files count, and what they set."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from reincarnate.errors import UserError
from reincarnate.teachers.formats import Checkpoint, Hints, detect_and_read
from reincarnate.teachers.formats._sb3_zoo import closest
from reincarnate.teachers.reference import choose_file
from reincarnate.teachers.zoo import load_teacher

import sb3_writers as writers

WRAPPER = "stable_baselines3.common.atari_wrappers.AtariWrapper"


def zoo(folder: Path, env: str = "CartPole-v1", **files: Any) -> Path:
    """An RL Zoo folder: a CartPole DQN, args.yml and further files."""
    path = writers.forge(folder / f"{env}.zip")
    files = {"args": OrderedDict(algo="dqn", env=env, env_kwargs=None)} | files
    (folder / env).mkdir()
    for name, value in files.items():
        (folder / env / f"{name}.yml").write_text(yaml.dump(value))
    return path


def atari(folder: Path, env: str, channels: int = 4, *, shape: Any = None, **files: Any) -> Checkpoint:
    """A Breakout DQN with a CNN, read."""
    data = writers.data_of(shape or (channels, 84, 84), 4)
    path = writers.forge(folder / "m.zip", writers.cnn_tensors(channels), data)
    for name, value in {"args": {"env": env}, **files}.items():
        (folder / f"{name}.yml").write_text(yaml.dump(value))
    return detect_and_read(path)


def test_the_arguments_name_the_environment(tmp_path: Path) -> None:
    path = zoo(tmp_path / "run", config={"policy": "MlpPolicy", "n_envs": 8})
    teacher = load_teacher(str(path.parent))
    assert teacher.spec.env.env_id == "CartPole-v1"
    assert teacher.card.assumed["env_id"] == "args.yml"
    assert load_teacher(str(path)).spec.env.env_id == "CartPole-v1"


@pytest.mark.parametrize(
    ("folder", "file", "env", "why"),
    [
        ("x", "ppo-CartPole-v1.zip", "CartPole-v1", "the file name 'ppo-CartPole-v1'"),
        ("x", "dqn_CartPole-v1_2.zip", "CartPole-v1", "the file name 'dqn_CartPole-v1_2'"),
        ("dqn-CartPole-v1", "best_model.zip", "CartPole-v1", "the folder name 'dqn-CartPole-v1'"),
        ("x", "my-cartpole.zip", "CartPole-v1", "the file name 'my-cartpole'"),
    ],
)
def test_names_tell_where_no_file_does(tmp_path: Path, folder: str, file: str, env: str, why: str) -> None:
    checkpoint = detect_and_read(writers.forge(tmp_path / folder / file))
    assert (checkpoint.spec.env.env_id, checkpoint.assumed["env_id"]) == (env, why)


def test_the_repository_name_tells(tmp_path: Path) -> None:
    path = writers.forge(tmp_path / "model.zip")
    checkpoint = detect_and_read(path, Hints(source="me/ppo-CartPole-v1-final"))
    assert checkpoint.assumed["env_id"] == "the repository name 'ppo-CartPole-v1-final'"
    with pytest.raises(UserError, match=r"nothing tells which environment this teacher plays; name it with"):
        detect_and_read(path, Hints(source="me/deep-rl-unit"))


def test_a_retired_version_gives_way_to_the_newest_and_is_recorded(tmp_path: Path) -> None:
    tensors = writers.dqn_tensors(8, 4)
    path = writers.forge(tmp_path / "ppo-LunarLander-v2.zip", tensors, writers.data_of((8,), 4))
    checkpoint = detect_and_read(path)
    assert checkpoint.spec.env.env_id == "LunarLander-v3"
    assert checkpoint.assumed["env_id"].endswith("; LunarLander-v3 in the place of LunarLander-v2")
    assert detect_and_read(path, Hints("LunarLander-v2")).spec.env.env_id == "LunarLander-v2"


@pytest.mark.parametrize(
    ("own", "names", "wanted", "found"),
    [
        ("m.zip", ["m.zip", "args.yml", "m/args.yml"], ["args.yml"], "m/args.yml"),
        ("m.zip", ["m.zip", "args.yml", "other/args.yml"], ["args.yml"], "args.yml"),
        ("best_model.zip", ["best_model.zip", "CartPole-v1/args.yml"], ["args.yml"], "CartPole-v1/args.yml"),
        ("m.zip", ["m.zip", "A/args.yml", "B/args.yml"], ["args.yml"], None),
        ("runs/1/m.zip", ["runs/1/m.zip", "args.yml"], ["args.yml"], "args.yml"),
        ("runs/1/m.zip", ["runs/1/m.zip", "runs/2/args.yml"], ["args.yml"], None),
        (
            "m.zip",
            ["vec_normalize.pkl", "m/vecnormalize.pkl"],
            ["vecnormalize.pkl", "vec_normalize.pkl"],
            "m/vecnormalize.pkl",
        ),
        ("m.zip", ["vec_normalize.pkl"], ["vecnormalize.pkl", "vec_normalize.pkl"], "vec_normalize.pkl"),
    ],
)
def test_the_closest_file_counts(own: str, names: list[str], wanted: list[str], found: str | None) -> None:
    assert closest(own, tuple(names), *wanted) == found


@pytest.mark.parametrize(
    ("names", "where", "chosen"),
    [
        (
            [
                *("README.md", "args.yml", "dqn-CartPole-v1.zip", "train_eval_metrics.zip"),
                *("dqn-CartPole-v1/data", "dqn-CartPole-v1/policy.pth"),
            ],
            "sb3/dqn-CartPole-v1",
            "dqn-CartPole-v1.zip",
        ),
        (
            ["CartPole-v1.zip", "best_model.zip", "rl_model_1000_steps.zip", "CartPole-v1/args.yml"],
            "/logs/dqn/CartPole-v1_1",
            "CartPole-v1.zip",
        ),
        (["a.zip", "ppo-Acrobot-v1.zip", "ppo-Acrobot-v1/data"], "me/unit1", "ppo-Acrobot-v1.zip"),
        (["x/ppo-Acrobot-v1.zip", "x/ppo-Acrobot-v1/policy.pth"], "me/unit1", "x/ppo-Acrobot-v1.zip"),
        (["data", "policy.pth", "policy.optimizer.pth", "pytorch_variables.pth"], "/x/ppo", "policy.pth"),
        (["README.md", "ppo-Acrobot-v1", "results.json"], "me/ppo-Acrobot-v1", "ppo-Acrobot-v1"),
    ],
)
def test_the_models_file_is_found(names: list[str], where: str, chosen: str) -> None:
    assert choose_file(names, where) == chosen


class VecNormalize:
    """Pickled under the library's name, without the library."""


class RunningMeanStd:
    """As above."""


VecNormalize.__module__ = RunningMeanStd.__module__ = "stable_baselines3.common.vec_env.vec_normalize"


def statistics(path: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Path:
    """A VecNormalize's pickle, forged: CartPole's four features."""
    import sys
    import types

    module = types.ModuleType(VecNormalize.__module__)
    module.VecNormalize, module.RunningMeanStd = VecNormalize, RunningMeanStd
    monkeypatch.setitem(sys.modules, module.__name__, module)
    running, record = RunningMeanStd(), VecNormalize()
    running.__dict__.update(mean=np.arange(4.0), var=np.array([1.0, 4.0, 9.0, 0.0]), count=1e-4)
    record.__dict__.update({"obs_rms": running, "norm_obs": True, "clip_obs": 2.0, "epsilon": 1e-4} | changed)
    path.write_bytes(pickle.dumps(record))
    return path


def test_observations_are_normalised_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zoo(tmp_path, config={"normalize": "dict(norm_obs=True, norm_reward=False)"})
    statistics(tmp_path / "CartPole-v1" / "vecnormalize.pkl", monkeypatch)
    read = detect_and_read(path)
    assert read.spec.network_options["normalise"] == {"epsilon": 1e-4, "clip": 2.0}
    obs = torch.tensor([[0.5, 9.0, -9.0, 3.001]])
    plain = detect_and_read(writers.forge(tmp_path / "plain" / "m.zip"), Hints("CartPole-v1"))
    networks = [each.spec.build() for each in (read, plain)]
    for network, each in zip(networks, (read, plain), strict=True):
        network.load_state_dict(each.state_dict)
    scaled = (obs.double() - torch.arange(4.0)) / (torch.tensor([1.0, 4.0, 9.0, 0.0]).double() + 1e-4).sqrt()
    torch.testing.assert_close(networks[0](obs), networks[1](scaled.clamp(-2, 2).float()))


@pytest.mark.parametrize(
    "normalize", [True, "{'norm_obs': True, 'norm_reward': False}", {"norm_reward": True}]
)
def test_normalised_observations_without_statistics_are_refused(tmp_path: Path, normalize: Any) -> None:
    path = zoo(tmp_path, config={"normalize": normalize})
    with pytest.raises(
        UserError, match=r"normalised observations \(CartPole-v1/config\.yml: normalize\), and"
    ):
        detect_and_read(path)


@pytest.mark.parametrize("normalize", [False, "dict(norm_obs=False, norm_reward=True)", {"norm_obs": False}])
def test_normalised_rewards_do_not_matter(tmp_path: Path, normalize: Any) -> None:
    assert (
        "normalise"
        not in detect_and_read(zoo(tmp_path, config={"normalize": normalize})).spec.network_options
    )


def test_statistics_of_rewards_alone_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zoo(tmp_path, config={"normalize": True})
    statistics(tmp_path / "vec_normalize.pkl", monkeypatch, norm_obs=False)
    assert "normalise" not in detect_and_read(path).spec.network_options


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"obs_rms": {"a": 1}}, r"statistics of several observations"),
        ({"obs_rms": None}, r"obs_rms\.mean: expected a vector of numbers, found NoneType"),
        ({"clip_obs": "ten"}, r"clip_obs: expected a number, found str"),
        ({"clip_obs": -1.0}, r"do not belong together"),
        ({"epsilon": float("nan")}, r"epsilon: expected a number"),
    ],
)
def test_statistics_that_are_none_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], message: str
) -> None:
    path = zoo(tmp_path)
    statistics(tmp_path / "vecnormalize.pkl", monkeypatch, **changed)
    with pytest.raises(UserError, match=rf"vecnormalize\.pkl: {message}|vecnormalize\.pkl: .*{message}"):
        detect_and_read(path)


def test_statistics_of_another_size_or_kind_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zoo(tmp_path)
    other = RunningMeanStd()
    other.__dict__.update(mean=np.zeros(3), var=np.ones(3))
    file = statistics(tmp_path / "vecnormalize.pkl", monkeypatch, obs_rms=other)
    with pytest.raises(UserError, match=r"vecnormalize\.pkl: mean: expected \[4\], found \[3\]"):
        detect_and_read(path)
    file.write_bytes(pickle.dumps({"mean": 1}))
    with pytest.raises(UserError, match=r"expected the statistics of a VecNormalize, found dict"):
        detect_and_read(path)
    file.write_bytes(b"\0" * ((4 << 20) + 1))
    with pytest.raises(UserError, match=r"a pickle of more than 4 MiB"):
        detect_and_read(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"config": {"env_wrapper": "gym_minigrid.wrappers.FlatObsWrapper"}},
            r"config\.yml wraps it in gym_minigrid",
        ),
        ({"config": {"env_wrapper": [{"rl_zoo3.wrappers.FrameSkip": {"skip": 2}}]}}, r"wraps it in rl_zoo3"),
        ({"config": {"vec_env_wrapper": "x.Y"}}, r"wraps it in x\.Y"),
        ({"config": {"frame_stack": 4}}, r"stacks 4 observations"),
        (
            {"args": {"env": "CartPole-v1", "env_kwargs": {"sutton_barto_reward": True}}},
            r"args\.yml sets sutton_barto",
        ),
        ({"env_kwargs": {"length": 2}}, r"env_kwargs\.yml sets length=2"),
        ({"config": {"env_kwargs": "dict(length=2)"}}, r"config\.yml sets length=2"),
    ],
)
def test_changed_environments_are_refused_unless_the_user_names_one(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    path = zoo(tmp_path, **files)
    with pytest.raises(UserError, match=rf"trained in a changed environment \(.*{message}.*--env plays it"):
        detect_and_read(path)
    assert detect_and_read(path, Hints("CartPole-v1")).assumed["changes"].startswith("left out, as --env")


def test_what_changes_nothing_is_no_change(tmp_path: Path) -> None:
    files = {
        "config": {"env_wrapper": ["stable_baselines3.common.monitor.Monitor"], "frame_stack": 1},
        "env_kwargs": {"render_mode": "rgb_array", "max_episode_steps": 123},
    }
    checkpoint = detect_and_read(zoo(tmp_path, **files))
    assert checkpoint.spec.env.max_agent_steps == 123
    assert set(checkpoint.assumed) == {"env_id", "activation", "max_agent_steps"}


def test_atari_without_settings_gets_the_wrappers_defaults(tmp_path: Path) -> None:
    checkpoint = atari(tmp_path, "BreakoutNoFrameskip-v4")
    env = checkpoint.spec.env
    assert (env.env_id, env.obs_shape, env.noop_max, env.frame_skip) == ("Breakout-v5", (4, 84, 84), 30, 4)
    assert (env.fire_reset, env.episodic_life, env.reward_clip, env.sticky_probability) == (
        True,
        True,
        True,
        0,
    )
    assert checkpoint.assumed["episodic_life"] == "Stable-Baselines3's AtariWrapper"


def test_the_wrappers_arguments_are_taken(tmp_path: Path) -> None:
    arguments = {"terminal_on_life_loss": False, "clip_reward": False, "noop_max": 7, "frame_skip": 2}
    config = {"env_wrapper": [{WRAPPER: {**arguments, "action_repeat_probability": 0.1}}], "frame_stack": 4}
    env = atari(tmp_path, "BreakoutNoFrameskip-v4", config=config).spec.env
    assert (env.episodic_life, env.reward_clip, env.noop_max, env.frame_skip) == (False, False, 7, 2)
    assert env.sticky_probability == 0.1


@pytest.mark.parametrize(
    ("env", "env_kwargs", "sticky", "skip"),
    [
        ("ALE/Breakout-v5", {}, 0.25, 16),
        ("ALE-Breakout-v5", {}, 0.25, 16),
        ("ALE/Breakout-v5", {"frameskip": 1}, 0.25, 4),
        ("ALE/Breakout-v5", {"frameskip": 1, "repeat_action_probability": 0.0}, 0.0, 4),
        ("BreakoutNoFrameskip-v0", {}, 0.25, 4),
        ("BreakoutDeterministic-v4", {}, 0.0, 16),
        ("Breakout-v4", {"frameskip": 1}, 0.0, 4),
    ],
)
def test_the_names_generation_decides_stickiness_and_skipped_frames(
    tmp_path: Path, env: str, env_kwargs: dict[str, Any], sticky: float, skip: int
) -> None:
    spec = atari(tmp_path, env, env_kwargs=env_kwargs).spec.env
    assert (spec.env_id, spec.sticky_probability, spec.frame_skip) == ("Breakout-v5", sticky, skip)


def test_emulator_settings_are_taken(tmp_path: Path) -> None:
    data = writers.data_of((4, 84, 84), 18)
    path = writers.forge(tmp_path / "m.zip", writers.cnn_tensors(4, 18), data)
    kwargs = {"full_action_space": True, "max_num_frames_per_episode": 4000, "mode": 0}
    (tmp_path / "args.yml").write_text(yaml.dump({"env": "BreakoutNoFrameskip-v4", "env_kwargs": kwargs}))
    env = detect_and_read(path).spec.env
    assert (env.full_action_set, env.num_actions, env.max_agent_steps) == (True, 18, 1000)


@pytest.mark.parametrize(
    ("env", "files", "message"),
    [
        ("Breakout-v4", {}, r"Breakout-v4 skips 2 to 4 frames at random"),
        ("BreakoutNoFrameskip-v4", {"env_kwargs": {"difficulty": 1}}, r"env_kwargs\.yml sets difficulty=1"),
        ("BreakoutNoFrameskip-v4", {"env_kwargs": {"obs_type": "ram"}}, r"sets obs_type=ram"),
        ("ALE/Breakout-v5", {"env_kwargs": {"frameskip": [2, 5]}}, r"sets frameskip=\[2, 5\]"),
        ("BreakoutNoFrameskip-v4", {"config": {"env_wrapper": ["x.Mine"]}}, r"wraps it in x\.Mine"),
        (
            "BreakoutNoFrameskip-v4",
            {"config": {"env_wrapper": {WRAPPER: {"x": 1}}}},
            r"AtariWrapper has no argument x",
        ),
        (
            "BreakoutNoFrameskip-v4",
            {"config": {"frame_stack": 2}},
            r"images of 4 channels \(frame_stack 2\): colour",
        ),
    ],
)
def test_atari_settings_without_counterpart_are_refused(
    tmp_path: Path, env: str, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        atari(tmp_path, env, **files)
    assert "\n" not in str(caught.value)


def test_colour_is_refused_and_stacks_of_three_are_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"images of 3 channels \(no frame_stack is known\): colour"):
        atari(tmp_path, "BreakoutNoFrameskip-v4", 3)
    env = atari(tmp_path, "BreakoutNoFrameskip-v4", 3, config={"frame_stack": 3}).spec.env
    assert env.obs_shape == (3, 84, 84)


@pytest.mark.parametrize("shape", [(4, 86, 90), (86, 90, 4)])
def test_the_image_size_is_read_from_the_observation_space(tmp_path: Path, shape: tuple[int, ...]) -> None:
    env = atari(tmp_path, "BreakoutNoFrameskip-v4", shape=shape).spec.env
    assert env.obs_shape == (4, 86, 90)
