"""flax checkpoints against flax itself: same outputs, same best action; and read where JAX cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from reincarnate.errors import UserError
from reincarnate.teachers.formats import Checkpoint, Hints, _environment, detect_and_read
from reincarnate.types import EnvSpec

import checkpoint_writers as writers
from paths import SHARED_CHECKPOINTS, needs_checkpoints

OWN = SHARED_CHECKPOINTS / "own"
TOLERANCE = 1e-4


@pytest.fixture
def any_environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Environments ``game-A-v5`` and ``vector-F-A-v1`` with any number of actions A and features F."""

    def env_spec(env_id: str, **overrides: Any) -> EnvSpec:
        kind, *numbers = env_id.split("-")[:-1]
        values = {"obs_shape": (4, 84, 84)} if kind == "game" else {"obs_shape": (int(numbers[0]),)}
        name = "atari" if kind == "game" else "vector"
        return EnvSpec(env_id, name, int(numbers[-1]), **(values | overrides))  # type: ignore[arg-type]

    monkeypatch.setattr(_environment, "env_spec", env_spec)


def images(shape: tuple[int, ...], seed: int = 0, batch: int = 4) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (batch, *shape), dtype=np.uint8)


def play(checkpoint: Checkpoint, obs: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    network = checkpoint.spec.build()
    network.load_state_dict(checkpoint.state_dict)
    with torch.no_grad():
        return np.asarray(network(torch.from_numpy(obs)))


def assert_agree(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], tolerance: float = TOLERANCE) -> float:
    """Outputs within the tolerance and the same best action wherever it is not a tie; the difference."""
    assert ours.shape == theirs.shape
    assert float(np.std(theirs)) > 1e-3  # an oracle that says nothing proves nothing
    difference = float(np.abs(ours - theirs).max())
    assert difference <= tolerance
    best = np.sort(theirs, axis=1)
    clear = best[:, -1] - best[:, -2] > 2 * tolerance
    assert clear.any()
    np.testing.assert_array_equal(ours.argmax(1)[clear], theirs.argmax(1)[clear])
    return difference


NATURE = [
    # stack, height, width, actions
    (4, 84, 84, 4),
    (4, 85, 85, 18),
    (4, 96, 96, 6),
    (4, 52, 52, 2),
    (1, 91, 91, 9),
    (3, 60, 84, 3),  # not square: a wrong order of height and width shows
]


@pytest.mark.parametrize(("stack", "height", "width", "actions"), NATURE)
@pytest.mark.usefixtures("any_environment")
def test_random_nature_weights_play_as_flax_plays_them(
    tmp_path: Path, stack: int, height: int, width: int, actions: int
) -> None:
    pytest.importorskip("flax")
    module = writers.flax_nature(actions, hidden=64)
    obs = images((stack, height, width), seed=actions)
    params = writers.flax_params(module, obs, seed=height)
    path = writers.save_flax(tmp_path / "dqn_atari_jax.cleanrl_model", params)
    hints = Hints(f"game-{actions}-v5", image_size=(height, width))
    checkpoint = detect_and_read(path, hints)
    assert checkpoint.spec.env.obs_shape == (stack, height, width)
    assert checkpoint.spec.env.num_actions == actions
    assert (checkpoint.spec.algorithm, checkpoint.spec.outputs) == ("dqn", "q_values")
    assert_agree(play(checkpoint, obs), np.asarray(module.apply(params, obs)))


@pytest.mark.parametrize(("side", "actions"), [(84, 4), (85, 18), (52, 5)])
@pytest.mark.usefixtures("any_environment")
def test_random_impala_weights_play_as_flax_plays_them(tmp_path: Path, side: int, actions: int) -> None:
    """84 and 52 are even at some poolings and odd at others: SAME pads them differently."""
    pytest.importorskip("flax")
    module = writers.flax_impala(actions)
    obs = images((4, side, side), seed=side, batch=2)
    params = writers.flax_params(module, obs, seed=side)
    path = writers.save_flax(tmp_path / "x.cleanrl_model", params)
    checkpoint = detect_and_read(path, Hints(f"game-{actions}-v5", image_size=(side, side)))
    assert checkpoint.spec.network_options == {
        "hidden": 256,
        "channels": [16, 32, 32],
        "pool_padding": "same",
    }
    assert_agree(play(checkpoint, obs), np.asarray(module.apply(params, obs)))


