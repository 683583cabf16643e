"""Dopamine's checkpoints as files: every generation of pickles, and the game that the folders tell."""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from reincarnate.errors import UserError
from reincarnate.teachers.formats import Checkpoint, Companions, Hints, detect_and_read
from reincarnate.teachers.formats._dopamine_gin import parse_gin
from reincarnate.teachers.reference import choose_file
from reincarnate.teachers.zoo import load_teacher

flax = pytest.importorskip("flax")
import dopamine_writers as writers  # noqa: E402 - it needs flax
from dopamine_writers import bundle_of, read  # noqa: E402


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    """A small network's bundle with numpy arrays, for what needs no JAX."""
    return dict(bundle_of(4))


def same_weights(ours: Checkpoint, theirs: Checkpoint) -> bool:
    return all(torch.equal(ours.state_dict[name], theirs.state_dict[name]) for name in theirs.state_dict)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_generation_gives_the_same_weights(
    tmp_path: Path, small: dict[str, Any], protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jnp = pytest.importorskip("jax.numpy")
    jax = pytest.importorskip("jax")
    from flax.core import frozen_dict

    plain = small["online_params"]
    wanted = read(tmp_path / "Breakout" / "ckpt.0", small)

    def again(params: Any) -> Checkpoint:
        path = writers.save(tmp_path / "Breakout" / "ckpt.1", small | {"online_params": params}, protocol)
        return detect_and_read(path)

    on_device = jax.tree_util.tree_map(jnp.asarray, plain)
    assert same_weights(again(on_device), wanted)
    assert same_weights(again(frozen_dict.FrozenDict(on_device)), wanted)
    assert same_weights(again(pre_linen(plain["params"])), wanted)
    with monkeypatch.context() as patch:
        assert same_weights(again(writers.slotted(patch, plain)), wanted)
    with monkeypatch.context() as patch:
        assert same_weights(again(_as_device_arrays(patch, plain)), wanted)


def pre_linen(params: dict[str, Any]) -> dict[str, Any]:
    """As flax.nn numbered layers in 2020: across their types."""
    return {f"{name[:-1]}{number}": params[name] for number, name in enumerate(sorted(params))}


def _as_device_arrays(patch: pytest.MonkeyPatch, params: dict[str, Any]) -> Any:
    """Arrays as jax 0.3 pickled them."""
    module = types.ModuleType("jax._src.device_array")

    def reconstruct_device_array(*arguments: Any) -> None:
        raise AssertionError(arguments)

    reconstruct_device_array.__module__ = module.__name__
    reconstruct_device_array.__qualname__ = "reconstruct_device_array"
    module.reconstruct_device_array = reconstruct_device_array  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)

    class DeviceArray:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __reduce__(self) -> Any:
            return reconstruct_device_array, (*self.value.__reduce__(), {"weak_type": False})

    return {
        "params": {
            layer: {kind: DeviceArray(value) for kind, value in kinds.items()}
            for layer, kinds in params["params"].items()
        }
    }


def test_the_environment_is_dopamines(tmp_path: Path, small: dict[str, Any]) -> None:
    checkpoint = read(tmp_path / "Breakout" / "1" / "ckpt.399", small)
    env = checkpoint.spec.env
    assert (env.env_id, env.obs_shape, env.num_actions, env.full_action_set) == (
        *("Breakout-v5", (4, 84, 84), 4),
        False,
    )
    assert (env.sticky_probability, env.frame_skip, env.noop_max, env.max_agent_steps) == (0.25, 4, 1, 27_000)
    assert (env.fire_reset, env.episodic_life, env.reward_clip) == (False, False, True)
    assert set(checkpoint.assumed) == {
        *("env_id", "obs_shape", "sticky_probability", "frame_skip", "noop_max", "max_agent_steps"),
        *("fire_reset", "episodic_life", "reward_clip"),
    }
    assert checkpoint.assumed["env_id"] == "the folder name 'Breakout'"
    assert "one is the least" in checkpoint.assumed["noop_max"]


@pytest.mark.parametrize(
    ("folders", "env_id"),
    [
        ("Breakout/checkpoints", "Breakout-v5"),
        ("breakout-dqn", "Breakout-v5"),
        ("dqn_breakout/1/checkpoints", "Breakout-v5"),
        ("ALE-Breakout-v5", "Breakout-v5"),
    ],
)
def test_a_folder_around_it_tells_the_game(
    tmp_path: Path, small: dict[str, Any], folders: str, env_id: str
) -> None:
    assert read(tmp_path / folders / "ckpt.3", small).spec.env.env_id == env_id


