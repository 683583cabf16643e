"""Muesli learns: a small look at every run, and the figures of docs/students/muesli.md as slow tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from reincarnate.config import override, preset
from reincarnate.losses import categorical_mean, unroll_targets
from reincarnate.runner import Run
from reincarnate.students.muesli import Muesli
from reincarnate.students.muesli.objective import action_windows

import hidden_cartpole
from muesli_games import SUPPORT, generator, learner, play_recall
from small_runs import quiet

M = torch.ones(())


def train(folder: Path, **settings: Any) -> dict[str, Any]:
    """A run of the quick preset from scratch; ``settings`` use __ for the dot. Gives result.json."""
    base = preset("quick", scratch=True, student="muesli")
    values = {name.replace("__", "."): value for name, value in settings.items()}
    fixed = {"env.id": "CartPole-v1", "system.device": "cpu", "student": "muesli"}
    return Run.start(override(base, fixed | values), folder, quiet()).execute()


def logged(folder: Path, tag: str) -> list[float]:
    """The values of a TensorBoard scalar, in their order."""
    return [
        float(tensor_util.make_ndarray(value.tensor))
        for path in sorted(folder.glob("events.out.tfevents.*"))
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == tag
    ]


def final(result: dict[str, Any]) -> float:
    return float(result["student"]["final_return"]["mean"])


# ------------------------------------------------------------ small


def test_a_few_thousand_steps_of_cartpole_are_better_than_none(tmp_path: Path) -> None:
    result = train(tmp_path / "run", online__agent_steps=6_000, evaluate__games=20)
    assert result["random"]["mean"] < 35
    assert final(result) > 1.5 * result["random"]["mean"]
    for name in ("value_loss", "reward_loss"):
        values = logged(tmp_path / "run", f"online/{name}")
        assert values[-1] < 0.8 * values[0], name


@pytest.fixture(scope="module")
def recaller() -> tuple[Muesli, dict[str, float], dict[str, float]]:
    """A learner after some games in which memory pays, with the losses of its first and last updates."""
    student, g = learner(16, rate=1e-2), generator(5)
    history = []
    for _ in range(200):
        batch, _ = play_recall(student, 48, 2, g)
        history.append({name: float(value) for name, value in student.update(batch, None, M).items()})
    return student, history[0], history[-1]


def test_each_loss_of_the_model_falls(recaller: tuple[Muesli, dict[str, float], dict[str, float]]) -> None:
    _, first, last = recaller
    for name in ("reward_loss", "value_loss"):
        assert last[name] < 0.5 * first[name], name


def test_the_model_predicts_rewards_better_than_a_constant(
    recaller: tuple[Muesli, dict[str, float], dict[str, float]],
) -> None:
    """Up to five steps ahead, on games that it has not seen."""
    student, _, _ = recaller
    batch, _ = play_recall(student, 400, 2, generator(99))
    steps = student._settings.unroll_steps
    with torch.no_grad():
        root = student.target(batch.obs, batch.state, batch.game_start)
        actions = action_windows(batch.action[:, :-1], steps)
        model = student.target.unroll(root.features[:, :-1].flatten(0, 1), actions.flatten(0, 1))
    found = categorical_mean(model.reward_logits, SUPPORT).view(*actions.shape)
    zeros = torch.zeros_like(batch.reward[:, :-1])
    ends = (batch.terminal[:, :-1], batch.truncated[:, :-1])
    truth = unroll_targets(batch.reward[:, :-1], zeros, batch.executed[:, :-1], *ends, steps)
    predicted, rewards = found[truth.reward_mask], truth.reward[truth.reward_mask]
    assert rewards.var() > 0.01
    assert (predicted - rewards).square().mean() < 0.5 * rewards.var()


def test_the_game_without_velocities_shows_none_and_is_cartpole_otherwise() -> None:
    hidden_cartpole.register()
    import gymnasium

    ours, whole = gymnasium.make(hidden_cartpole.NAME), gymnasium.make("CartPole-v1")
    seen, real = ours.reset(seed=4)[0], whole.reset(seed=4)[0]
    for action in (1, 0, 1, 1):
        assert seen.tolist() == real[[0, 2]].tolist()
        seen, real = ours.step(action)[0], whole.step(action)[0]
    assert ours.spec is not None
    assert ours.spec.max_episode_steps == 500


# ------------------------------------------------------------ whole runs
# Bars that the seeds of docs/students/muesli.md meet.

SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])


@pytest.mark.slow
@SEEDS
def test_cartpole_from_scratch(seed: int, tmp_path: Path) -> None:
    """150,000 agent steps, sampled policy, 100 games."""
    assert final(train(tmp_path / "run", seed=seed, evaluate__games=100)) >= 450


@pytest.mark.slow
@SEEDS
@pytest.mark.parametrize(("core", "low", "high"), [(64, 300, 500), (None, 0, 120)])
def test_memory_where_velocities_are_hidden(
    core: int | None, low: float, high: float, seed: int, tmp_path: Path
) -> None:
    """What an LSTM has to learn first takes more replay, and a slower target than `quick` has."""
    hidden_cartpole.register()
    settings = {
        "env__id": hidden_cartpole.NAME,
        "env__backend": "gymnasium",
        "online__agent_steps": 250_000,
        "optimizer__batch_size": 16,
        "optimizer__learning_rate": 1.5e-3,
        "muesli__replay_fraction": 0.9375,  # one sequence of 16 is fresh
        "muesli__target_rate": 0.03,
    }
    result = train(tmp_path / "run", seed=seed, evaluate__games=100, muesli__core_units=core, **settings)
    assert low <= final(result) <= high


@pytest.mark.slow
@SEEDS
def test_95_percent_of_replayed_data(seed: int, tmp_path: Path) -> None:
    settings = {
        "muesli__replay_fraction": 0.95,
        "optimizer__batch_size": 20,  # one sequence of them is fresh, as in quick: as many updates
        "optimizer__learning_rate": 3e-4,
    }
    assert final(train(tmp_path / "run", seed=seed, evaluate__games=100, **settings)) >= 400
