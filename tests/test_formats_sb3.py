"""Stable-Baselines3 models give the outputs of Stable-Baselines3's own policies, strictly loaded."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reincarnate.envs import env_spec, make_env
from reincarnate.errors import UserError
from reincarnate.teachers.formats import Checkpoint, Hints, detect_and_read, save_native
from reincarnate.teachers.zoo import load_teacher

pytest.importorskip("sb3_contrib")

CARTPOLE, BREAKOUT = Hints("CartPole-v1"), Hints("BreakoutNoFrameskip-v4")


def observations(env_id: str, count: int, num_envs: int = 50) -> Tensor:
    """Real observations under random actions, ``count`` of them."""
    rng = np.random.default_rng(0)
    spec = env_spec(env_id)
    with make_env(spec, num_envs, 7) as env:
        seen = [env.reset().obs]
        while len(seen) * num_envs < count:
            seen.append(env.step(rng.integers(0, spec.num_actions, num_envs)).obs)
    return torch.from_numpy(np.concatenate(seen)[:count])


@pytest.fixture(scope="module")
def cartpole() -> Tensor:
    return observations("CartPole-v1", 10_000)


@pytest.fixture(scope="module")
def atari_env() -> Any:
    """Stable-Baselines3's own Atari pipeline."""
    import ale_py
    import gymnasium
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)
    env = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4"), 4)
    yield env
    env.close()


def save(path: Path, algorithm: str, policy: str, env: Any, **arguments: Any) -> Any:
    """A fresh model of Stable-Baselines3, saved with its own ``save``; returns it."""
    import sb3_contrib
    import stable_baselines3

    cls = getattr(stable_baselines3, algorithm, None) or getattr(sb3_contrib, algorithm)
    buffer = {"buffer_size": 1} if algorithm in ("DQN", "QRDQN") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls(policy, env, seed=3, device="cpu", policy_kwargs=arguments or None, **buffer)
    with torch.no_grad():  # so that actions differ: its first logits are nearly equal
        for parameter in model.policy.parameters():
            parameter.mul_(1.5).add_(0.02 * torch.randn(parameter.shape))
    model.save(path)
    return model


def oracle(model: Any, path: Path) -> Callable[[Tensor], Tensor]:
    """Q-values or log-probabilities of the library's policy, weights from ``policy.pth`` alone."""
    policy = model.policy
    with zipfile.ZipFile(path) as archive, archive.open("policy.pth") as file:
        policy.load_state_dict(torch.load(file, weights_only=True), strict=True)
    policy.set_training_mode(False)
    if hasattr(policy, "quantile_net"):
        return lambda obs: policy.quantile_net(obs).mean(dim=1)
    if hasattr(policy, "q_net"):
        return lambda obs: policy.q_net(obs)
    return lambda obs: policy.get_distribution(obs).distribution.logits


@torch.no_grad()
def check_same(checkpoint: Checkpoint, expected: Callable[[Tensor], Tensor], obs: Tensor) -> None:
    """Outputs within 1e-4, and the same greedy action wherever two actions differ by more than 2e-4."""
    network = checkpoint.spec.build()
    network.load_state_dict(checkpoint.state_dict, strict=True)
    ours, theirs = network(obs), expected(obs)
    if checkpoint.spec.outputs == "policy_logits":
        ours = torch.log_softmax(ours, dim=1)
    assert (ours - theirs).abs().max() < 1e-4
    best = theirs.topk(2, dim=1)
    clear = best.values[:, 0] - best.values[:, 1] > 2e-4
    assert clear.float().mean() > 0.9
    assert torch.equal(ours.argmax(dim=1)[clear], best.indices[:, 0][clear])


@pytest.mark.parametrize(
    ("algorithm", "arguments", "hidden", "activation"),
    [
        ("DQN", {}, [64, 64], "relu"),
        ("DQN", {"net_arch": [16], "activation_fn": nn.Tanh}, [16], "tanh"),
        ("DQN", {"net_arch": []}, [], "relu"),
        ("QRDQN", {"n_quantiles": 5, "net_arch": [16, 8]}, [16, 8], "relu"),
        ("QRDQN", {}, [64, 64], "relu"),
        ("PPO", {}, [64, 64], "tanh"),
        ("PPO", {"net_arch": {"pi": [8], "vf": [9, 3]}, "activation_fn": nn.ELU}, [8], "elu"),
        ("PPO", {"net_arch": {"pi": [], "vf": [4]}}, [], "tanh"),
        ("A2C", {"net_arch": [12], "activation_fn": nn.SiLU}, [12], "silu"),
        ("TRPO", {}, [64, 64], "tanh"),
    ],
)
def test_mlp_policies_are_the_librarys(
    tmp_path: Path,
    cartpole: Tensor,
    algorithm: str,
    arguments: dict[str, Any],
    hidden: list[int],
    activation: str,
) -> None:
    path = tmp_path / "model.zip"
    model = save(path, algorithm, "MlpPolicy", "CartPole-v1", **arguments)
    checkpoint = detect_and_read(path, CARTPOLE)
    assert (checkpoint.format, checkpoint.spec.algorithm) == ("sb3", algorithm.lower())
    assert checkpoint.spec.network_options == {"hidden": hidden, "activation": activation}
    assert ("activation" in checkpoint.assumed) == ("activation_fn" not in arguments and bool(hidden))
    check_same(checkpoint, oracle(model, path), cartpole)


