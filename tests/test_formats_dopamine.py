"""Dopamine's checkpoints against its networks in flax, and everything that such a file may be instead."""

from __future__ import annotations

import functools
import math
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from reincarnate.envs import env_spec, make_env
from reincarnate.errors import UserError
from reincarnate.teachers.formats import Checkpoint, Companions, Hints, detect_and_read
from reincarnate.teachers.formats._dopamine_gin import parse_gin
from reincarnate.teachers.reference import choose_file
from reincarnate.teachers.zoo import load_teacher

flax = pytest.importorskip("flax")
import dopamine_writers as writers  # noqa: E402 - it needs flax
from test_formats_flax import assert_agree, play  # noqa: E402

IMAGE = np.zeros((84, 84, 4), np.uint8)
CARTPOLE_LOW = (-2.4, -5.0, -math.pi / 12, -math.pi * 2)
CARTPOLE_HIGH = tuple(-low for low in CARTPOLE_LOW)
Images = npt.NDArray[np.uint8]


def midpoints(count: int) -> npt.NDArray[np.float32]:
    return (np.arange(count, dtype=np.float32) + 0.5) / count


@functools.cache
def atari(count: int) -> Images:
    """Observations [count, 4, 84, 84] of random play with sticky actions, from 8 games of Breakout."""
    spec = env_spec("Breakout-v5", sticky_probability=0.25, noop_max=1, fire_reset=False, episodic_life=False)
    rng, rows = np.random.default_rng(0), []
    with make_env(spec, 8, 0) as env:
        rows.append(env.reset().obs)
        every = 1 if count > 1000 else 6  # neighbours are alike
        for step in range(1, (count // 8 + 1) * every):
            outcome = env.step(rng.integers(0, 4, 8))
            if step % every == 0:
                rows.append(outcome.obs)
    return np.concatenate(rows)[:count]


def read(path: Path, data: Any, hints: Hints | None = None) -> Checkpoint:
    return detect_and_read(writers.save(path, data), hints)


def dqn(tmp_path: Path, **changes: Any) -> tuple[Any, Any]:
    module = writers.AtariNetwork(4, hidden=16, **changes)
    return module, writers.parameters(module, IMAGE)


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    """A small network's bundle with numpy arrays, for what needs no JAX."""
    return dict(bundle_of(4))


@functools.cache
def bundle_of(outputs: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"Conv_0": (8, 8, 4, 32), "Conv_1": (4, 4, 32, 64), "Conv_2": (3, 3, 64, 64)}
    shapes |= {"Dense_0": (7744, 4), "Dense_1": (4, outputs)}
    params = {
        name: {"kernel": rng.normal(size=shape).astype(np.float32), "bias": np.zeros(shape[-1], np.float32)}
        for name, shape in shapes.items()
    }
    return {"state": IMAGE, "training_steps": 1, "online_params": {"params": params}}


SLOW = pytest.mark.slow
AGENTS = [
    pytest.param("dqn", "nature", {}, id="dqn"),
    pytest.param("rainbow", "nature", {"kind": "rainbow", "atoms": 51}, id="c51", marks=SLOW),
    pytest.param("qrdqn", "nature", {"kind": "quantile", "atoms": 200}, id="qrdqn"),
    pytest.param(
        "rainbow",
        "nature",
        {"kind": "rainbow", "atoms": 51, "dueling": True, "noisy": True},
        id="full-rainbow",
    ),
    pytest.param(
        "rainbow", "nature", {"kind": "rainbow", "atoms": 51, "dueling": True}, id="dueling", marks=SLOW
    ),
    pytest.param(
        "rainbow", "nature", {"kind": "rainbow", "atoms": 51, "noisy": True}, id="noisy", marks=SLOW
    ),
    pytest.param("dqn", "impala", {"encoder_kind": "listed"}, id="impala", marks=SLOW),
    pytest.param(
        "rainbow",
        "impala",
        {"encoder_kind": "made", "kind": "rainbow", "atoms": 51, "dueling": True, "noisy": True},
        id="impala-rainbow",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(("algorithm", "network", "options"), AGENTS)
def test_agents_play_as_flax_plays_them(
    tmp_path: Path, algorithm: str, network: str, options: dict[str, Any]
) -> None:
    module, params = dqn(tmp_path, **options)
    checkpoint = read(tmp_path / "Breakout" / "1" / "ckpt.399", writers.bundle(params))
    assert (checkpoint.spec.algorithm, checkpoint.spec.network) == (algorithm, network)
    assert checkpoint.format == "dopamine"
    obs = atari(64)
    assert_agree(play(checkpoint, obs), writers.play(module, params, obs))


def test_iqn_is_the_mean_over_its_quantiles(tmp_path: Path) -> None:
    module = writers.Iqn(4, hidden=16)
    params = writers.parameters(module, IMAGE, midpoints(2))
    checkpoint = read(tmp_path / "Breakout" / "1" / "ckpt.199", writers.bundle(params))
    assert (checkpoint.spec.algorithm, checkpoint.spec.network) == ("iqn", "iqn")
    obs = atari(64)[::16]
    ours = play(checkpoint, obs)
    assert_agree(ours, writers.play(module, params, obs, midpoints(64)).mean(axis=1))
    # Dopamine draws its taus: many draws scatter around the mean that is computed here.
    taus = np.random.default_rng(1).random(512, dtype=np.float32)
    draws = writers.play(module, params, obs, taus)
    error = draws.std(axis=1, ddof=1) / math.sqrt(len(taus))
    assert (error > 1e-5).all()
    assert (np.abs(draws.mean(axis=1) - ours) < 5 * error).all()


@pytest.mark.slow
def test_ten_thousand_observations_have_the_same_greedy_action(tmp_path: Path) -> None:
    obs = atari(10_000)
    modules: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "dqn": (writers.AtariNetwork(4, hidden=512), ()),
        "rainbow": (writers.AtariNetwork(4, "rainbow", 51, dueling=True, noisy=True, hidden=64), ()),
        "qrdqn": (writers.AtariNetwork(4, "quantile", 200, hidden=64), ()),
        "iqn": (writers.Iqn(4, hidden=16), (midpoints(64),)),
    }
    for name, (module, inputs) in modules.items():
        params = writers.parameters(module, IMAGE, *inputs)
        checkpoint = read(tmp_path / "Breakout" / name / "ckpt.1", writers.bundle(params))
        assert checkpoint.spec.algorithm == name
        parts = [obs[i : i + 200] for i in range(0, len(obs), 200)]
        ours = np.concatenate([play(checkpoint, part) for part in parts])
        theirs = np.concatenate([writers.play(module, params, part, *inputs) for part in parts])
        theirs = theirs.mean(axis=1) if inputs else theirs
        difference = assert_agree(ours, theirs)
        print(f"{name}: {difference:.2g} of {theirs.std():.2g}")


@pytest.mark.parametrize(
    ("game", "actions", "bounds"),
    [("CartPole", 2, (CARTPOLE_LOW, CARTPOLE_HIGH)), ("LunarLander", 4, (None, None))],
)
def test_classic_control_is_scaled_as_dopamine_scales_it(
    tmp_path: Path, game: str, actions: int, bounds: tuple[Any, Any]
) -> None:
    features = 4 if game == "CartPole" else 8
    module = writers.ClassicNetwork(actions, *bounds, hidden=32)
    params = writers.parameters(module, np.zeros(features, np.float32))
    checkpoint = read(tmp_path / game / "ckpt.199", writers.bundle(params))
    obs = np.random.default_rng(0).normal(size=(500, features)).astype(np.float32)
    assert_agree(play(checkpoint, obs), writers.play(module, params, obs))
    assert checkpoint.spec.env.env_id.startswith(game)
    assert checkpoint.spec.env.kind == "vector"


def test_distributions_of_classic_control_need_their_range(tmp_path: Path) -> None:
    module = writers.ClassicNetwork(2, CARTPOLE_LOW, CARTPOLE_HIGH, hidden=32, atoms=51, v_max=100.0)
    params = writers.parameters(module, np.zeros(4, np.float32))
    path = tmp_path / "CartPole" / "ckpt.9"
    with pytest.raises(UserError, match=r"range Dopamine's settings give as 10 or 100; put the agent's .gin"):
        read(path, writers.bundle(params))
    (path.parent / "c51_cartpole.gin").write_text(
        "JaxRainbowAgent.num_atoms = 51\nJaxRainbowAgent.vmax = 100.\n"
    )
    checkpoint = load_teacher(str(path))
    obs = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    with torch.no_grad():
        ours = checkpoint.network(torch.from_numpy(obs)).numpy()
    assert_agree(ours, writers.play(module, params, obs), 1e-3)  # values up to 100
    assert checkpoint.card.assumed["support"] == "c51_cartpole.gin"


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
        assert same_weights(again(_slotted(patch, plain)), wanted)
    with monkeypatch.context() as patch:
        assert same_weights(again(_as_device_arrays(patch, plain)), wanted)


def pre_linen(params: dict[str, Any]) -> dict[str, Any]:
    """As flax.nn numbered layers in 2020: across their types."""
    return {f"{name[:-1]}{number}": params[name] for number, name in enumerate(sorted(params))}


class FrozenDict:
    """flax's FrozenDict as of early 2021: slots, and no rule of its own for pickling."""

    __slots__ = ("_dict", "_hash")

    def __init__(self, values: dict[str, Any]) -> None:
        self._dict, self._hash = values, None


def _slotted(patch: pytest.MonkeyPatch, params: dict[str, Any]) -> Any:
    from flax.core import frozen_dict

    patch.setattr(FrozenDict, "__module__", frozen_dict.__name__)
    patch.setattr(frozen_dict, "FrozenDict", FrozenDict)
    return FrozenDict(params)


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


def test_every_kind_of_bundle_that_is_none_says_what_it_is(tmp_path: Path, small: dict[str, Any]) -> None:
    path, params = tmp_path / "Breakout" / "ckpt.3", small["online_params"]["params"]
    rest = {"state": IMAGE, "training_steps": 3}
    cases: list[tuple[Any, str]] = [
        (rest | {"eval_mode": False}, "an agent of Dopamine in TensorFlow, whose weights lie in tf_ckpt-N"),
        (rest | {"network_params": params}, "is Dopamine's PPO, which is not read"),
        (rest | {"network_params": params, "log_alpha": 0.1}, "is Dopamine's SAC, which has continuous"),
        (["training_steps"], "no Dopamine bundle: expected a dict, found a list"),
        (rest | {"online_params": [1]}, "online_params: expected a dict of parameters, found a list"),
        (rest | {"online_params": {"params": {"a": {"b": 3}}}}, "a/b: expected an array, found a int"),
        (
            rest | {"online_params": {"Dense_0": {"kernel": np.zeros((4, 2), np.float32)}}},
            "no Dopamine network",
        ),
        (_with(params, "Conv_1", None), "missing 'Conv_1/bias', 'Conv_1/kernel'"),
        (_with(params, "Extra", {"kernel": np.ones((1, 1))}), "unknown 'Extra/kernel'"),
        (
            _with(params, "Dense_1", {"kernel": np.ones(4), "bias": np.ones(4)}),
            "Dense_1/kernel: expected 2 axes",
        ),
        (
            _with(params, "Dense_0", {"kernel": np.ones((7, 4)), "bias": np.ones(4)}),
            "Dense_0/kernel: 7 inputs are not 64 channels",
        ),
        (
            _with(params, "Dense_1", {"kernel": np.ones((4, 4)), "bias": np.ones(5)}),
            r"Dense_1/bias: expected \[4\], found \[5\]",
        ),
        (
            _with(params, "Dense_1", {"kernel": np.full((4, 4), np.nan), "bias": np.ones(4)}),
            "Dense_1/kernel: 16 of 16 weights are NaN",
        ),
        (
            _with(params, "Dense_1", {"kernel": np.ones((4, 4), np.int32), "bias": np.ones(4)}),
            "expected floating-point weights, found int32",
        ),
        (
            _with(params, "Dense_1", {"kernel": np.ones((4, 0)), "bias": np.ones(0)}),
            r"Dense_1/kernel: empty, shape \[4, 0\]",
        ),
    ]
    for data, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            read(path, data)
        assert "\n" not in str(caught.value)


def _with(params: dict[str, Any], layer: str, values: Any) -> dict[str, Any]:
    changed = {name: value for name, value in params.items() if name != layer}
    if values is not None:
        changed[layer] = values
    return {"training_steps": 3, "online_params": {"params": changed}}


class Planted:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_bombs_anywhere_in_a_bundle_do_not_go_off(
    tmp_path: Path, small: dict[str, Any], protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, marker = tmp_path / "Breakout" / "ckpt.3", tmp_path / "exploded"
    bomb = Planted(marker)
    frozen = _slotted(monkeypatch, {"params": bomb})
    bombs: list[Any] = [
        small | {"optimizer_state": (bomb,)},
        small | {"online_params": {"params": {"Conv_0": {"kernel": bomb}}}},
        small | {"online_params": frozen},
        small | {"logs": {bomb: 1} if protocol > 2 else [bomb]},
    ]
    for data in bombs:
        with pytest.raises(UserError, match=r"ckpt.3 is not opened: it asks to import \w+\.system") as caught:
            detect_and_read(writers.save(path, data, protocol))
        assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_lies_about_sizes_and_endless_nesting_are_one_line(tmp_path: Path, small: dict[str, Any]) -> None:
    path = tmp_path / "Breakout" / "ckpt.3"
    endless: dict[str, Any] = {}
    endless["a"] = endless
    shared = np.zeros(100_000, np.float32)
    whole = pickle.dumps(small)
    cases: list[tuple[Any, str]] = [
        (pickle.dumps(small | {"online_params": endless}), "a/a/.*: expected a dict of parameters"),
        (
            pickle.dumps(small | {"online_params": {str(i): shared for i in range(200)}}),
            r"80000000 bytes of arrays in a file of \d+; refused",
        ),
        (
            pickle.dumps(small | {"online_params": {str(i): shared[:1] for i in range(300)}}),
            "more than 256 arrays",
        ),
        (whole[: len(whole) // 2], "truncated or damaged"),
        (whole.replace(b"M@\x1e", b"M@\x1f"), "truncated or damaged"),  # 7744 rows become 8000
    ]
    path.parent.mkdir()
    for data, message in cases:
        path.write_bytes(data)
        with pytest.raises(UserError, match=message) as caught:
            detect_and_read(path)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700


def test_other_pickles_are_still_refused_as_such(tmp_path: Path) -> None:
    path = writers.save(tmp_path / "x.pkl", {"weights": [1, 2]})
    with pytest.raises(UserError, match="a bare Python pickle"):
        detect_and_read(path, Hints("Breakout-v5"))
