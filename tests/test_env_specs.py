"""Names of environments and their EnvSpecs, and what is refused before anything is played."""

import dataclasses

import gymnasium
import pytest

from reincarnate.envs import current_id, env_spec, make_env, pool
from reincarnate.envs.base import NEUTRAL
from reincarnate.errors import UserError
from reincarnate.types import EnvSpec

from env_rows import BACKENDS, BREAKOUT, CARTPOLE


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
