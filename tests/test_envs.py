"""Environments: names, refusals, and every row of EnvStep against independent oracles."""

import dataclasses
import itertools

import envpool
import gymnasium
import numpy as np
import pytest

from reincarnate.envs import current_id, env_spec, gym, make_env, pool
from reincarnate.envs.base import NEUTRAL, check_action
from reincarnate.errors import UserError
from reincarnate.types import EnvSpec, EnvStep

BREAKOUT = EnvSpec("Breakout-v5", "atari", 4, (4, 84, 84), max_agent_steps=150)
CARTPOLE = EnvSpec("CartPole-v1", "vector", 2, (4,), max_agent_steps=12)
BACKENDS = pytest.mark.parametrize("backend", ["envpool", "gymnasium"])


def random_actions(spec, num_envs, steps, seed=0):
    return np.random.default_rng(seed).integers(0, spec.num_actions, (steps, num_envs))


def play(spec, actions, seed=3, backend="envpool"):
    """The reset's step and one step per row of actions."""
    with make_env(spec, actions.shape[1], seed, backend) as env:
        return [env.reset(), *(env.step(action) for action in actions)]


# ---------------------------------------------------------------- names and EnvSpecs


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Breakout-v5", "Breakout-v5"),
        ("BreakoutNoFrameskip-v4", "Breakout-v5"),
        ("ALE/Breakout-v5", "Breakout-v5"),
        ("Breakout-v4", "Breakout-v5"),
        ("Breakout", "Breakout-v5"),
        ("space_invaders", "SpaceInvaders-v5"),
        ("MsPacmanDeterministic-v4", "MsPacman-v5"),
        ("ALE/TicTacToe3D-v5", "TicTacToe3d-v5"),
        ("CartPole", "CartPole-v1"),
        ("cartpole-v0", "CartPole-v0"),
        ("LunarLander", "LunarLander-v3"),
    ],
)
def test_names_people_use_lead_to_the_name_envpool_uses(name, expected):
    assert env_spec(name).env_id == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LunarLander-v2", "LunarLander-v3"),  # EnvPool has both, gymnasium the newer one alone
        ("LunarLander-v3", "LunarLander-v3"),
        ("Acrobot-v0", "Acrobot-v1"),
        ("CartPole-v0", "CartPole-v0"),
        ("cartpole", "CartPole-v1"),
        ("Breakout-v5", "Breakout-v5"),
        ("BreakoutNoFrameskip-v4", "Breakout-v5"),
        ("BreakoutNoFrameskip-v0", "Breakout-v5"),
    ],
)
def test_a_retired_version_leads_to_the_newest(name, expected):
    assert current_id(name) == expected


def test_no_version_of_an_unknown_name_is_current():
    with pytest.raises(UserError, match=r"no environment 'CartPol-v7' \(did you mean CartPole-v1"):
        current_id("CartPol-v7")


def test_defaults_of_an_atari_game_and_of_a_vector_environment():
    assert env_spec("Breakout-v5") == EnvSpec("Breakout-v5", "atari", 4, (4, 84, 84))
    assert env_spec("Acrobot-v1") == EnvSpec("Acrobot-v1", "vector", 3, (6,), **NEUTRAL, max_agent_steps=500)


def test_overrides_apply_and_none_keeps_the_default():
    spec = env_spec(
        "Pong", full_action_set=True, sticky_probability=0.25, noop_max=None, obs_shape=[2, 64, 48]
    )
    assert spec.num_actions == 18
    assert spec.obs_shape == (2, 64, 48)
    assert (spec.sticky_probability, spec.noop_max) == (0.25, 30)


