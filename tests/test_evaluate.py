"""Evaluation: whole games, equal quotas, memory of a game gone with it."""

import dataclasses

import envpool
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate import evaluate as module
from reincarnate.acting import ActRule
from reincarnate.errors import UserError
from reincarnate.evaluate import (
    OutputsPolicy,
    RandomPolicy,
    evaluate,
    group_lanes,
    lanes_for,
    play_games,
    restart_state,
)
from reincarnate.types import EnvSpec, EnvStep

SPEC = EnvSpec("Scripted-v0", "vector", num_actions=3, obs_shape=(2,))
FEW = settings(max_examples=40, deadline=None)


class ScriptedEnv:
    """Lane i plays games of ``lengths[i]`` agent steps in turn, one point a step; a life goes at ``lives``.

    The observation is (lane, agent steps of this game). Odd games are truncated, even ones terminal.
    """

    def __init__(self, lengths, lives=()):
        self.spec, self.num_envs = SPEC, len(lengths)
        self.lengths, self.lives = lengths, set(lives)
        self.actions = []

    def reset(self):
        self.game, self.at = [0] * self.num_envs, [0] * self.num_envs
        self.due = [None] * self.num_envs  # the reset that is due: "game" or "life"
        return self._step([(0.0, False, False, True, True)] * self.num_envs)

    def send(self, action):
        self.actions.append(action)

    def recv(self):
        return self._step([self._advance(lane) for lane in range(self.num_envs)])

    def _advance(self, lane):
        due, self.due[lane] = self.due[lane], None
        if due == "game":
            self.game[lane] += 1
            self.at[lane] = 0
        if due:
            return (0.0, False, False, True, due == "game")
        self.at[lane] += 1
        lengths = self.lengths[lane]
        over = self.at[lane] == lengths[self.game[lane] % len(lengths)]
        life = not over and self.at[lane] in self.lives
        self.due[lane] = "game" if over else "life" if life else None
        return (1.0, over or life, over, False, False)

    def _step(self, rows):
        reward, ended, over, reset, start = (np.array(column) for column in zip(*rows, strict=True))
        odd = np.array(self.game) % 2 == 1
        obs = np.stack([np.arange(self.num_envs), self.at], axis=1).astype(np.float32)
        ids, raw = np.arange(self.num_envs), reward.astype(np.float32)
        truncated = over & odd
        return EnvStep(ids, obs, np.sign(raw), raw, ended & ~truncated, truncated, over, reset, start)

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Still:
    """Always action 0."""

    def initial_state(self, num_envs):
        return None

    def act(self, obs, state):
        return torch.zeros(len(obs), dtype=torch.int64), state


@pytest.fixture
def scripted(monkeypatch):
    """``evaluate`` with scripted environments: lane i plays games of ``cycle[i]`` steps only."""

    def install(cycle):
        made = []

        def make_env(spec, num_envs, seed, backend, wrappers):
            made.append(ScriptedEnv([[cycle[i % len(cycle)]] for i in range(num_envs)]))
            return made[-1]

        monkeypatch.setattr(module, "make_env", make_env)
        return made

    return install


# ---------------------------------------------------------------- quotas


def test_slow_and_fast_environments_count_the_same(scripted):
    made = scripted([3, 5, 7])
    returns = evaluate(Still(), SPEC, 12, num_envs=3, seed=0)
    assert returns.returns == (3.0,) * 4 + (5.0,) * 4 + (7.0,) * 4
    assert returns.mean == 5.0  # the first 12 games of all would give (6 * 3 + 4 * 5 + 2 * 7) / 12 = 4.33
    assert returns.n == 12
    assert made[0].closed


@FEW
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    quota=st.integers(1, 5),
)
def test_every_environment_gives_its_first_games_whole(lengths, quota):
    returns = play_games(Still(), [ScriptedEnv(lengths)], quota)
    assert returns == [[float(lane[k % len(lane)]) for k in range(quota)] for lane in lengths]


def test_a_lost_life_ends_no_game():
    env = ScriptedEnv([[6], [4]], lives=[2, 3])
    assert play_games(Still(), [env], 2) == [[6.0, 6.0], [4.0, 4.0]]
    assert len(env.actions) == 2 * (6 + 2) + 1  # two lives' resets in each game, one reset between the games


