"""Every row of EnvStep against raw EnvPool."""

import dataclasses

import envpool
import numpy as np
import pytest

from reincarnate.types import EnvSpec

from env_rows import BACKENDS, BREAKOUT, flags_of, hidden_end, play, random_actions


@dataclasses.dataclass
class Lane:
    """Where one environment is, told by EnvPool's counters alone (the adapter goes by its done flags)."""

    elapsed: int = 0
    lives: int = 0

    def expected(self, reward, score, trunc, over, lives, elapsed):
        """reward, raw, terminal, truncated, game_over, reset, game_start of a row."""
        if elapsed <= self.elapsed:  # the counter stood still (next life) or went to 0 (next game)
            row = (0.0, 0.0, False, False, False, True, elapsed == 0)
        else:
            lost = bool(0 < lives < self.lives)
            row = (reward, score, over or lost, trunc and not (over or lost), over or trunc, False, False)
        self.elapsed, self.lives = elapsed, lives
        return row


def raw_pool(spec, num_envs, seed, **settings):
    return envpool.make(
        spec.env_id,
        env_type="gymnasium",
        num_envs=num_envs,
        seed=seed,
        max_episode_steps=spec.max_agent_steps,
        **settings,
    )


@pytest.mark.parametrize(
    ("env_id", "num_actions", "limit", "steps"),
    [("Breakout-v5", 4, 130, 262), ("MsPacman-v5", 9, 27_000, 60)],
)
def test_atari_rows_with_life_loss_episodes_equal_raw_envpool(env_id, num_actions, limit, steps):
    spec = EnvSpec(env_id, "atari", num_actions, (4, 84, 84), max_agent_steps=limit)
    actions = random_actions(spec, 2, steps)
    raw = raw_pool(spec, 2, seed=4, episodic_life=True)  # unclipped: the reward is the score
    first, info = raw.reset()
    lanes = [Lane(lives=int(lives)) for lives in info["lives"]]
    steps_seen = play(spec, actions, seed=4)
    np.testing.assert_array_equal(steps_seen[0].obs, first)
    seen = set()
    for action, step in zip(actions, steps_seen[1:], strict=True):
        obs, score, _, trunc, info = raw.step(action)
        np.testing.assert_array_equal(step.obs, obs)
        for i, lane in enumerate(lanes):
            over, lives, elapsed = info["terminated"][i] == 1, info["lives"][i], info["elapsed_step"][i]
            expected = lane.expected(
                np.sign(score[i]), score[i], bool(trunc[i]), bool(over), int(lives), int(elapsed)
            )
            assert flags_of(step, i) == expected
            seen.add(expected[2:])
    if (
        env_id == "Breakout-v5"
    ):  # an ordinary row, a life lost, a game over, a truncation, both kinds of reset
        assert len(seen) == 6
    else:
        assert max(step.raw_reward.max() for step in steps_seen) >= 10


def test_atari_rows_of_whole_games_equal_raw_envpool():
    spec = EnvSpec(
        "Breakout-v5", "atari", 4, (4, 84, 84), episodic_life=False, reward_clip=False, max_agent_steps=180
    )
    actions = random_actions(spec, 2, 182)
    raw = raw_pool(spec, 2, seed=4, episodic_life=False, reward_clip=False)
    raw.reset()
    ended = np.zeros(2, bool)
    terminals = truncations = 0
    for action, step in zip(actions, play(spec, actions, seed=4)[1:], strict=True):
        obs, score, term, trunc, _ = raw.step(action)
        np.testing.assert_array_equal(step.obs, obs)
        np.testing.assert_array_equal(step.raw_reward, score)
        np.testing.assert_array_equal(step.reward, score)
        np.testing.assert_array_equal(step.terminal, term)
        np.testing.assert_array_equal(step.truncated, trunc)
        np.testing.assert_array_equal(step.game_over, term | trunc)
        np.testing.assert_array_equal(step.reset, ended)
        np.testing.assert_array_equal(step.game_start, ended)
        ended, terminals, truncations = term | trunc, terminals + term.sum(), truncations + trunc.sum()
    assert terminals
    assert truncations


def rows_of_one_env(spec, backend, steps=260):
    """Rows of a single Breakout with random actions."""
    return play(spec, random_actions(spec, 1, steps, seed=1), seed=5, backend=backend)


def first_row(steps, condition):
    return next(t for t, step in enumerate(steps) if condition(step))


@BACKENDS
def test_the_limit_does_not_hide_a_life_or_a_game_that_ended_at_that_very_step(backend):
    free = rows_of_one_env(dataclasses.replace(BREAKOUT, max_agent_steps=27_000), backend)
    executed = np.cumsum([not step.reset[0] for step in free])
    lost = first_row(free, lambda step: step.terminal[0])
    over = first_row(free, lambda step: step.game_over[0])
    assert not free[lost].game_over[0]
    for t in (lost, over):
        spec = dataclasses.replace(BREAKOUT, max_agent_steps=int(executed[t]))
        limited = rows_of_one_env(spec, backend, t + 1)
        row, after = limited[t], limited[t + 1]
        assert (row.terminal[0], row.truncated[0], row.game_over[0]) == (True, False, True)
        assert (after.reset[0], after.game_start[0]) == (True, True)


def test_a_game_that_ends_inside_the_reset_of_a_life_is_reported_there():
    """RoadRunner loses its last life in the no-ops after the one before: no row says game over by itself."""
    spec = EnvSpec("RoadRunner-v5", "atari", 18, (4, 84, 84))
    steps = play(spec, random_actions(spec, 4, 190))
    hidden = [(t, i) for t in range(1, len(steps)) for i in np.flatnonzero(hidden_end(steps[t]))]
    assert hidden
    for t, i in hidden:
        before, row = steps[t - 1], steps[t]
        assert before.terminal[i]
        assert not before.game_over[i]
        assert row.game_start[i]
        assert row.raw_reward[i] == 0
        assert (row.obs[i] == row.obs[i, -1]).all()