def test_atari_fields_do_not_apply_to_vectors():
    spec = env_spec("CartPole-v1", sticky_probability=0.25, reward_clip=True, max_agent_steps=9)
    assert spec == EnvSpec("CartPole-v1", "vector", 2, (4,), **NEUTRAL, max_agent_steps=9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Brekout-v5", r"no environment 'Brekout-v5' \(did you mean Breakout-v5"),
        ("CartPole-v7", r"did you mean CartPole-v1"),
        ("qqqqqqqq", r"no environment 'qqqqqqqq'; use a name that EnvPool or gymnasium knows"),
        ("Pendulum-v1", r"Pendulum-v1 has continuous actions; only one choice"),
        ("FrozenLake-v1", r"FrozenLake-v1 has observations that are not supported \(Discrete"),
        ("highway-v0", r"not supported \(Box of shape \(5, 5\) float32\)"),
        ("Breakout-ram-v5", r"did you mean Breakout-v5"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(name, message):
    with pytest.raises(UserError, match=message) as error:
        env_spec(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noop_max": 0}, "noop_max must be at least 1, got 0"),
        ({"frame_skip": 0}, "frame_skip must be at least 1"),
        ({"max_agent_steps": 0}, "max_agent_steps must be at least 1"),
        ({"sticky_probability": 1.5}, "sticky_probability must be between 0 and 1"),
        ({"sticky_probability": float("nan")}, "sticky_probability must be between 0 and 1"),
        ({"num_actions": 6}, "Breakout-v5 has 4 actions, not 6"),
        ({"obs_shape": (84, 84)}, "atari observations have 3 positive sizes"),
    ],
)
def test_settings_out_of_range_never_reach_a_backend(changes, message):
    with pytest.raises(UserError, match=message):
        env_spec("Breakout-v5", **changes)
    if "obs_shape" not in changes:  # the EnvSpec refuses that one itself
        with pytest.raises(UserError, match=message):
            make_env(dataclasses.replace(BREAKOUT, **changes), 1, 0)


@BACKENDS
def test_a_spec_of_another_environment_is_refused(backend):
    with pytest.raises(
        UserError, match=r"CartPole-v1 has vector observations of shape \(4,\), not vector ones"
    ):
        make_env(dataclasses.replace(CARTPOLE, obs_shape=(6,)), 1, 0, backend)
    with pytest.raises(UserError, match="CartPole-v1 has 2 actions, not 3"):
        make_env(dataclasses.replace(CARTPOLE, num_actions=3), 1, 0, backend)


@BACKENDS
@pytest.mark.parametrize(("num_envs", "seed"), [(0, 1), (2, -1), (4, 2**31 - 4)])
def test_counts_and_seeds_that_do_not_fit_are_refused(num_envs, seed, backend):
    with pytest.raises(UserError, match=r"the number of environments must|the seed must"):
        make_env(CARTPOLE, num_envs, seed, backend)


def test_gymnasiums_own_errors_become_one_line():
    spec = env_spec("LunarLander-v2")  # EnvPool has it, gymnasium retired it
    with pytest.raises(UserError, match="gymnasium cannot make 'LunarLander-v2'") as error:
        make_env(spec, 1, 0, "gymnasium")
    assert "\n" not in str(error.value)


def test_every_atari_game_is_there_in_both_backends():
    import ale_py

    gymnasium.register_envs(ale_py)
    ale = {name.removeprefix("ALE/").lower() for name in gymnasium.registry if name.startswith("ALE/")}
    assert {name.lower() for name in pool.atari_ids()} <= ale
    assert len(pool.atari_ids()) > 100


# ---------------------------------------------------------------- calls and actions


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.array(1), r"shape \(3,\), one per environment, got \(\)"),
        (np.zeros(2, np.int64), r"shape \(3,\)"),
        (np.zeros((3, 1), np.int64), r"shape \(3,\)"),
        (np.array([0, 99, 0]), r"lie in 0\.\.3, got \[0, 99, 0\]"),
        (np.array([0, -1, 0]), r"lie in 0\.\.3"),
        (np.zeros(3), "numpy array of integers, got an array of float64"),
        (np.array([True, False, True]), "integers, got an array of bool"),
        ([0, 1, 2], "numpy array of integers, got list"),
    ],
)
def test_bad_actions_stop_before_the_backend(action, message):
    with pytest.raises(ValueError, match=message):
        check_action(action, num_envs=3, num_actions=4)


def test_good_actions_pass_unchanged():
    checked = check_action(np.array([0, 3, 2]), num_envs=3, num_actions=4)
    assert checked.tolist() == [0, 3, 2]
    assert checked.dtype == np.int32


