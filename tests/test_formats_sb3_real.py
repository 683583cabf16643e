"""The published Stable-Baselines3 checkpoints: the policy and the return of the original."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy.stats import ttest_ind_from_stats
from torch import Tensor

from reincarnate.acting import parse_act_rule
from reincarnate.envs import make_env
from reincarnate.evaluate import OutputsPolicy, evaluate
from reincarnate.teachers.formats._unpickle import read_pickle
from reincarnate.teachers.teacher import Teacher
from reincarnate.teachers.zoo import load_teacher

from paths import SHARED_CHECKPOINTS, needs_checkpoints

pytestmark = needs_checkpoints
FOLDER = SHARED_CHECKPOINTS / "sb3"
GAMES = 30
#: Mean and standard deviation over 30 greedy games that stand beside the checkpoints.
STATED = {
    "dqn-CartPole-v1": (500.0, 0.0),
    "dqn-LunarLander-v2": (148.3, 108.4),
    "ppo-MountainCar-v0": (-107.3, 17.6),
    "ppo-LunarLander-v2": (255.5, 18.6),
}


def teacher_of(name: str) -> Teacher:
    return load_teacher(str(FOLDER / name))


def greedy(teacher: Teacher) -> OutputsPolicy:
    rule = parse_act_rule("greedy", teacher.spec.outputs)
    return OutputsPolicy(teacher.outputs, rule, teacher.temperature, None)


def own_observations(teacher: Teacher, count: int, num_envs: int = 20) -> Tensor:
    """``count`` observations that the policy itself sees."""
    policy = greedy(teacher)
    with make_env(teacher.spec.env, num_envs, 11) as env:
        seen = [env.reset().obs]
        while len(seen) * num_envs < count:
            action, _ = policy.act(torch.from_numpy(seen[-1]), None)
            seen.append(env.step(action.numpy()).obs)
    return torch.from_numpy(np.concatenate(seen)[:count])


def library_outputs(name: str, features: int, actions: int) -> Callable[[Tensor], Tensor]:
    """The library's own policy class with the weights of ``policy.pth``: Q-values or log-probabilities."""
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.dqn.policies import DQNPolicy

    where = spaces.Box(-np.inf, np.inf, (features,)), spaces.Discrete(actions)
    cls, arguments = (DQNPolicy, {"net_arch": [256, 256]}) if "dqn" in name else (ActorCriticPolicy, {})
    policy: Any = cls(*where, lambda _: 1e-3, **arguments)
    env_id = name.partition("-")[2]
    with zipfile.ZipFile(FOLDER / name / f"{env_id}.zip") as archive, archive.open("policy.pth") as file:
        policy.load_state_dict(torch.load(file, weights_only=True), strict=True)
    if "dqn" in name:
        return lambda obs: policy.q_net(obs)
    return lambda obs: policy.get_distribution(obs).distribution.logits


def normalised(obs: Tensor, file: Path) -> Tensor:
    """As VecNormalize does it, in double precision."""
    if not file.is_file():
        return obs
    record = read_pickle(file)
    mean, variance = (torch.tensor(record.field("obs_rms").field(each)) for each in ("mean", "var"))
    return ((obs.double() - mean) / (variance + record.field("epsilon")).sqrt()).clamp(-10, 10).float()


@pytest.mark.parametrize("name", STATED)
@torch.no_grad()
def test_outputs_are_the_librarys_on_what_the_policy_sees(name: str) -> None:
    teacher = teacher_of(name)
    obs = own_observations(teacher, 10_000)
    expected = library_outputs(name, obs.shape[1], teacher.spec.env.num_actions)
    theirs = expected(normalised(obs, FOLDER / name / "MountainCar-v0" / "vecnormalize.pkl"))
    ours = teacher.network(obs)
    if teacher.spec.outputs == "policy_logits":
        ours = torch.log_softmax(ours, dim=1)
    assert (ours - theirs).abs().max() < 1e-4
    best = theirs.topk(2, dim=1)
    clear = best.values[:, 0] - best.values[:, 1] > 2e-4
    assert clear.float().mean() > 0.9  # or nothing would have been compared
    assert torch.equal(ours.argmax(dim=1)[clear], best.indices[:, 0][clear])


@pytest.mark.parametrize(
    "name", [each if "Lunar" not in each else pytest.param(each, marks=pytest.mark.slow) for each in STATED]
)
def test_the_return_is_the_stated_one(name: str) -> None:
    if "Lunar" in name:
        pytest.importorskip("Box2D", reason="gymnasium's LunarLander needs Box2D")
    teacher = teacher_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Box2D and pygame when they are imported
        returns = evaluate(
            greedy(teacher), teacher.spec.env, GAMES, num_envs=GAMES, seed=1000, backend="gymnasium"
        )
    mean, std = STATED[name]
    if std == 0.0:
        assert (returns.mean, returns.std) == (mean, 0.0)
        return
    test = ttest_ind_from_stats(returns.mean, returns.std, GAMES, mean, std, GAMES, equal_var=False)
    assert test.pvalue > 0.05, str(returns)
