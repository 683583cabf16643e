"""EnvSpec and Returns: checked on construction, summarised rightly, unchanged by JSON."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from reincarnate.types import EnvSpec, Returns

SCORES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)
FEW = settings(max_examples=40, deadline=None)


def summary(games):
    return Returns.from_games(games, resamples=500)


# ---------------------------------------------------------------- EnvSpec


def test_what_a_buffer_stores_of_an_atari_observation():
    spec = EnvSpec("Breakout-v5", "atari", 4, (4, 84, 80))
    assert spec.frame_stack == 4
    assert spec.frame_shape == (84, 80)
    assert spec.obs_dtype == torch.uint8


def test_what_a_buffer_stores_of_a_vector():
    spec = EnvSpec("CartPole-v1", "vector", 2, (4,))
    assert spec.frame_stack == 1
    assert spec.frame_shape == (4,)
    assert spec.obs_dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "num_actions", "obs_shape", "message"),
    [
        ("atari", 0, (4, 84, 84), "num_actions must be at least 1, got 0"),
        ("atari", 4, (84, 84), r"atari observations have 3 positive sizes, got \(84, 84\)"),
        ("atari", 4, (0, 84, 84), "3 positive sizes"),
        ("vector", 2, (4, 1), "vector observations have 1 positive sizes"),
        ("vector", 2, (), "1 positive sizes"),
    ],
)
def test_impossible_specs_are_refused(kind, num_actions, obs_shape, message):
    with pytest.raises(ValueError, match=message):
        EnvSpec("X-v0", kind, num_actions, obs_shape)


def test_env_spec_survives_json():
    spec = EnvSpec("Pong-v5", "atari", 18, (4, 84, 84), full_action_set=True, sticky_probability=0.25)
    restored = EnvSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert restored == spec
    assert hash(restored) == hash(spec)


@pytest.mark.parametrize("change", [{"colour": True}, {"env_id": None}])
def test_env_spec_refuses_unknown_and_missing_fields(change):
    values = EnvSpec("CartPole-v1", "vector", 2, (4,)).to_dict() | change
    if change.get("env_id", "") is None:
        del values["env_id"]
    with pytest.raises(TypeError):
        EnvSpec.from_dict(values)


# ---------------------------------------------------------------- Returns


def test_mean_and_sample_deviation_by_hand():
    returns = Returns.from_games([2, 4, 4, 6])
    assert returns.mean == 4.0
    assert returns.std == pytest.approx(math.sqrt(8 / 3))
    assert returns.n == 4
    assert returns.returns == (2.0, 4.0, 4.0, 6.0)


def test_one_game_has_no_spread():
    assert Returns.from_games([7.0]) == Returns(7.0, 0.0, 1, (7.0, 7.0), (7.0,))


def test_the_interval_of_two_games_is_known_exactly():
    """Resampled means of {0, 1} are 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4: 95 % reaches both ends."""
    assert Returns.from_games([0, 1]).ci95 == (0.0, 1.0)


def test_the_interval_of_many_games_is_the_normal_one():
    games = np.random.default_rng(1).normal(50, 20, size=400)
    low, high = Returns.from_games(games.tolist()).ci95
    half = 1.96 * games.std(ddof=1) / 20
    assert low == pytest.approx(games.mean() - half, abs=0.25)
    assert high == pytest.approx(games.mean() + half, abs=0.25)


def test_the_interval_agrees_with_scipys_bootstrap():
    games = np.random.default_rng(2).exponential(10, size=25)
    theirs = stats.bootstrap((games,), np.mean, method="percentile", rng=np.random.default_rng(3))
    mine = Returns.from_games(games.tolist()).ci95
    assert mine == pytest.approx(tuple(theirs.confidence_interval), rel=0.02)


@pytest.mark.parametrize("games", [[], [1.0, math.nan], [math.inf]])
def test_no_games_and_no_numbers_are_refused(games):
    with pytest.raises(ValueError, match="at least one game and finite scores"):
        Returns.from_games(games)


@FEW
@given(games=SCORES)
def test_the_interval_holds_the_mean_and_lies_within_the_games(games):
    returns = summary(games)
    low, high = returns.ci95
    slack = 1e-9 * (1 + max(map(abs, games)))
    assert min(games) - slack <= low <= high <= max(games) + slack
    assert low - slack <= returns.mean <= high + slack
    assert returns.std >= 0


@FEW
@given(games=SCORES)
def test_returns_survive_json_and_repeat_themselves(games):
    returns = summary(games)
    assert Returns.from_dict(json.loads(json.dumps(returns.to_dict()))) == returns
    assert summary(games) == returns


def test_to_dict_is_the_contracts_return_object():
    values = Returns.from_games([1, 3]).to_dict()
    assert values == {"mean": 2.0, "std": math.sqrt(2), "n": 2, "ci95": [1.0, 3.0], "returns": [1.0, 3.0]}


def test_returns_as_text():
    text = str(Returns(69.84, 25.71, 32, (61.2, 78.9), (0.0,) * 32))
    assert text == "69.8 ± 25.7 (32 games, 95% [61.2, 78.9])"
