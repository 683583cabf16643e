"""CleanRL's networks, written anew from their architecture, and the real writers of its checkpoints.

The PyTorch ones need nothing; the flax ones are made by functions that import flax when called, so that
tests can skip where it is not installed.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def nature_side(side: int) -> int:
    for kernel, stride in ((8, 4), (4, 2), (3, 1)):
        side = (side - kernel) // stride + 1
    return side


def torch_nature(stack: int, height: int, width: int, actions: int, hidden: int = 512) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(stack, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * nature_side(height) * nature_side(width), hidden),
        nn.ReLU(),
        nn.Linear(hidden, actions),
    )


def torch_mlp(
    features: int, hidden: tuple[int, int], actions: int, activation: type[nn.Module]
) -> nn.Sequential:
    first, second = hidden
    return nn.Sequential(
        nn.Linear(features, first),
        activation(),
        nn.Linear(first, second),
        activation(),
        nn.Linear(second, actions),
    )


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 3, padding="same")
        self.conv1 = nn.Conv2d(channels, channels, 3, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv1(self.conv0(x.relu()).relu())


class _Section(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 3, padding="same")
        self.res_block0 = _Residual(channels)
        self.res_block1 = _Residual(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_block1(self.res_block0(nn.functional.max_pool2d(self.conv(x), 3, 2, padding=1)))


def torch_impala(
    stack: int, side: int, actions: int, channels: tuple[int, int, int] = (16, 32, 32)
) -> nn.Sequential:
    sizes = (stack, *channels)
    return nn.Sequential(
        *(_Section(before, after) for before, after in pairwise(sizes)),
        nn.Flatten(),
        nn.ReLU(),
        nn.Linear(channels[-1] * (-(-side // 8)) ** 2, 256),
        nn.ReLU(),
        nn.Linear(256, actions),
    )


class TorchC51(nn.Module):
    """CleanRL's categorical Q network: ``network`` gives the logits of each action's atoms."""

    def __init__(self, network: nn.Sequential, atoms: int, v_min: float, v_max: float) -> None:
        super().__init__()
        self.register_buffer("atoms", torch.linspace(v_min, v_max, steps=atoms))
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Q-values: the means of the distributions."""
        logits = self.network(x)
        masses = logits.view(len(x), -1, len(self.atoms)).softmax(dim=2)
        return (masses * self.atoms).sum(dim=2)


def c51_arguments(env_id: str, script: str, atoms: int, v_min: float, v_max: float) -> dict[str, Any]:
    """Some of ``vars(args)``, of every kind that occurs."""
    return {
        "exp_name": script,
        "seed": 1,
        "cuda": True,
        "wandb_entity": None,
        "env_id": env_id,
        "learning_rate": 2.5e-4,
        "n_atoms": atoms,
        "v_min": v_min,
        "v_max": v_max,
    }


