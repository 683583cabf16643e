"""Every CleanRL format on 10,000 real observations: what the original library computes, and the same action.

The networks are written anew in ``checkpoint_writers`` and saved by the real writers. Small images and few
channels keep it quick; the real checkpoints are compared at full size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from reincarnate.teachers.formats import Hints, detect_and_read

import checkpoint_writers as writers
import observations
from paths import SHARED_CHECKPOINTS, needs_checkpoints

OWN = SHARED_CHECKPOINTS / "own"
TOLERANCE = 1e-4
SIDE = 44  # two by two features after the Nature convolutions: their order shows
CHANNELS = (2, 4, 4)
ATOMS, LOW, HIGH = 21, -10.0, 10.0
Array = npt.NDArray[Any]
Play = Callable[[Array], Array]  # observations -> outputs


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def in_chunks(play: Play, obs: Array, size: int = 250) -> Array:
    return np.concatenate([play(obs[i : i + size]) for i in range(0, len(obs), size)])


def ours(path: Path, hints: Hints | None, obs: Array) -> Array:
    checkpoint = detect_and_read(path, hints)
    network = checkpoint.spec.build()
    network.load_state_dict(checkpoint.state_dict)
    with torch.inference_mode():
        return in_chunks(lambda part: network(torch.from_numpy(part)).numpy(), obs)


def of_module(module: nn.Module) -> Play:
    """What CleanRL's scripts do: pixels over 255, features as they are."""

    def play(obs: Array) -> Array:
        scaled = torch.from_numpy(obs) / 255.0 if obs.dtype == np.uint8 else torch.from_numpy(obs)
        with torch.inference_mode():
            return np.asarray(module(scaled))

    return play


def of_flax(apply: Callable[[Any, Array], Any], params: Any) -> Play:
    import jax

    compiled = jax.jit(apply)
    return lambda obs: np.asarray(compiled(params, obs))


def assert_same_policy(path: Path, hints: Hints | None, obs: Array, original: Play) -> None:
    mine, theirs = ours(path, hints, obs), in_chunks(original, obs)
    assert mine.shape == theirs.shape
    assert len(obs) == observations.COUNT
    assert float(np.std(theirs)) > 1e-3  # an oracle that says nothing proves nothing
    assert float(np.abs(mine - theirs).max()) <= TOLERANCE
    best = np.sort(theirs, axis=1)
    clear = best[:, -1] - best[:, -2] > 2 * TOLERANCE
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(mine.argmax(1)[clear], theirs.argmax(1)[clear])


