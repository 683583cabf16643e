"""Environments: calls, actions, and the contract that their rows keep on every backend."""

import dataclasses

import numpy as np
import pytest

from reincarnate.envs import env_spec, make_env, pool
from reincarnate.envs.base import check_action

from env_rows import BACKENDS, BREAKOUT, CARTPOLE, check_rows, check_stacks, flags_of, play, random_actions

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