def test_a_game_that_ends_inside_a_reset_counts_once(monkeypatch):
    """Such a row is the reset, the end of the old game and the start of the new one at once."""

    class Hidden(ScriptedEnv):
        def _step(self, rows):
            step = super()._step(rows)
            late = step.game_start & (np.array(self.game) == 1)
            return dataclasses.replace(step, game_over=(step.game_over & (np.array(self.game) > 0)) | late)

    assert play_games(Still(), [Hidden([[4, 6]])], 2) == [[4.0, 6.0]]


@FEW
@given(games=st.integers(1, 200), num_envs=st.integers(1, 40))
def test_the_most_environments_that_share_the_games_equally(games, num_envs):
    lanes = lanes_for(games, num_envs)
    assert games % lanes == 0
    assert lanes <= min(num_envs, games)
    assert all(games % more for more in range(lanes + 1, min(num_envs, games) + 1))


@pytest.mark.parametrize(("games", "num_envs", "lanes"), [(30, 16, 15), (32, 8, 8), (7, 4, 1), (3, 16, 3)])
def test_exactly_the_games_asked_for(games, num_envs, lanes, scripted):
    made = scripted([2])
    assert evaluate(Still(), SPEC, games, num_envs=num_envs, seed=0).n == games
    assert sum(env.num_envs for env in made) == lanes


@pytest.mark.parametrize("games", [0, -3])
def test_no_games_is_a_clear_refusal_not_a_nan(games):
    with pytest.raises(UserError, match=f"an evaluation needs at least 1 game, got {games}"):
        evaluate(Still(), SPEC, games, num_envs=2, seed=0)


def test_no_environments_is_refused():
    with pytest.raises(UserError, match="environments must be at least 1, got 0"):
        evaluate(Still(), SPEC, 4, num_envs=0, seed=0)


def test_a_group_that_is_through_is_not_stepped_any_more():
    short, long = ScriptedEnv([[2], [3]]), ScriptedEnv([[20], [30]])
    assert play_games(Still(), [short, long], 2) == [[2.0] * 2, [3.0] * 2, [20.0] * 2, [30.0] * 2]
    assert len(short.actions) == 2 * 3 + 1  # two games and the reset between them
    assert len(long.actions) == 2 * 30 + 1


@pytest.mark.parametrize(
    ("lanes", "groups"), [(1, [(0, 1)]), (3, [(0, 3)]), (8, [(0, 4), (4, 4)]), (5, [(0, 3), (3, 2)])]
)
def test_lanes_take_turns_in_two_groups(lanes, groups):
    assert group_lanes(lanes) == groups


# ---------------------------------------------------------------- progress


def test_progress_is_told_after_every_vector_step(scripted):
    scripted([2, 3])
    told = []
    evaluate(Still(), SPEC, 4, num_envs=2, seed=0, progress=lambda *numbers: told.append(numbers))
    assert told == [
        (0, 4, 0.0),
        (1, 4, 2.0),
        (2, 4, 2.5),
        (2, 4, 2.5),
        (3, 4, 7 / 3),
        (3, 4, 7 / 3),
        (4, 4, 2.5),
    ]


def test_progress_may_stop_an_evaluation_and_the_environments_are_closed(scripted):
    made = scripted([5])

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(Still(), SPEC, 2, num_envs=2, seed=0, progress=stop)
    assert made[0].closed


# ---------------------------------------------------------------- policies and their state


class Counting:
    """Recurrent: counts its own calls since the game began, in nested tensors of two ranks."""

    def __init__(self):
        self.seen = []

    def initial_state(self, num_envs):
        return {"calls": torch.zeros(num_envs), "deep": (torch.ones(num_envs, 2, 3),)}

    def act(self, obs, state):
        assert torch.is_inference_mode_enabled()
        self.seen.append((obs.clone(), state["calls"].clone(), state["deep"][0].clone()))
        after = {"calls": state["calls"] + 1, "deep": (state["deep"][0] * 2,)}
        return torch.zeros(len(obs), dtype=torch.int64), after