def test_a_model_becomes_a_native_file(tmp_path: Path, cartpole: Tensor) -> None:
    model = save(tmp_path / "model.zip", "DQN", "MlpPolicy", "CartPole-v1")
    read = detect_and_read(tmp_path / "model.zip", CARTPOLE)
    network = read.spec.build()
    network.load_state_dict(read.state_dict)
    native = save_native(tmp_path / "x.safetensors", network, read.spec)
    check_same(detect_and_read(native), oracle(model, tmp_path / "model.zip"), cartpole)


def test_normalised_observations_are_the_librarys(tmp_path: Path, cartpole: Tensor) -> None:
    """VecNormalize's own pickle, of Stable-Baselines3 as it is now."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(make_vec_env("CartPole-v1", seed=1), clip_obs=1.5, epsilon=1e-3)
    env.reset()
    for _ in range(200):
        env.step(np.array([env.action_space.sample()]))
    model = save(tmp_path / "ppo-CartPole-v1.zip", "PPO", "MlpPolicy", env)
    env.save(tmp_path / "vec_normalize.pkl")
    expected = oracle(model, tmp_path / "ppo-CartPole-v1.zip")
    teacher = load_teacher(str(tmp_path))
    assert teacher.spec.network_options["normalise"] == {"epsilon": 1e-3, "clip": 1.5}
    read = detect_and_read(tmp_path / "ppo-CartPole-v1.zip")
    check_same(read, lambda obs: expected(torch.as_tensor(env.normalize_obs(obs.numpy())).float()), cartpole)


CNN_MODELS = pytest.mark.parametrize(
    ("algorithm", "arguments", "options"),
    [
        ("DQN", {}, {"hidden": 512}),
        (
            "DQN",
            {"net_arch": [16], "features_extractor_kwargs": {"features_dim": 32}},
            {"hidden": 32, "neck": [16], "neck_activation": "relu"},
        ),
        ("QRDQN", {"n_quantiles": 7}, {"hidden": 512}),
        ("PPO", {}, {"hidden": 512}),
        (
            "PPO",
            {"net_arch": [24, 16], "share_features_extractor": False},
            {"hidden": 512, "neck": [24, 16], "neck_activation": "tanh"},
        ),
        ("PPO", {"normalize_images": False}, {"hidden": 512}),
    ],
)


@CNN_MODELS
def test_cnn_policies_are_the_librarys(
    tmp_path: Path, atari_env: Any, algorithm: str, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    path = tmp_path / "model.zip"
    model = save(path, algorithm, "CnnPolicy", atari_env, **arguments)
    checkpoint = detect_and_read(path, BREAKOUT)
    assert (checkpoint.spec.network, checkpoint.spec.network_options) == ("nature", options)
    assert checkpoint.spec.env.obs_shape == (4, 84, 84)
    if not arguments.get("normalize_images", True):  # raw pixels make outputs of hundreds
        return check_close(checkpoint, oracle(model, path), observations("Breakout-v5", 64, 8))
    return check_same(checkpoint, oracle(model, path), observations("Breakout-v5", 192, 8))


@torch.no_grad()
def check_close(checkpoint: Checkpoint, expected: Callable[[Tensor], Tensor], obs: Tensor) -> None:
    """Relative to the size of the outputs, within single precision."""
    network = checkpoint.spec.build()
    network.load_state_dict(checkpoint.state_dict, strict=True)
    torch.testing.assert_close(torch.log_softmax(network(obs), dim=1), expected(obs), rtol=1e-4, atol=1e-3)
    assert "normalize_images=False" in checkpoint.assumed["pixels"]


@pytest.mark.slow
@CNN_MODELS
def test_cnn_policies_are_the_librarys_on_ten_thousand(
    tmp_path: Path, atari_env: Any, algorithm: str, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    path = tmp_path / "model.zip"
    model = save(path, algorithm, "CnnPolicy", atari_env, **arguments)
    checkpoint, expected = detect_and_read(path, BREAKOUT), oracle(model, path)
    check = check_same if arguments.get("normalize_images", True) else check_close
    for part in observations("Breakout-v5", 10_000, 8).split(500):
        check(checkpoint, expected, part)


@pytest.mark.parametrize(
    ("algorithm", "policy", "env", "words"),
    [
        ("PPO", "MlpPolicy", "Pendulum-v1", r"a policy of continuous actions"),
        ("SAC", "MlpPolicy", "Pendulum-v1", r"continuous actions \(SAC, TD3, DDPG, TQC or CrossQ\)"),
        ("TD3", "MlpPolicy", "Pendulum-v1", r"continuous actions \(SAC, TD3, DDPG, TQC or CrossQ\)"),
        ("RecurrentPPO", "MlpLstmPolicy", "CartPole-v1", r"a recurrent policy \(RecurrentPPO\)"),
        ("ARS", "LinearPolicy", "CartPole-v1", r"an ARS policy"),
        ("DQN", "MlpPolicy", "FrozenLake-v1", r"observations that are no vector \(Discrete\)"),
    ],
)
def test_policies_that_cannot_be_teachers_say_so(
    tmp_path: Path, algorithm: str, policy: str, env: str, words: str
) -> None:
    path = tmp_path / "model.zip"
    save(path, algorithm, policy, env)
    with pytest.raises(UserError, match=rf"model\.zip holds .*{words}; DQN, QR-DQN, PPO and A2C") as caught:
        detect_and_read(path, Hints(env))
    assert "\n" not in str(caught.value)