@pytest.mark.parametrize(("features", "actions"), [(4, 2), (6, 3), (8, 4), (27, 18)])
@pytest.mark.usefixtures("any_environment")
def test_random_dense_weights_play_as_flax_plays_them(tmp_path: Path, features: int, actions: int) -> None:
    pytest.importorskip("flax")
    module = writers.flax_dense(120, 84, actions)
    obs = np.random.default_rng(1).standard_normal((64, features)).astype(np.float32)
    params = writers.flax_params(module, obs, seed=features)
    path = writers.save_flax(tmp_path / "dqn_jax.cleanrl_model", params)
    checkpoint = detect_and_read(path, Hints(f"vector-{features}-{actions}-v1"))
    assert checkpoint.spec.network_options == {"hidden": [120, 84], "activation": "relu"}
    assert_agree(play(checkpoint, obs), np.asarray(module.apply(params, obs)))


@pytest.mark.parametrize("form", ["flax", "list", "bare"])
@pytest.mark.usefixtures("any_environment")
def test_every_form_of_a_policy_file_is_the_same_policy(tmp_path: Path, form: str) -> None:
    """flax turns ``[args, [network, actor, critic]]`` into maps with the keys "0", "1"; both are read."""
    flax = pytest.importorskip("flax")
    obs = images((4, 84, 84))
    trunk, actor, critic = writers.flax_nature(None, 64), writers.flax_dense(6), writers.flax_dense(1)
    features = np.zeros((1, 64), np.float32)
    params = [writers.flax_params(trunk, obs, 1)] + [
        writers.flax_params(head, features, 2) for head in (actor, critic)
    ]
    theirs = np.asarray(actor.apply(params[1], trunk.apply(params[0], obs)))
    args = {"env_id": "game-6-v5", "exp_name": "ppo_atari_envpool_xla_jax", "seed": 1, "wandb_entity": None}
    path = tmp_path / "agent.cleanrl_model"
    if form == "flax":
        writers.save_flax(path, [args, params])
    else:
        parts = [part["params"] if form == "bare" else part for part in params]
        path.write_bytes(flax.serialization.msgpack_serialize([args, parts]))
    checkpoint = detect_and_read(path)
    assert (checkpoint.spec.algorithm, checkpoint.spec.outputs) == ("ppo", "policy_logits")
    assert checkpoint.assumed["env_id"] == "arguments stored in the file"
    assert checkpoint.assumed["noop_max"] == "CleanRL's ppo_atari_envpool_xla_jax"
    assert_agree(play(checkpoint, obs), theirs)