def save_c51(path: Path, network: nn.Module, arguments: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model_weights": network.state_dict(), "args": arguments}, path)
    return path


class Agent(nn.Module):
    """CleanRL's PPO: a policy head and a critic on a shared trunk, or two networks of their own."""

    def __init__(self, actor: nn.Module, critic: nn.Module, network: nn.Module | None = None) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic
        if network is not None:
            self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The actor's logits."""
        logits: Tensor = self.actor(self.network(x) if hasattr(self, "network") else x)
        return logits


def save_agent(path: Path, agent: Agent) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(agent.state_dict(), path)
    return path


def prefixed(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in module.state_dict().items()}


def save_dqn(path: Path, network: nn.Module) -> Path:
    """As CleanRL's Q networks: one Sequential called ``network``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(OrderedDict(prefixed(network, "network")), path)
    return path


def flax_nature(actions: int | None, hidden: int = 512) -> Any:
    """flax module; ``None``: the trunk alone, as CleanRL's PPO has it."""
    import flax.linen as fnn
    import jax.numpy as jnp

    class Nature(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            x = jnp.transpose(x, (0, 2, 3, 1)) / 255.0
            for channels, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                x = fnn.relu(fnn.Conv(channels, (kernel, kernel), (stride, stride), padding="VALID")(x))
            x = fnn.relu(fnn.Dense(hidden)(x.reshape((x.shape[0], -1))))
            return x if actions is None else fnn.Dense(actions)(x)

    return Nature()


def flax_impala(
    actions: int | None, channels: tuple[int, ...] = (16, 32, 32), hiddens: tuple[int, ...] = (256,)
) -> Any:
    """flax module; ``None``: the trunk alone, as cleanba has it."""
    import flax.linen as fnn
    import jax.numpy as jnp

    class ResidualBlock(fnn.Module):
        channels: int

        @fnn.compact
        def __call__(self, x: Any) -> Any:
            y = fnn.Conv(self.channels, (3, 3))(fnn.relu(x))
            return x + fnn.Conv(self.channels, (3, 3))(fnn.relu(y))

    class ConvSequence(fnn.Module):
        channels: int

        @fnn.compact
        def __call__(self, x: Any) -> Any:
            x = fnn.max_pool(fnn.Conv(self.channels, (3, 3))(x), (3, 3), strides=(2, 2), padding="SAME")
            x = ResidualBlock(self.channels)(x)  # one by one: flax numbers modules as they are made
            return ResidualBlock(self.channels)(x)

    class Impala(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            x = jnp.transpose(x, (0, 2, 3, 1)) / 255.0
            for size in channels:
                x = ConvSequence(size)(x)
            x = fnn.relu(x).reshape((x.shape[0], -1))
            for size in hiddens:
                x = fnn.relu(fnn.Dense(size)(x))
            return x if actions is None else fnn.Dense(actions)(x)

    return Impala()


def flax_q_values(logits_of: Any, atoms: int, v_min: float, v_max: float) -> Any:
    """Logits -> Q-values, as CleanRL's C51 in JAX reads them: softmax, then the mean over its support."""
    import jax

    def q_values(logits: Any) -> Any:
        masses = jax.nn.softmax(logits.reshape((len(logits), -1, atoms)), axis=-1)
        return (masses * np.linspace(v_min, v_max, num=atoms)).sum(axis=-1)

    return lambda params, obs: q_values(logits_of(params, obs))


def cleanba_arguments(env_id: str, script: str, **changes: Any) -> dict[str, Any]:
    """Some of ``vars(args)`` of cleanba's scripts, of every kind that occurs."""
    return {
        "exp_name": script,
        "seed": 1,
        "env_id": env_id,
        "wandb_entity": None,
        "local_num_envs": 64,
        "anneal_lr": True,
        "gamma": 0.99,
        "actor_device_ids": [0],
        "learner_device_ids": [1, 2],
        "global_learner_decices": ["cuda:1", "cuda:2"],
    } | changes


def save_cleanba(path: Path, arguments: dict[str, Any], parts: list[Any]) -> Path:
    """``[args, [network, actor, critic]]`` with flax's own writer."""
    return save_flax(path, [arguments, parts])


def flax_dense(*sizes: int) -> Any:
    """Dense layers with ReLU between them."""
    import flax.linen as fnn

    class Dense(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            for size in sizes[:-1]:
                x = fnn.relu(fnn.Dense(size)(x))
            return fnn.Dense(sizes[-1])(x)

    return Dense()


def flax_params(module: Any, obs: Any, seed: int) -> Any:
    """Random float32 parameters of the module's shapes, about the size that an initialiser gives."""
    import jax

    shapes = jax.eval_shape(module.init, jax.random.PRNGKey(0), obs)
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> Any:
        scale = 0.1 if leaf.ndim == 1 else (1.5 / np.prod(leaf.shape[:-1])) ** 0.5
        return (rng.standard_normal(leaf.shape) * scale).astype(np.float32)

    return jax.tree_util.tree_map(draw, shapes)


def save_flax(path: Path, tree: Any) -> Path:
    """With flax's own writer."""
    import flax.serialization

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(flax.serialization.to_bytes(tree))
    return path


class TorchQNetwork(nn.Module):
    """CleanRL's ``QNetwork`` of its DQN scripts: a Sequential called ``network``."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


class TorchC51Agent(nn.Module):
    """CleanRL's ``QNetwork`` of its C51 scripts: logits by action and atom, and the atoms as a buffer."""

    def __init__(self, network: nn.Sequential, actions: int, atoms: int, low: float, high: float) -> None:
        super().__init__()
        self.register_buffer("atoms", torch.linspace(low, high, steps=atoms))
        self.network, self.actions = network, actions

    def forward(self, x: Tensor) -> Tensor:
        logits = self.network(x).view(len(x), self.actions, len(self.atoms))
        return (torch.softmax(logits, dim=2) * self.atoms).sum(2)


class TorchAgent(nn.Module):
    """CleanRL's ``Agent`` of its PPO scripts: with a shared ``network``, or actor and critic apart."""

    def __init__(self, actor: nn.Module, critic: nn.Module, network: nn.Module | None = None) -> None:
        super().__init__()
        if network is not None:
            self.network = network
        self.actor, self.critic, self._shared = actor, critic, network is not None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.network(x) if self._shared else x
        return self.actor(features), self.critic(features)


def torch_agent_atari(actions: int) -> TorchAgent:
    return TorchAgent(nn.Linear(512, actions), nn.Linear(512, 1), torch_nature(4, 84, 84, 1)[:-1])


def torch_agent(features: int, actions: int) -> TorchAgent:
    return TorchAgent(*(torch_mlp(features, (64, 64), size, nn.Tanh) for size in (actions, 1)))


def flax_expected_values(pmf_logits: Any, actions: int, atoms: int, low: float, high: float) -> Any:
    """What CleanRL's JAX C51 acts on: the means of the distributions that its network gives."""
    import flax.linen as fnn
    import jax.numpy as jnp

    pmfs = fnn.softmax(pmf_logits.reshape((len(pmf_logits), actions, atoms)), axis=-1)
    return (pmfs * jnp.asarray(np.linspace(low, high, num=atoms))).sum(axis=-1)
