"""The gymnasium backend against gymnasium's and Stable-Baselines3's own tools."""

import gymnasium
import numpy as np
import pytest

from reincarnate.envs import env_spec, gym, make_env
from reincarnate.envs.base import NEUTRAL
from reincarnate.types import EnvSpec

from env_rows import BREAKOUT, CARTPOLE, check_rows, check_stacks, hidden_end, play, random_actions


def test_vectors_equal_gymnasiums_own_vector_environment():
    actions = random_actions(CARTPOLE, 3, 80)
    oracle = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make("CartPole-v1", max_episode_steps=12)] * 3,
        autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP,
    )
    first, _ = oracle.reset(seed=3)
    steps = play(CARTPOLE, actions, backend="gymnasium")
    np.testing.assert_array_equal(steps[0].obs, first)
    ended = np.zeros(3, bool)
    for action, step in zip(actions, steps[1:], strict=True):
        obs, reward, term, trunc, _ = oracle.step(action)
        np.testing.assert_array_equal(step.obs, obs)
        np.testing.assert_array_equal(step.raw_reward, reward)
        np.testing.assert_array_equal(step.terminal, term)
        np.testing.assert_array_equal(step.truncated, trunc & ~term)
        np.testing.assert_array_equal(step.game_over, term | trunc)
        np.testing.assert_array_equal(step.reset, ended)
        ended = term | trunc
    oracle.close()


def test_atari_equals_stable_baselines3s_wrappers_and_its_monitors_score():
    import ale_py
    from stable_baselines3.common.atari_wrappers import AtariWrapper
    from stable_baselines3.common.monitor import Monitor

    gymnasium.register_envs(ale_py)
    spec = EnvSpec("MsPacman-v5", "atari", 9, (4, 84, 84))
    oracle = AtariWrapper(Monitor(gymnasium.make("MsPacmanNoFrameskip-v4")))
    actions = random_actions(spec, 1, 700)
    steps = play(spec, actions, seed=11, backend="gymnasium")
    obs, _ = oracle.reset(seed=11)
    np.testing.assert_array_equal(steps[0].obs[0, -1], obs[:, :, 0])
    ended, score, games = False, 0.0, []
    for (action,), step in zip(actions, steps[1:], strict=True):
        reward, info = 0.0, {}
        if ended:
            obs, _ = oracle.reset()
            ended = False
        else:
            obs, reward, ended, _, info = oracle.step(action)
        np.testing.assert_array_equal(step.obs[0, -1], obs[:, :, 0])
        assert (step.reward[0], step.terminal[0]) == (reward, ended)
        score += step.raw_reward[0]
        if step.game_over[0]:
            games.append((score, info["episode"]["r"]))
            score = 0.0
    oracle.close()
    assert games
    assert all(mine == theirs for mine, theirs in games)


def test_points_of_a_resets_no_ops_are_part_of_the_raw_score_as_for_a_monitor():
    """Skiing takes points for every frame, no-ops included."""
    import ale_py
    from stable_baselines3.common.atari_wrappers import AtariWrapper
    from stable_baselines3.common.monitor import Monitor

    gymnasium.register_envs(ale_py)
    monitor = Monitor(gymnasium.make("SkiingNoFrameskip-v4"))
    oracle = AtariWrapper(monitor, clip_reward=False)
    oracle.reset(seed=0)
    spec = EnvSpec("Skiing-v5", "atari", 3, (4, 84, 84), reward_clip=False, max_agent_steps=5)
    steps = play(spec, np.zeros((5, 1), np.int64), seed=0, backend="gymnasium")
    rewards = [oracle.step(0)[1] for _ in range(5)]
    assert [step.reward[0] for step in steps[1:]] == rewards
    assert sum(step.raw_reward[0] for step in steps) == sum(monitor.rewards) < sum(rewards) < 0
    oracle.close()


def test_a_game_that_ends_inside_gymnasiums_reset_is_reported_there(monkeypatch):
    with make_env(BREAKOUT, 1, 0, "gymnasium") as env:
        steps = [env.reset()]
        while not steps[-1].terminal[0]:
            steps.append(env.step(np.zeros(1, np.int64)))
        keeper = env._games[0]._keeper
        frame, ended = keeper.env.step, (True, False)
        monkeypatch.setattr(keeper, "step", lambda action: (*frame(action)[:2], *ended, {}))
        monkeypatch.setattr(keeper, "reset", lambda **kwargs: (monkeypatch.undo(), keeper.reset(**kwargs))[1])
        steps += [env.step(np.zeros(1, np.int64)), env.step(np.zeros(1, np.int64))]
    assert hidden_end(steps[-2])[0]
    check_rows(BREAKOUT, steps)
    check_stacks(steps)


class Corridor(gymnasium.Env):
    """A registered environment that EnvPool has never heard of: positions in double precision."""

    observation_space = gymnasium.spaces.Box(-10, 10, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0.0
        return np.array([self.position, 1.0]), {}

    def step(self, action):
        self.position += 2 * action - 1
        return np.array([self.position, 1.0]), self.position, abs(self.position) >= 3, False, {}


@pytest.fixture
def corridor():
    gymnasium.register("ReincarnateCorridor-v3", entry_point=Corridor, max_episode_steps=5)
    yield "ReincarnateCorridor-v3"
    del gymnasium.registry["ReincarnateCorridor-v3"]
    gym.default_spec.cache_clear()


def test_what_envpool_lacks_runs_through_gymnasium(corridor):
    spec = env_spec("ReincarnateCorridor")  # the newest version
    assert spec == EnvSpec(corridor, "vector", 2, (2,), **NEUTRAL, max_agent_steps=5)
    steps = play(spec, np.array([[1, t % 2] for t in range(7)]), backend="envpool")
    check_rows(spec, steps)
    assert steps[3].raw_reward.tolist() == [3.0, -1.0]
    assert steps[3].terminal.tolist() == [True, False]
    assert steps[5].truncated.tolist() == [False, True]
    assert steps[3].obs.dtype == np.float32
    assert steps[3].obs.tolist() == [[3.0, 1.0], [-1.0, 1.0]]
    at_the_limit = play(env_spec(corridor, max_agent_steps=3), np.ones((3, 1), np.int64))[3]
    assert (at_the_limit.terminal[0], at_the_limit.truncated[0]) == (True, False)