@pytest.mark.usefixtures("any_environment")
def test_bare_parameters_are_read_like_those_under_params(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    params = writers.flax_params(writers.flax_dense(120, 84, 2), np.zeros((1, 4), np.float32), 0)
    paths = [
        writers.save_flax(tmp_path / name, tree) for name, tree in (("a", params), ("b", params["params"]))
    ]
    first, second = (detect_and_read(path, Hints("vector-4-2-v1")) for path in paths)
    assert all(torch.equal(first.state_dict[name], second.state_dict[name]) for name in first.state_dict)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.usefixtures("any_environment")
def test_other_precisions_become_float32(tmp_path: Path, dtype: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    pytest.importorskip("flax")
    params = writers.flax_params(writers.flax_dense(120, 84, 2), np.zeros((1, 4), np.float32), 0)["params"]
    kind = jnp.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    stored = {name: {k: v.astype(kind) for k, v in layer.items()} for name, layer in params.items()}
    path = writers.save_flax(tmp_path / "x", {"params": stored})
    state = detect_and_read(path, Hints("vector-4-2-v1")).state_dict
    expected = stored["Dense_1"]["kernel"].astype(np.float32).T
    np.testing.assert_array_equal(state["trunk.layers.1.weight"].numpy(), expected)
    assert all(value.dtype == torch.float32 and value.is_contiguous() for value in state.values())


def test_a_number_too_large_for_float32_is_not_finite(tmp_path: Path) -> None:
    params = dense_params()
    params["Dense_1"]["bias"] = np.full(84, 1e300)
    path = write(tmp_path / "x.cleanrl_model", {"params": params})
    with pytest.raises(UserError, match=r"Dense_1/bias: 84 of 84 weights are NaN or infinite"):
        detect_and_read(path, Hints("CartPole-v1"))


@pytest.mark.usefixtures("any_environment")
def test_arrays_that_flax_writes_in_chunks_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flax = pytest.importorskip("flax")
    params = writers.flax_params(writers.flax_dense(120, 84, 2), np.zeros((1, 4), np.float32), 0)
    whole = writers.save_flax(tmp_path / "whole", params)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1000)  # 1 GiB, so that small arrays chunk too
    chunked = writers.save_flax(tmp_path / "chunked", params)
    assert b"__msgpack_chunked_array__" in chunked.read_bytes()
    first, second = (detect_and_read(path, Hints("vector-4-2-v1")) for path in (whole, chunked))
    assert all(torch.equal(first.state_dict[name], second.state_dict[name]) for name in first.state_dict)


@needs_checkpoints
@pytest.mark.parametrize("batch_seed", [0, 1])
def test_the_real_breakout_dqn_plays_as_flax_plays_it(batch_seed: int) -> None:
    flax = pytest.importorskip("flax")
    path = OWN / "Breakout-dqn" / "dqn_atari_jax.cleanrl_model"
    obs = images((4, 84, 84), batch_seed, batch=32)
    params = flax.serialization.msgpack_restore(path.read_bytes())
    theirs = np.asarray(writers.flax_nature(4).apply(params, obs))
    assert_agree(play(detect_and_read(path), obs), theirs)


@needs_checkpoints
def test_the_real_breakout_ppo_plays_as_flax_plays_it() -> None:
    flax = pytest.importorskip("flax")
    path = OWN / "Breakout-ppo" / "ppo_atari_envpool_xla_jax_scan.cleanrl_model"
    obs = images((4, 84, 84), 3, batch=32)
    trunk, actor = (flax.serialization.msgpack_restore(path.read_bytes())["1"][part] for part in "01")
    theirs = np.asarray(writers.flax_dense(4).apply(actor, writers.flax_nature(None).apply(trunk, obs)))
    assert_agree(play(detect_and_read(path), obs), theirs)


@needs_checkpoints
def test_the_real_cartpole_dqn_plays_as_flax_plays_it() -> None:
    flax = pytest.importorskip("flax")
    path = OWN / "CartPole-v1-dqn_jax-seed1" / "dqn_jax.cleanrl_model"
    obs = np.random.default_rng(0).standard_normal((512, 4)).astype(np.float32)
    params = flax.serialization.msgpack_restore(path.read_bytes())
    theirs = np.asarray(writers.flax_dense(120, 84, 2).apply(params, obs))
    assert_agree(play(detect_and_read(path), obs), theirs)


@needs_checkpoints
@pytest.mark.parametrize(
    ("folder", "torch_file", "flax_file"),
    [
        ("Breakout-dqn", "dqn_atari", "dqn_atari_jax"),
        ("Breakout-ppo", "ppo_atari_envpool", "ppo_atari_envpool_xla_jax_scan"),
    ],
)
def test_torch_and_flax_files_of_the_same_agent_hold_the_same_weights(
    folder: str, torch_file: str, flax_file: str
) -> None:
    first, second = (
        detect_and_read(OWN / folder / f"{name}.cleanrl_model") for name in (torch_file, flax_file)
    )
    assert first.spec == second.spec
    assert list(first.state_dict) == list(second.state_dict)
    assert all(torch.equal(first.state_dict[name], second.state_dict[name]) for name in first.state_dict)


READ_WITHOUT_JAX = """
import sys
for name in ("jax", "jaxlib", "flax", "ml_dtypes"):
    sys.modules[name] = None  # importing it now fails
from pathlib import Path
import torch
from reincarnate.teachers.formats import Hints, detect_and_read
checkpoint = detect_and_read(Path(sys.argv[1]), Hints("CartPole-v1"))
network = checkpoint.spec.build()
network.load_state_dict(checkpoint.state_dict)
print(checkpoint.format, *network(torch.ones(1, 4))[0].tolist())
"""


def test_flax_files_load_where_jax_is_not_installed(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    module = writers.flax_dense(120, 84, 2)
    obs = np.ones((1, 4), np.float32)
    params = writers.flax_params(module, obs, 0)
    path = writers.save_flax(tmp_path / "dqn_jax.cleanrl_model", params)
    done = subprocess.run(
        [sys.executable, "-c", READ_WITHOUT_JAX, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    name, *values = done.stdout.split()
    assert name == "cleanrl_flax"
    np.testing.assert_allclose(
        [float(v) for v in values], np.asarray(module.apply(params, obs))[0], atol=1e-4
    )


def write(path: Path, tree: Any) -> Path:
    import flax.serialization

    path.write_bytes(flax.serialization.msgpack_serialize(tree))
    return path


def dense_params(actions: int = 2) -> dict[str, Any]:
    """Parameters of CleanRL's dqn_jax on CartPole."""
    pytest.importorskip("flax")
    params = writers.flax_params(writers.flax_dense(120, 84, actions), np.zeros((1, 4), np.float32), 0)
    return {name: dict(layer) for name, layer in params["params"].items()}


def test_a_missing_and_an_unknown_key_are_named(tmp_path: Path) -> None:
    params = dense_params()
    del params["Dense_2"]["bias"]
    params["Dense_2"]["offset"] = np.zeros(2, np.float32)
    path = write(tmp_path / "x.cleanrl_model", {"params": params})
    counts = r"not the keys of CleanRL's dqn_jax: expected 6, found 6"
    match = rf"x\.cleanrl_model: {counts}; missing 'Dense_2/bias'; unknown 'Dense_2/offset'"
    with pytest.raises(UserError, match=match):
        detect_and_read(path, Hints("CartPole-v1"))


def test_a_wrong_shape_is_told_in_the_files_own_layout(tmp_path: Path) -> None:
    params = dense_params()
    params["Dense_1"]["kernel"] = np.zeros((119, 84), np.float32)
    path = write(tmp_path / "x.cleanrl_model", {"params": params})
    match = r"x\.cleanrl_model: Dense_1/kernel: expected \[120, 84\], found \[119, 84\]"
    with pytest.raises(UserError, match=match):
        detect_and_read(path, Hints("CartPole-v1"))


def test_a_wrong_rank_is_told(tmp_path: Path) -> None:
    params = dense_params()
    params["Dense_0"]["kernel"] = np.zeros((4, 120, 1), np.float32)
    path = write(tmp_path / "x.cleanrl_model", {"params": params})
    with pytest.raises(UserError, match=r"Dense_0/kernel: expected 2 axes, found shape \[4, 120, 1\]"):
        detect_and_read(path, Hints("CartPole-v1"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    params = dense_params()
    kernel = params["Dense_1"]["kernel"].copy()
    kernel[3, 5] = kernel[7, 7] = bad
    params["Dense_1"]["kernel"] = kernel
    path = write(tmp_path / "x.cleanrl_model", {"params": params})
    with pytest.raises(UserError, match=r"Dense_1/kernel: 2 of 10080 weights are NaN or infinite"):
        detect_and_read(path, Hints("CartPole-v1"))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    params = dense_params()
    params["Dense_0"]["bias"] = np.zeros(120, np.int32)
    path = write(tmp_path / "x.cleanrl_model", {"params": params})
    with pytest.raises(UserError, match=r"Dense_0/bias: expected floating-point weights, found torch.int32"):
        detect_and_read(path, Hints("CartPole-v1"))


def test_a_value_that_is_no_array_is_named(tmp_path: Path) -> None:
    params = dense_params()
    params["Dense_0"]["bias"] = "zero"
    path = write(tmp_path / "x.cleanrl_model", {"params": params})
    with pytest.raises(UserError, match=r"Dense_0/bias: expected an array, found a str"):
        detect_and_read(path, Hints("CartPole-v1"))


def test_another_tree_is_no_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    path = write(tmp_path / "x.cleanrl_model", {"step": np.zeros(3, np.float32)})
    with pytest.raises(UserError, match=r"keys of no CleanRL script that can be read .*found step"):
        detect_and_read(path, Hints("CartPole-v1"))
    write(path, [{"step": 1}])
    with pytest.raises(UserError, match=r"expected a map of parameters, found a list"):
        detect_and_read(path, Hints("CartPole-v1"))


def test_c51_without_its_support_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.cleanrl_model", {"model_weights": dense_params(), "args": {"n_atoms": 51}})
    with pytest.raises(UserError, match=r"n_atoms, v_min and v_max are not all among its arguments"):
        detect_and_read(path, Hints("CartPole-v1"))


@pytest.mark.parametrize("length", [2, 3])
def test_ddpg_and_td3_are_policies_of_continuous_actions(tmp_path: Path, length: int) -> None:
    networks = [{"params": dense_params()} for _ in range(length)]
    path = writers.save_flax(tmp_path / "x.cleanrl_model", networks)
    with pytest.raises(UserError, match=rf"x\.cleanrl_model holds {length} networks, .*continuous actions"):
        detect_and_read(path, Hints("CartPole-v1"))
