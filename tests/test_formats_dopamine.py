"""Dopamine's checkpoints against its networks in flax."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from reincarnate.envs import env_spec, make_env
from reincarnate.errors import UserError
from reincarnate.teachers.zoo import load_teacher

flax = pytest.importorskip("flax")
from test_formats_flax import assert_agree, play  # noqa: E402

import dopamine_writers as writers  # noqa: E402 - it needs flax
from dopamine_writers import IMAGE, read  # noqa: E402

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


def dqn(tmp_path: Path, **changes: Any) -> tuple[Any, Any]:
    module = writers.AtariNetwork(4, hidden=16, **changes)
    return module, writers.parameters(module, IMAGE)


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
