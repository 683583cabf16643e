"""Rows of real games: rebuilt stacks equal what EnvPool returned, across lives, games and time limits."""

from __future__ import annotations

import envpool
import numpy as np
import pytest
import torch

from reincarnate.replay import Replay, RowBatch
from reincarnate.types import EnvSpec

SPEC = EnvSpec("Breakout-v5", "atari", num_actions=4, obs_shape=(4, 84, 84))
LANES, STEPS, LIMIT = 3, 260, 110


@pytest.fixture(scope="module")
def played():
    """The replay, and per lane and vector step the stack that EnvPool returned and how the row ended."""
    env = envpool.make(
        SPEC.env_id,
        env_type="gymnasium",
        num_envs=LANES,
        seed=3,
        episodic_life=True,
        reward_clip=True,
        max_episode_steps=LIMIT,
        num_threads=1,
    )
    replay = Replay(SPEC, LANES, LANES * STEPS, n_step=3, discount=0.99)
    rng = np.random.default_rng(0)
    stacks, ends = [], []
    obs, info = env.reset()
    game_start, done, game_over = np.ones(LANES, bool), np.zeros(LANES, bool), np.zeros(LANES, bool)
    for _ in range(STEPS):
        action = rng.integers(0, 4, LANES).astype(np.int32)
        following, reward, terminated, truncated, info = env.step(action)
        stacks.append(obs.copy())
        ends.append(list(zip(terminated, truncated, game_start, done, strict=True)))
        zeros = np.zeros(LANES, dtype=np.float32)
        rows = RowBatch(
            frame=obs[:, -1],
            action=action,
            reward=reward.astype(np.float32),
            raw_reward=np.asarray(info["reward"], dtype=np.float32),
            terminal=terminated & ~truncated,
            truncated=truncated,
            executed=~done,  # the step after an end ignores its action
            game_start=game_start,
            teacher_outputs=None,
            behaviour_log_prob=zeros,
            epsilon=zeros,
        )
        replay.add(np.asarray(info["env_id"]), rows)
        game_start = done & game_over
        game_over = np.asarray(info["terminated"], dtype=bool) | truncated
        done = terminated | truncated
        obs = following
    env.close()
    return replay, np.stack(stacks), ends


def test_the_games_have_every_kind_of_end(played):
    _, _, ends = played
    rows = [row for step in ends for row in step]
    games = sum(start for _, _, start, _ in rows[LANES:])
    assert sum(terminated for terminated, *_ in rows) > 6
    assert sum(truncated for _, truncated, *_ in rows) >= LANES
    assert 0 < games < sum(done for *_, done in rows)  # some resets are the next life of the same game


def test_rebuilt_stacks_equal_envpool(played):
    replay, stacks, ends = played
    rows = replay.sampleable_rows()
    batch = replay.gather(rows)
    steps, lanes = rows // LANES, rows % LANES
    assert len(rows) > 0.9 * LANES * STEPS
    assert torch.equal(batch.obs, torch.from_numpy(stacks)[steps, lanes])
    for i, (step, lane) in enumerate(zip(steps.tolist(), lanes.tolist(), strict=True)):
        k = next((k for k in (1, 2) if any(ends[step + k - 1][lane][:2])), 3)
        assert np.array_equal(batch.next_obs[i].numpy(), stacks[step + k, lane])


def test_truncated_games_bootstrap_and_lost_lives_do_not(played):
    replay, _, ends = played
    rows = replay.sampleable_rows()
    discounts = dict(zip(rows.tolist(), replay.gather(rows).discount.tolist(), strict=True))
    for step in range(STEPS - 3):
        for lane in range(LANES):
            terminated, truncated, _, _ = ends[step][lane]
            if terminated or truncated:
                expected = 0.99 if truncated else 0.0
                assert discounts[step * LANES + lane] == pytest.approx(expected)