def loud(module: nn.Module) -> nn.Module:
    """Weights a few times as large as PyTorch draws them, so that outputs differ by more than rounding."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0)
    return module


def torch_c51(network: nn.Sequential) -> nn.Module:
    return loud(writers.TorchC51(network, ATOMS, LOW, HIGH))


def torch_cases() -> dict[str, tuple[nn.Module, str]]:
    nature, trunk = (writers.torch_nature(4, SIDE, SIDE, size, hidden=32) for size in (4, 1))
    nature_c51 = writers.torch_nature(4, SIDE, SIDE, 4 * ATOMS, hidden=32)
    impala = [writers.torch_impala(4, SIDE, 4, CHANNELS) for _ in range(2)]
    return {
        "dqn": (nn.ModuleDict({"network": writers.torch_mlp(4, (120, 84), 2, nn.ReLU)}), "network"),
        "dqn_other_sizes": (nn.ModuleDict({"network": writers.torch_mlp(4, (32, 8), 2, nn.ReLU)}), "network"),
        "c51": (torch_c51(writers.torch_mlp(4, (120, 84), 2 * ATOMS, nn.ReLU)), ""),
        "ppo": (
            writers.Agent(*(writers.torch_mlp(4, (64, 64), size, nn.Tanh) for size in (2, 1))),
            "",
        ),
        "dqn_atari": (nn.ModuleDict({"network": nature}), "network"),
        "c51_atari": (torch_c51(nature_c51), ""),
        "ppo_atari": (writers.Agent(nn.Linear(32, 4), nn.Linear(32, 1), trunk[:-1]), ""),
        "qdagger_impala": (nn.ModuleDict({"network": impala[0]}), "network"),
        "ppo_impala": (writers.Agent(nn.Linear(256, 4), nn.Linear(256, 1), impala[1][:-1]), ""),
    }


@pytest.mark.parametrize("name", list(torch_cases()))
def test_a_torch_file_is_the_module_that_was_saved(tmp_path: Path, name: str) -> None:
    module, part = torch_cases()[name]
    path = tmp_path / f"{name}.cleanrl_model"
    if name.startswith("c51"):
        env_id = "CartPole-v1" if name == "c51" else "BreakoutNoFrameskip-v4"
        writers.save_c51(path, module, writers.c51_arguments(env_id, name, ATOMS, LOW, HIGH))
    else:
        torch.save(module.state_dict(), path)
    original = of_module(module[part] if part else module)  # type: ignore[index]
    vector = name in ("dqn", "dqn_other_sizes", "c51", "ppo")
    obs = observations.cartpole() if vector else observations.breakout(SIDE)
    hints = Hints("CartPole-v1") if vector else Hints("Breakout-v5", image_size=(SIDE, SIDE))
    assert_same_policy(path, hints, obs, original)


@pytest.mark.parametrize("name", ["dqn_jax", "c51_jax", "dqn_atari_jax", "c51_atari_jax", "qdagger_jax"])
def test_a_flax_file_of_q_values_plays_as_flax_plays_it(tmp_path: Path, name: str) -> None:
    pytest.importorskip("flax")
    categorical, vector = name.startswith("c51"), name in ("dqn_jax", "c51_jax")
    outputs = (2 if vector else 4) * (ATOMS if categorical else 1)
    module = (
        writers.flax_dense(120, 84, outputs)
        if vector
        else writers.flax_impala(outputs, CHANNELS)
        if name == "qdagger_jax"
        else writers.flax_nature(outputs, hidden=32)
    )
    obs = observations.cartpole() if vector else observations.breakout(SIDE)
    params = writers.flax_params(module, obs[:1], seed=3)
    path, apply = tmp_path / f"{name}.cleanrl_model", module.apply
    hints = Hints("CartPole-v1") if vector else Hints("Breakout-v5", image_size=(SIDE, SIDE))
    if categorical:
        arguments = writers.c51_arguments("Breakout-v5", name, ATOMS, int(LOW), int(HIGH))
        writers.save_flax(path, {"model_weights": params, "args": arguments})
        apply = writers.flax_q_values(module.apply, ATOMS, LOW, HIGH)
    else:
        writers.save_flax(path, params)
    assert_same_policy(path, hints, obs, of_flax(apply, params))


@pytest.mark.parametrize(
    ("script", "channels", "hiddens", "actions"),
    [
        ("ppo_atari_envpool_xla_jax_scan", None, (32,), 4),
        ("cleanba_ppo", (2, 4, 4), (32,), 18),
        ("cleanba_impala", (2, 4), (32, 16), 18),
        ("ppo_atari_envpool_async_jax_scan_impalanet_machado", (2, 4, 4), (32,), 18),
        ("cleanba_ppo_envpool_impala_atari_wrapper", (4, 2, 2, 4), (24,), 4),
    ],
)
def test_a_flax_file_of_a_policy_plays_as_flax_plays_it(
    tmp_path: Path, script: str, channels: tuple[int, ...] | None, hiddens: tuple[int, ...], actions: int
) -> None:
    pytest.importorskip("flax")
    obs = observations.breakout(SIDE)
    trunk = writers.flax_impala(None, channels, hiddens) if channels else writers.flax_nature(None, *hiddens)
    actor, critic = writers.flax_dense(actions), writers.flax_dense(1)
    features = np.zeros((1, hiddens[-1]), np.float32)
    params = [
        writers.flax_params(trunk, obs[:1], 1),
        *(writers.flax_params(head, features, 2) for head in (actor, critic)),
    ]
    arguments = writers.cleanba_arguments("Breakout-v5", script)
    if script in ("cleanba_ppo", "cleanba_impala") and channels:
        arguments |= {"channels": list(channels), "hiddens": list(hiddens)}
    path = writers.save_cleanba(tmp_path / f"{script}.cleanrl_model", arguments, params)
    apply = of_flax(lambda parts, x: actor.apply(parts[1], trunk.apply(parts[0], x)), params)
    assert_same_policy(path, Hints(image_size=(SIDE, SIDE)), obs, apply)


@needs_checkpoints
def test_the_real_cartpole_agents_play_as_their_libraries_play_them() -> None:
    obs = observations.cartpole()
    path = OWN / "CartPole-v1-dqn-seed1" / "dqn.cleanrl_model"
    module = nn.ModuleDict({"network": writers.torch_mlp(4, (120, 84), 2, nn.ReLU)})
    module.load_state_dict(torch.load(path, weights_only=True))
    assert_same_policy(path, None, obs, of_module(module["network"]))
    flax = pytest.importorskip("flax")
    path = OWN / "CartPole-v1-dqn_jax-seed1" / "dqn_jax.cleanrl_model"
    params = flax.serialization.msgpack_restore(path.read_bytes())
    assert_same_policy(path, None, obs, of_flax(writers.flax_dense(120, 84, 2).apply, params))


@needs_checkpoints
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["Breakout-dqn", "Breakout-ppo", "Breakout-ppo-mid", "Breakout-ppo-weak"])
def test_the_real_breakout_agents_play_as_their_modules(folder: str) -> None:
    (path,) = (each for each in (OWN / folder).glob("*.cleanrl_model") if "jax" not in each.name)
    state = torch.load(path, weights_only=True)
    module: nn.Module
    if "actor.weight" in state:
        trunk = writers.torch_nature(4, 84, 84, 1)[:-1]
        module = writers.Agent(nn.Linear(512, 4), nn.Linear(512, 1), trunk)
        module.load_state_dict(state)
    else:
        module = writers.torch_nature(4, 84, 84, 4)
        module.load_state_dict({key.removeprefix("network."): value for key, value in state.items()})
    assert_same_policy(path, None, observations.breakout(84), of_module(module))


@needs_checkpoints
@pytest.mark.slow
def test_the_real_breakout_agents_play_as_flax_plays_them() -> None:
    flax = pytest.importorskip("flax")
    obs = observations.breakout(84)
    path = OWN / "Breakout-dqn" / "dqn_atari_jax.cleanrl_model"
    params = flax.serialization.msgpack_restore(path.read_bytes())
    assert_same_policy(path, None, obs, of_flax(writers.flax_nature(4).apply, params))
    path = OWN / "Breakout-ppo" / "ppo_atari_envpool_xla_jax_scan.cleanrl_model"
    parts = flax.serialization.msgpack_restore(path.read_bytes())["1"]
    trunk, actor = writers.flax_nature(None), writers.flax_dense(4)
    assert_same_policy(
        path, None, obs, of_flax(lambda p, x: actor.apply(p["1"], trunk.apply(p["0"], x)), parts)
    )