def test_the_repository_tells_the_game(tmp_path: Path, small: dict[str, Any]) -> None:
    path = tmp_path / "0123abc" / "ckpt.3"
    checkpoint = read(path, small, Hints(source="somebody/dopamine-Breakout", file="ckpt.3"))
    assert checkpoint.assumed["env_id"] == "the repository name 'dopamine-Breakout'"
    checkpoint = read(path, small, Hints(source="somebody/dopamine", file="Breakout/1/ckpt.3"))
    assert checkpoint.assumed["env_id"] == "the folder name 'Breakout'"


def test_the_user_and_the_settings_beside_it_tell_the_game(tmp_path: Path, small: dict[str, Any]) -> None:
    path = tmp_path / "run" / "checkpoints" / "ckpt.3"
    assert read(path, small, Hints("Breakout-v5")).assumed["env_id"] == "--env"
    gin = tmp_path / "config.gin"
    gin.write_text(
        "import dopamine.jax\n# game_name = 'Pong'\n"
        "atari_lib.create_atari_environment.game_name = 'Breakout'\n"
        "atari_lib.create_atari_environment.sticky_actions = False  # as in 2013\n"
    )
    beside = Companions(("run/ckpt.3", "config.gin"), lambda name: tmp_path / name)
    checkpoint = read(path, small, Hints(file="run/ckpt.3", companions=beside))
    assert checkpoint.spec.env.sticky_probability == 0.0
    assert checkpoint.assumed["env_id"] == checkpoint.assumed["sticky_probability"] == "config.gin"


def test_nothing_that_tells_asks_for_env(tmp_path: Path, small: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"nothing tells which game this teacher plays .*name it with --env"):
        read(tmp_path / "x" / "1" / "2" / "3" / "4" / "ckpt.3", small)
    with pytest.raises(UserError, match=r"takes images, not what CartPole-v1 gives"):
        read(tmp_path / "ckpt.3", small, Hints("CartPole-v1"))


def test_eighteen_actions_are_the_full_set_also_of_a_distribution(tmp_path: Path) -> None:
    for outputs, algorithm in ((18, "dqn"), (18 * 51, "rainbow"), (18 * 200, "qrdqn")):
        checkpoint = read(tmp_path / "Breakout" / "ckpt.3", bundle_of(outputs))
        assert checkpoint.spec.algorithm == algorithm
        assert checkpoint.spec.env.full_action_set
    with pytest.raises(UserError, match=r"Dense_1: 7 outputs are not 1 or 51 or 200 for each of 4 actions"):
        read(tmp_path / "Breakout" / "ckpt.3", bundle_of(7))


def test_settings_are_read_as_text() -> None:
    gin = parse_gin(
        "JaxDQNAgent.gamma = 0.99\ndopamine.x.JaxQuantileAgent.num_atoms = 51\n"
        "JaxQuantileAgent.vmax = @run(__import__('os').system('false'))\n",
        "x.gin",
    )
    assert (gin.agent, gin.atoms, gin.v_max) == ("quantile", 51, None)
    assert parse_gin("JaxRainbowAgent.num_atoms = 1e400\nJaxRainbowAgent.vmax = nan", "x.gin").v_max is None


NAMES = ["Breakout/1/ckpt.9", "Breakout/1/ckpt.10", "Breakout/1/sentinel_checkpoint_complete.9", "README.md"]


def test_the_newest_complete_checkpoint_is_chosen() -> None:
    assert choose_file(NAMES, "x") == "Breakout/1/ckpt.9"
    assert choose_file([NAMES[0], NAMES[1]], "x") == "Breakout/1/ckpt.10"
    assert choose_file(["ckpt.1", "old/ckpt.7", "tf_ckpt-1.index"], "x") == "ckpt.1"
    assert choose_file(["ckpt.1", "student.safetensors"], "x") == "student.safetensors"
    with pytest.raises(UserError, match=r"several checkpoints: 1/ckpt.3, 2/ckpt.4; name one"):
        choose_file(["1/ckpt.3", "2/ckpt.4"], "x")
    with pytest.raises(
        UserError, match=r"a TensorFlow checkpoint of Dopamine \(tf_ckpt-N\), which is not read"
    ):
        choose_file(["tf_ckpt-3.index", "tf_ckpt-3.data-00000-of-00001", "checkpoint"], "x")


def test_a_folder_is_a_teacher(tmp_path: Path, small: dict[str, Any]) -> None:
    for number in (8, 9, 10):
        writers.save(tmp_path / "Breakout" / "1" / f"ckpt.{number}", small)
    teacher = load_teacher(str(tmp_path / "Breakout"))
    assert (teacher.card.file, teacher.card.format, teacher.spec.env.env_id) == (
        *("1/ckpt.10", "dopamine"),
        "Breakout-v5",
    )
    with pytest.raises(UserError, match=r"no such file or folder: 'Breakout/ckpt.11'"):
        load_teacher("Breakout/ckpt.11")
