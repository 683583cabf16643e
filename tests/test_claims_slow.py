"""The returns stated beside the shared checkpoints, measured again; `make test-slow`, up to an hour."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import reincarnate
from reincarnate.teachers.claims import LEVEL, p_value, parse_claim
from reincarnate.types import Backend

from paths import SHARED_CHECKPOINTS, needs_checkpoints
from small_runs import quiet

OWN = SHARED_CHECKPOINTS / "own"
PPO, PPO_FLAX = "ppo_atari_envpool.cleanrl_model", "ppo_atari_envpool_xla_jax_scan.cleanrl_model"
#: Folder and file, acting rule, backend, games, and the return that its README states.
STATED: list[tuple[str, str, Backend, int, str]] = [
    ("CartPole-v1-dqn-seed1/dqn.cleanrl_model", "greedy", "gymnasium", 30, "431.3 +/- 68.5"),
    ("CartPole-v1-dqn_jax-seed1/dqn_jax.cleanrl_model", "greedy", "gymnasium", 30, "369.6 +/- 99.0"),
    ("Breakout-dqn/dqn_atari.cleanrl_model", "epsilon=0.01", "envpool", 32, "69.8 +/- 25.7"),
    ("Breakout-dqn/dqn_atari.cleanrl_model", "epsilon=0.01", "gymnasium", 32, "53.7 +/- 27.9"),
    ("Breakout-dqn/dqn_atari_jax.cleanrl_model", "epsilon=0.05", "envpool", 32, "56.1 +/- 23.4"),
    (f"Breakout-ppo/{PPO}", "sample", "envpool", 32, "55.0 +/- 37.4"),
    (f"Breakout-ppo/{PPO_FLAX}", "epsilon=0.01", "envpool", 32, "76.1 +/- 52.2"),
    (f"Breakout-ppo-mid/{PPO}", "sample", "envpool", 32, "22.3 +/- 7.0"),
    (f"Breakout-ppo-weak/{PPO}", "sample", "envpool", 32, "12.2 +/- 4.0"),
]


@needs_checkpoints
@pytest.mark.slow
@pytest.mark.parametrize(("file", "act", "backend", "games", "stated"), STATED)
def test_the_stated_return_is_measured_under_the_stated_rule(
    file: str,
    act: str,
    backend: Backend,
    games: int,
    stated: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path))
    returns = reincarnate.evaluate_teacher(
        str(OWN / file), episodes=games, act_rule=act, backend=backend, progress=quiet()
    ).returns
    claim = parse_claim(stated, "README")
    assert claim is not None
    p = p_value(returns, dataclasses.replace(claim, n=games))
    print(f"{file}, {act}, {backend}: {returns}; stated {stated}, p {p:.2f}")
    assert p > LEVEL, f"{returns} where {stated} is stated"
