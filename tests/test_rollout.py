import itertools

import numpy as np
import pytest
import torch

from reincarnate.envs import env_spec, make_env
from reincarnate.replay import Replay
from reincarnate.rollout import Acted, Rollout
from reincarnate.types import EnvStep

CPU = torch.device("cpu")


def random_act(num_actions: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def act(obs: torch.Tensor, step: EnvStep) -> Acted:
        action = torch.randint(num_actions, (len(obs),), generator=generator)
        return Acted(action, torch.full((len(obs),), -1.0), 0.5, None)

    return act


def test_rows_say_what_happened_and_returns_are_those_of_whole_games() -> None:
    spec = env_spec("CartPole-v1")
    with make_env(spec, 3, seed=5) as env:
        rollout = Rollout(env, random_act(2), CPU)
        outcomes = [rollout.step() for _ in range(300)]
    executed = np.stack([outcome.rows.executed for outcome in outcomes])  # [T, N]
    reward = np.stack([outcome.rows.raw_reward for outcome in outcomes])
    ended = np.stack([outcome.rows.terminal for outcome in outcomes])
    assert (reward == executed).all()  # CartPole pays 1 per played action, nothing on the reset row
    assert [outcome.agent_steps for outcome in outcomes] == executed.sum(axis=1).tolist()
    for lane in range(3):
        last, expected = -1, []
        for t in np.flatnonzero(ended[:, lane]):
            expected.append(float(reward[last + 1 : t + 1, lane].sum()))
            last = t
        found = [game.raw_return for outcome in outcomes for game in outcome.games if game.env_id == lane]
        assert found == expected
        assert len(found) > 5


def test_a_row_that_follows_the_end_of_a_game_is_not_an_action() -> None:
    spec = env_spec("CartPole-v1")
    with make_env(spec, 2, seed=1) as env:
        rollout = Rollout(env, random_act(2), CPU)
        outcomes = [rollout.step() for _ in range(120)]
    for before, after in itertools.pairwise(outcomes):
        ended = before.rows.terminal | before.rows.truncated
        assert (after.rows.executed == ~ended).all()
        # and the observation after that one opens a game
    starts = np.stack([outcome.rows.game_start for outcome in outcomes])
    executed = np.stack([outcome.rows.executed for outcome in outcomes])
    assert (starts[1:] == ~executed[:-1]).all()


def test_atari_rows_carry_the_newest_frame_only() -> None:
    spec = env_spec("Breakout-v5")
    with make_env(spec, 2, seed=3) as env:
        seen: list[np.ndarray] = []
        act = random_act(spec.num_actions)

        def watch(obs: torch.Tensor, step: EnvStep) -> Acted:
            seen.append(obs.numpy().copy())
            return act(obs, step)

        rollout = Rollout(env, watch, CPU)
        replay = Replay(spec, 2, 400, n_step=1, discount=0.99)
        for _ in range(60):
            outcome = rollout.step()
            replay.add(outcome.lanes, outcome.rows)
            assert (outcome.rows.frame == seen[-1][:, -1]).all()
    batch = replay.gather(replay.sampleable_rows())
    stacks = np.concatenate(seen)
    known = {stack.tobytes() for stack in stacks}
    assert all(stack.numpy().tobytes() in known for stack in batch.obs)


def test_finish_needs_begin() -> None:
    with make_env(env_spec("CartPole-v1"), 1, seed=1) as env:
        rollout = Rollout(env, random_act(2), CPU)
        with pytest.raises(RuntimeError, match="before begin"):
            rollout.finish()
