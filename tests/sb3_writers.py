"""Stable-Baselines3 models: saved by its own writer, or forged by hand where nothing of it is needed."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SPACE = {":type:": "<class 'gymnasium.spaces.box.Box'>", ":serialized:": "gAU=", "dtype": "float32"}
ACTIONS = {":type:": "<class 'gymnasium.spaces.discrete.Discrete'>", ":serialized:": "gAU=", "start": "0"}


def linear(prefix: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(inputs * 1000 + outputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return {f"{prefix}.weight": weight, f"{prefix}.bias": torch.randn(outputs, generator=generator)}


def dqn_tensors(features: int = 4, actions: int = 2, hidden: int = 8) -> dict[str, Tensor]:
    """A DQN with one hidden layer and its target network."""
    own = linear("q_net.q_net.0", features, hidden) | linear("q_net.q_net.2", hidden, actions)
    return own | {key.replace("q_net.", "q_net_target.", 1): value for key, value in own.items()}


def ppo_tensors(features: int = 4, actions: int = 2, hidden: int = 8) -> dict[str, Tensor]:
    return (
        linear("mlp_extractor.policy_net.0", features, hidden)
        | linear("mlp_extractor.value_net.0", features, hidden)
        | linear("action_net", hidden, actions)
        | linear("value_net", hidden, 1)
    )


def cnn_tensors(channels: int = 4, actions: int = 4, side: int = 84) -> dict[str, Tensor]:
    """A DQN with a small NatureCNN."""
    cells = side
    own: dict[str, Tensor] = {}
    before = channels
    for i, (after, kernel, stride) in enumerate(((32, 8, 4), (64, 4, 2), (64, 3, 1))):
        own[f"q_net.features_extractor.cnn.{2 * i}.weight"] = torch.zeros(after, before, kernel, kernel)
        own[f"q_net.features_extractor.cnn.{2 * i}.bias"] = torch.zeros(after)
        before, cells = after, (cells - kernel) // stride + 1
    own |= linear("q_net.features_extractor.linear.0", 64 * cells * cells, 16) | linear(
        "q_net.q_net.0", 16, actions
    )
    return own | {key.replace("q_net.", "q_net_target.", 1): value for key, value in own.items()}


def data_of(shape: tuple[int, ...] = (4,), actions: int = 2, **fields: Any) -> dict[str, Any]:
    space = SPACE | {"_shape": list(shape)} | ({"dtype": "uint8"} if len(shape) == 3 else {})
    return {
        "policy_class": {":type:": "<class 'abc.ABCMeta'>", "__module__": "stable_baselines3.dqn.policies"},
        "policy_kwargs": {},
        "observation_space": space,
        "action_space": ACTIONS | {"n": str(actions)},
        **fields,
    }


def saved(tensors: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(tensors), buffer)
    return buffer.getvalue()


def write_zip(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def members_of(tensors: Mapping[str, Any], data: Mapping[str, Any] | bytes) -> dict[str, bytes]:
    return {
        "data": data if isinstance(data, bytes) else json.dumps(data).encode(),
        "policy.pth": saved(tensors),
        "_stable_baselines3_version": b"2.9.2",
    }


def forge(
    path: Path, tensors: Mapping[str, Any] | None = None, data: Mapping[str, Any] | None = None
) -> Path:
    """A model's zip without Stable-Baselines3: a CartPole DQN unless told otherwise."""
    tensors = dqn_tensors() if tensors is None else tensors
    return write_zip(path, members_of(tensors, data_of() if data is None else data))
