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


def test_a_game_that_ends_inside_a_reset_keeps_its_score() -> None:
    """One row may end a game and open the next (RoadRunner); the score belongs to the game that ended."""
    spec = env_spec("CartPole-v1")

    class Scripted:
        num_envs = 1

        def __init__(self) -> None:
            self.spec, self.rows = spec, [(3.0, False, False), (2.0, True, True), (5.0, True, False)]

        def step_of(self, reward: float, over: bool, start: bool) -> EnvStep:
            flags = [np.array([flag]) for flag in (over, False, over, start, start)]
            rewards = np.array([reward], np.float32)
            return EnvStep(np.array([0]), np.zeros((1, 4), np.float32), rewards, rewards, *flags)

        def reset(self) -> EnvStep:
            return self.step_of(0.0, False, True)

        def send(self, action: np.ndarray) -> None:
            pass

        def recv(self) -> EnvStep:
            return self.step_of(*self.rows.pop(0))

    rollout = Rollout(Scripted(), random_act(2), CPU)
    games = [game.raw_return for _ in range(3) for game in rollout.step().games]
    assert games == [5.0, 5.0]