@BACKENDS
def test_a_refused_action_leaves_the_environments_usable(backend):
    with make_env(CARTPOLE, 2, 0, backend) as env:
        env.reset()
        with pytest.raises(ValueError, match="lie in"):
            env.send(np.array([0, 2]))
        assert env.step(np.array([0, 1])).raw_reward.tolist() == [1.0, 1.0]


@BACKENDS
def test_calls_out_of_order_are_refused_instead_of_waiting_for_ever(backend):
    action = np.zeros(2, np.int64)
    env = make_env(CARTPOLE, 2, 0, backend)
    with pytest.raises(RuntimeError, match=r"send\(\) does not fit here: .* 'new'"):
        env.send(action)
    env.reset()
    with pytest.raises(RuntimeError, match=r"recv\(\) does not fit here: .* 'ready'"):
        env.recv()
    env.send(action)
    with pytest.raises(RuntimeError, match=r"send\(\) does not fit here: .* 'sent'"):
        env.send(action)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="'closed'"):
        env.reset()


def test_send_only_starts_envpool(monkeypatch):
    calls = []

    class Recorder:
        def send(self, action):
            calls.append(("send", action.tolist()))

    with make_env(CARTPOLE, 2, 0) as env:
        env.reset()
        monkeypatch.setattr(env, "_pool", Recorder())
        env.send(np.array([1, 0]))
    assert calls == [("send", [1, 0])]


@pytest.mark.parametrize(("cores", "num_envs", "threads"), [(2, 8, 2), (2, 1, 1), (16, 64, 14), (16, 8, 8)])
def test_threads_leave_a_large_machine_two_cores_for_the_learner(cores, num_envs, threads, monkeypatch):
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert pool.num_threads(num_envs) == threads


# ---------------------------------------------------------------- rows against raw EnvPool


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


def flags_of(step, i):
    return (
        step.reward[i],
        step.raw_reward[i],
        step.terminal[i],
        step.truncated[i],
        step.game_over[i],
        step.reset[i],
        step.game_start[i],
    )


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


def hidden_end(step):
    return step.game_over & step.reset


# ---------------------------------------------------------------- what holds on every backend


def check_rows(spec: EnvSpec, steps: list[EnvStep]) -> None:
    """The contract of EnvStep, row by row."""
    first, num_envs = steps[0], len(steps[0].env_ids)
    assert first.reset.all()
    assert first.game_start.all()
    assert not (first.terminal | first.truncated | first.game_over).any()
    agent_steps = np.zeros(num_envs, int)
    for before, step in itertools.pairwise(steps):
        check_types(spec, step)
        episode_over, game_over = before.terminal | before.truncated, before.game_over & ~before.reset
        np.testing.assert_array_equal(step.reset, episode_over)
        np.testing.assert_array_equal(step.game_start, game_over | hidden_end(step))
        assert not (step.terminal & step.truncated).any()
        assert not (step.reset & (step.terminal | step.truncated)).any()
        assert (step.game_over | ~step.truncated).all()
        assert not step.reward[step.reset].any()
        assert not step.raw_reward[step.reset].any()
        agent_steps = np.where(step.game_start, 0, agent_steps + ~step.reset)
        np.testing.assert_array_equal(step.game_over[agent_steps == spec.max_agent_steps], True)
        assert (agent_steps[step.truncated] == spec.max_agent_steps).all()


def check_types(spec, step):
    n = len(step.env_ids)
    assert step.env_ids.tolist() == list(range(n))
    assert step.obs.shape == (n, *spec.obs_shape)
    assert step.obs.dtype == (np.uint8 if spec.kind == "atari" else np.float32)
    assert step.reward.dtype == step.raw_reward.dtype == np.float32
    for name in ("terminal", "truncated", "game_over", "reset", "game_start"):
        flags = getattr(step, name)
        assert flags.dtype == np.bool_, name
        assert flags.shape == (n,), name


def check_stacks(steps):
    """A game's first stack is one frame; any other stack, a new life's too, is the old one and one more."""
    for before, step in itertools.pairwise(steps):
        for i, start in enumerate(step.game_start):
            older = step.obs[i, :1] if start else before.obs[i, 1:]
            expected = np.broadcast_to(older, (3, 84, 84)) if start else older
            np.testing.assert_array_equal(step.obs[i, 1:] if start else step.obs[i, :-1], expected)