def test_memory_starts_afresh_with_a_game_and_not_with_a_life():
    policy = Counting()
    play_games(policy, [ScriptedEnv([[2], [4]], lives=[3])], 2)
    calls = torch.stack([calls for _, calls, _ in policy.seen]).T
    # Lane 0: observations 0, 1, 2 of each game. Lane 1: 0..3, the new life, 4; then the next game.
    assert calls[0].tolist() == [0, 1, 2] * 3 + [0, 1]
    assert calls[1].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    for _, calls, deep in policy.seen:
        expected = (2.0**calls)[:, None, None].expand(2, 2, 3)
        torch.testing.assert_close(deep, expected)


def test_restart_replaces_whole_rows_and_leaves_no_memory_alone():
    mask = torch.tensor([True, False])
    state = restart_state({"h": torch.tensor([[1, 2], [3, 4]])}, {"h": torch.zeros(2, 2).long()}, mask)
    assert state["h"].tolist() == [[0, 0], [3, 4]]
    assert restart_state(None, None, mask) is None


def test_observations_and_actions_pass_unchanged():
    class Last(Still):
        def act(self, obs, state):
            return obs[:, 1].long() % 3, state

    env = ScriptedEnv([[4], [5]])
    play_games(Last(), [env], 1)
    assert [action.tolist() for action in env.actions] == [[0, 0], [1, 1], [2, 2], [0, 0], [1, 1]]
    assert env.actions[0].dtype == np.int64


def test_random_policy_is_uniform_and_repeatable():
    def draw(seed):
        policy = RandomPolicy(4, torch.Generator().manual_seed(seed))
        return policy.act(torch.zeros(8_000, 2), policy.initial_state(8_000))[0]

    action = draw(0)
    assert torch.equal(action, draw(0))
    assert action.dtype == torch.int64
    counts = torch.bincount(action, minlength=4)
    assert len(counts) == 4
    assert ((counts - 2_000).abs() < 4 * (8_000 * 3 / 16) ** 0.5).all()


def test_outputs_policy_applies_its_rule_to_the_networks_outputs():
    obs = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]])
    policy = OutputsPolicy(lambda x: -x, ActRule("greedy"), 1.0, None)
    assert policy.act(obs, policy.initial_state(2))[0].tolist() == [0, 1]
    sampled = OutputsPolicy(lambda x: 100 * x, ActRule("sample"), 0.1, torch.Generator().manual_seed(0))
    assert sampled.act(obs, None)[0].tolist() == [1, 0]


# ---------------------------------------------------------------- real environments


def test_random_play_of_cartpole():
    spec = EnvSpec("CartPole-v1", "vector", 2, (4,), max_agent_steps=500)

    def run(seed, backend="envpool"):
        policy = RandomPolicy(2, torch.Generator().manual_seed(seed))
        return evaluate(policy, spec, 120, num_envs=8, seed=seed, backend=backend)

    returns = run(0)
    assert returns == run(0)
    assert returns.n == 120
    for each in (returns, run(0, "gymnasium")):  # about 22.3 +- 12 a game
        assert abs(each.mean - 22.3) < 4 * 12 / 120**0.5


def test_a_truncated_game_counts_with_its_score():
    spec = EnvSpec("CartPole-v1", "vector", 2, (4,), max_agent_steps=6)
    assert evaluate(Still(), spec, 4, num_envs=4, seed=0).returns == (6.0,) * 4


def test_the_raw_score_is_summed_over_lives_until_game_over():
    """Against raw EnvPool with the same random actions; MsPacman's pellets give 10 each, clipped 1."""
    spec = EnvSpec("MsPacman-v5", "atari", 9, (4, 84, 84))
    returns = evaluate(RandomPolicy(9, torch.Generator().manual_seed(0)), spec, 2, num_envs=2, seed=0)
    raw = envpool.make("MsPacman-v5", env_type="gymnasium", num_envs=2, seed=0, episodic_life=True)
    raw.reset()
    generator, scores, playing, lost = torch.Generator().manual_seed(0), np.zeros(2), np.ones(2, bool), 0
    while playing.any():
        _, reward, ended, _, info = raw.step(torch.randint(9, (2,), generator=generator).numpy())
        scores += np.where(playing, reward, 0)
        playing &= info["terminated"] == 0
        lost += (ended & playing).sum()
    assert returns.returns == tuple(scores)
    assert lost >= 4  # two lives or more in each game before the last
