"""Which environment a checkpoint's weights assume: found, checked against the weights, and accounted for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from reincarnate.errors import UserError
from reincarnate.teachers.formats import Hints, detect_and_read
from reincarnate.teachers.formats._weights import feature_side

import checkpoint_writers as writers


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CleanRL's dqn with 4 features and 2 actions."""
    with torch.random.fork_rng():
        network = writers.torch_mlp(4, (120, 84), 2, nn.ReLU)
    return writers.save_dqn(tmp_path_factory.mktemp("x") / "dqn.cleanrl_model", network)


def nature(path: Path, actions: int, side: int = 84) -> Path:
    return writers.save_dqn(path, writers.torch_nature(4, side, side, actions, hidden=8))


def copied(path: Path, *parts: str) -> Path:
    target = path.parent.joinpath(*parts)
    target.parent.mkdir(parents=True)
    shutil.copy(path, target)
    return target


@pytest.mark.parametrize(
    ("folder", "env_id", "script"),
    [
        ("BreakoutNoFrameskip-v4-dqn_atari-seed1", "Breakout-v5", "dqn_atari"),
        ("Breakout-v5__dqn_atari__1__1690000000", "Breakout-v5", "dqn_atari"),
        ("Breakout-v5", "Breakout-v5", None),
        ("Breakout-dqn", "Breakout-v5", None),
        ("breakout_run3", "Breakout-v5", None),
    ],
)
def test_the_folder_name_tells_the_game(tmp_path: Path, folder: str, env_id: str, script: str | None) -> None:
    checkpoint = detect_and_read(nature(tmp_path / folder / "dqn_atari.cleanrl_model", 4))
    assert checkpoint.spec.env.env_id == env_id
    assert checkpoint.assumed["env_id"] == f"the folder name {folder!r}"
    assert checkpoint.assumed["episodic_life"] == f"CleanRL's {script or 'Atari scripts'}"


@pytest.mark.parametrize(
    "folder", ["CartPole-v1-dqn-seed1", "CartPole-v1__dqn__1__1690000000", "CartPole-dqn"]
)
def test_the_folder_name_tells_a_classic_environment(dense: Path, folder: str) -> None:
    checkpoint = detect_and_read(copied(dense, folder, "dqn.cleanrl_model"))
    env = checkpoint.spec.env
    assert (env.env_id, env.kind, env.obs_shape, env.num_actions) == ("CartPole-v1", "vector", (4,), 2)
    assert checkpoint.assumed == {"env_id": f"the folder name {folder!r}"}


@pytest.mark.parametrize(
    ("hints", "env_id", "why"),
    [
        (Hints(source="me/LunarLander-v2-dqn-seed1"), "LunarLander-v3", "; LunarLander-v3 in the place of"),
        (Hints(source="me/LunarLander-v3-dqn-seed1"), "LunarLander-v3", "LunarLander-v3-dqn-seed1'"),
        (Hints("LunarLander-v2"), "LunarLander-v2", "--env"),
    ],
)
def test_a_retired_version_gives_way_to_the_newest(
    tmp_path: Path, hints: Hints, env_id: str, why: str
) -> None:
    """EnvPool still plays the old one, gymnasium does not; a user who names it gets it."""
    network = writers.torch_mlp(8, (120, 84), 4, nn.ReLU)
    checkpoint = detect_and_read(writers.save_dqn(tmp_path / "dqn.cleanrl_model", network), hints)
    assert checkpoint.spec.env.env_id == env_id
    assert why in checkpoint.assumed["env_id"]


def test_the_file_name_tells_where_the_folder_does_not(tmp_path: Path) -> None:
    checkpoint = detect_and_read(nature(tmp_path / "downloads" / "Breakout-v5-dqn.cleanrl_model", 4))
    assert checkpoint.assumed["env_id"] == "the file name 'Breakout-v5-dqn.cleanrl_model'"