@BACKENDS
@pytest.mark.parametrize("episodic_life", [True, False])
def test_the_contract_holds_on_breakout(backend, episodic_life):
    spec = dataclasses.replace(BREAKOUT, episodic_life=episodic_life)
    steps = play(spec, random_actions(spec, 2, 160), backend=backend)
    check_rows(spec, steps)
    check_stacks(steps)
    assert any(step.truncated.any() for step in steps)
    lives_lost = sum((step.terminal & ~step.game_over).sum() for step in steps)
    assert (lives_lost > 0) == episodic_life
    assert any((step.reset & ~step.game_start).any() for step in steps) == episodic_life


@BACKENDS
def test_the_contract_holds_on_cartpole(backend):
    # Always left falls after about 9 steps; left and right in turn lasts until the limit.
    actions = np.array([[0, t % 2] for t in range(80)])
    steps = play(CARTPOLE, actions, backend=backend)
    check_rows(CARTPOLE, steps)
    falls = sum(step.terminal for step in steps)
    limits = sum(step.truncated for step in steps)
    assert falls[0] > 4
    assert limits[0] == 0
    assert falls[1] == 0
    assert limits[1] == 6  # 12 agent steps and a reset each
    assert all((step.raw_reward == ~step.reset).all() for step in steps)


@BACKENDS
@pytest.mark.parametrize("spec", [BREAKOUT, CARTPOLE], ids=["atari", "vector"])
def test_a_seed_tells_the_whole_stream_and_environment_i_has_seed_plus_i(spec, backend):
    actions = random_actions(spec, 2, 12)
    together = play(spec, actions, seed=7, backend=backend)
    alone = play(spec, actions[:, 1:], seed=8, backend=backend)
    again = play(spec, actions[:, 1:], seed=8, backend=backend)
    for a, b, c in zip(together, alone, again, strict=True):
        np.testing.assert_array_equal(a.obs[1:], b.obs)
        np.testing.assert_array_equal(b.obs, c.obs)
        assert flags_of(a, 1) == flags_of(b, 0) == flags_of(c, 0)
    if spec.kind == "vector":  # Breakout shows a ball at rest at first, whatever the seed
        assert (together[0].obs[0] != together[0].obs[1]).any()


@BACKENDS
def test_reset_in_the_middle_of_a_life_starts_new_games(backend):
    with make_env(BREAKOUT, 2, 0, backend) as env:
        first = env.reset()
        for action in random_actions(BREAKOUT, 2, 5):
            env.step(action)
        env.send(np.zeros(2, np.int64))  # an outcome nobody waits for is dropped
        second = env.reset()
        check_rows(BREAKOUT, [second, env.step(np.zeros(2, np.int64))])
        check_stacks([first, second])
        assert second.game_start.all()


@BACKENDS
def test_every_reset_starts_other_games(backend):
    with make_env(CARTPOLE, 2, 0, backend) as env:
        first, second = env.reset(), env.reset()
    assert len(np.unique(np.concatenate([first.obs, second.obs]), axis=0)) == 4


@BACKENDS
def test_observations_are_fresh_arrays(backend):
    steps = play(BREAKOUT, random_actions(BREAKOUT, 1, 6), backend=backend)
    assert len({step.obs.ctypes.data for step in steps}) == len(steps)
    assert all(step.obs.flags.writeable for step in steps)  # torch.from_numpy warns otherwise


@BACKENDS
def test_size_stack_and_action_set_follow_the_spec(backend):
    spec = env_spec("Breakout-v5", obs_shape=(1, 42, 64), full_action_set=True, noop_max=1, frame_skip=2)
    steps = play(spec, random_actions(spec, 1, 3), backend=backend)
    assert steps[-1].obs.shape == (1, 1, 42, 64)


@BACKENDS
def test_sticky_actions_change_the_game(backend):
    spec = dataclasses.replace(BREAKOUT, sticky_probability=0.9)
    actions = np.tile(np.array([[2], [3]]), (15, 1))
    plain, sticky = (play(s, actions, backend=backend)[-1].obs for s in (BREAKOUT, spec))
    assert (plain != sticky).any()


# ---------------------------------------------------------------- gymnasium against its own tools


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