def test_a_relative_path_knows_its_folder(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied(dense, "CartPole-v1-here", "dqn.cleanrl_model")
    monkeypatch.chdir(dense.parent / "CartPole-v1-here")
    assert detect_and_read(Path("dqn.cleanrl_model")).spec.env.env_id == "CartPole-v1"


def test_the_repository_name_comes_before_the_cache_folder(dense: Path) -> None:
    path = copied(dense, "Acrobot-v1-snapshot", "dqn.cleanrl_model")
    checkpoint = detect_and_read(path, Hints(source="cleanrl/CartPole-v1-dqn-seed1"))
    assert checkpoint.spec.env.env_id == "CartPole-v1"
    assert checkpoint.assumed["env_id"] == "the repository name 'CartPole-v1-dqn-seed1'"


def test_what_the_user_says_wins(tmp_path: Path) -> None:
    path = nature(tmp_path / "Pong-v5-dqn_atari-seed1" / "x.cleanrl_model", 4)
    checkpoint = detect_and_read(path, Hints("ALE/Breakout-v5", exp_name="my_script"))
    assert checkpoint.spec.env.env_id == "Breakout-v5"
    assert checkpoint.assumed["env_id"] == "--env"
    assert checkpoint.assumed["noop_max"] == "CleanRL's my_script"


def test_cleanrls_atari_settings_are_assumed_and_each_is_accounted_for(tmp_path: Path) -> None:
    checkpoint = detect_and_read(nature(tmp_path / "Breakout-dqn" / "x.cleanrl_model", 4))
    env = checkpoint.spec.env
    assert (env.obs_shape, env.frame_skip, env.noop_max, env.sticky_probability) == ((4, 84, 84), 4, 30, 0.0)
    assert env.fire_reset
    assert env.episodic_life
    assert env.reward_clip
    assert not env.full_action_set
    assert set(checkpoint.assumed) == {
        *("env_id", "obs_shape", "frame_skip", "noop_max", "fire_reset", "sticky_probability"),
        *("episodic_life", "reward_clip"),
    }
    assert checkpoint.assumed["obs_shape"].endswith("the weights fit square images of 84 to 91 pixels")


def test_nothing_that_tells_asks_for_env(dense: Path) -> None:
    with pytest.raises(
        UserError, match=r"nothing tells which environment this teacher plays; name it with --env"
    ):
        detect_and_read(dense)


def test_a_name_of_the_other_kind_of_environment_does_not_tell(dense: Path) -> None:
    with pytest.raises(UserError, match=r"nothing tells which environment"):
        detect_and_read(copied(dense, "Breakout-dqn", "x.cleanrl_model"))


def test_an_unknown_environment_names_the_option_and_the_nearest(dense: Path) -> None:
    with pytest.raises(UserError, match=r"^--env: no environment 'CartPol-v1'.*CartPole-v1"):
        detect_and_read(dense, Hints("CartPol-v1"))


def test_an_environment_that_the_user_named_is_what_does_not_fit(dense: Path, tmp_path: Path) -> None:
    at = re.escape(str(dense))
    with pytest.raises(
        UserError, match=rf"^--env Acrobot-v1 does not fit the teacher {at} .*leave --env out"
    ):
        detect_and_read(dense, Hints("Acrobot-v1"))
    path = nature(tmp_path / "Breakout-dqn" / "x.cleanrl_model", 6)
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: wrong action count.*right .* with --env"):
        detect_and_read(path)


def test_eighteen_outputs_are_the_full_action_set(tmp_path: Path) -> None:
    checkpoint = detect_and_read(nature(tmp_path / "Breakout-dqn" / "x.cleanrl_model", 18))
    assert checkpoint.spec.env.full_action_set
    assert checkpoint.spec.env.num_actions == 18
    assert checkpoint.assumed["full_action_set"] == "the network has 18 outputs"


@pytest.mark.parametrize(("env_id", "actions", "own"), [("Breakout-v5", 6, 4), ("Pong-v5", 4, 6)])
def test_a_wrong_action_count_names_both_numbers(tmp_path: Path, env_id: str, actions: int, own: int) -> None:
    path = nature(tmp_path / "x.cleanrl_model", actions)
    message = rf"wrong action count: the network has {actions} outputs, {env_id} has {own} actions"
    with pytest.raises(UserError, match=message):
        detect_and_read(path, Hints(env_id))


def test_a_wrong_observation_size_names_both(dense: Path) -> None:
    with pytest.raises(UserError, match=r"takes observations of shape \[4\], Acrobot-v1 gives \[6\]"):
        detect_and_read(dense, Hints("Acrobot-v1"))


def test_weights_and_environment_of_different_kinds_are_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"takes observations of shape \[4\], Breakout-v5 gives \[4, 84, 84\]"
    ):
        detect_and_read(dense, Hints("Breakout-v5"))
    path = nature(tmp_path / "x.cleanrl_model", 2)
    with pytest.raises(UserError, match=r"of shape \[4, 84, 84\], CartPole-v1 gives \[4\]"):
        detect_and_read(path, Hints("CartPole-v1"))


@pytest.mark.parametrize(
    ("side", "chosen", "low", "high"),
    [(84, 84, 84, 91), (85, 84, 84, 91), (96, 96, 92, 99), (52, 56, 52, 59), (36, 40, 36, 43)],
)
def test_the_image_size_is_read_off_the_weights(
    tmp_path: Path, side: int, chosen: int, low: int, high: int
) -> None:
    """Eight sizes give the same weights: CleanRL's 84 where it is among them, else the multiple of 8."""
    checkpoint = detect_and_read(nature(tmp_path / "x", 4, side), Hints("Breakout-v5"))
    assert checkpoint.spec.env.obs_shape == (4, chosen, chosen)
    assert checkpoint.assumed["obs_shape"].endswith(f"square images of {low} to {high} pixels")


def test_a_given_image_size_must_fit_and_is_no_assumption(tmp_path: Path) -> None:
    path = nature(tmp_path / "x", 4, 85)
    checkpoint = detect_and_read(path, Hints("Breakout-v5", image_size=(85, 91)))
    assert checkpoint.spec.env.obs_shape == (4, 85, 91)
    assert "obs_shape" not in checkpoint.assumed
    with pytest.raises(UserError, match=r"network\.7\.weight: expected \[8, 4096\], found \[8, 3136\]"):
        detect_and_read(path, Hints("Breakout-v5", image_size=(96, 96)))


def test_images_that_are_not_square_need_their_size(tmp_path: Path) -> None:
    path = writers.save_dqn(tmp_path / "x", writers.torch_nature(4, 60, 84, 4, hidden=8))
    with pytest.raises(
        UserError, match=r"1792 inputs are not 64 channels of a square image; Hints\(image_size"
    ):
        detect_and_read(path, Hints("Breakout-v5"))
    assert detect_and_read(path, Hints("Breakout-v5", image_size=(60, 84))).spec.env.obs_shape == (4, 60, 84)


@pytest.mark.parametrize("side", [36, 52, 83, 84, 85, 96, 100])
def test_feature_sides_are_those_of_real_convolutions(side: int) -> None:
    network = nn.Sequential(*list(writers.torch_nature(1, side, side, 1, 1))[:6])
    assert network(torch.zeros(1, 1, side, side)).shape[-1] == feature_side("nature", side)
    pools = nn.Sequential(*[nn.MaxPool2d(3, 2, padding=1)] * 3)
    assert pools(torch.zeros(1, 1, side, side)).shape[-1] == feature_side("impala", side)
