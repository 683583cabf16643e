"""Stable-Baselines3 models (``.zip``) of DQN, QR-DQN, PPO and A2C, with what RL Zoo puts beside them.

Weights come from ``policy.pth``, the rest from the readable text in ``data`` and from the files around the
model; nothing pickled in them is ever loaded. Acting needs nothing of Stable-Baselines3: the policy becomes
one of this project's own networks.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from reincarnate.errors import UserError
from reincarnate.teachers.formats._checkpoint import Checkpoint, Hints
from reincarnate.teachers.formats._probe import head_of
from reincarnate.teachers.formats._sb3_archive import (
    DATA,
    Archive,
    is_archive,
    read_archive,
    read_data_file,
)
from reincarnate.teachers.formats._sb3_data import literal, policy_arguments, read_space
from reincarnate.teachers.formats._sb3_environment import sb3_environment
from reincarnate.teachers.formats._sb3_weights import Model, read_network
from reincarnate.teachers.formats._sb3_zoo import Zoo, beside, read_zoo
from reincarnate.teachers.formats._torch_zip import load_tensors
from reincarnate.teachers.teacher import TeacherSpec

NAME = "sb3"
SUMMARY = "Stable-Baselines3: a model's zip"


#: Keys that a policy's state dict opens with.
_POLICY_KEYS = (b"q_net.", b"quantile_net.", b"mlp_extractor.", b"features_extractor.", b"action_net.")


def matches(path: Path) -> bool:
    """Whether the file is a zip with a model's members, or the ``policy.pth`` of one that was unpacked."""
    if is_archive(path):
        return True
    head = head_of(path)
    return head.startswith(b"PK\x03\x04") and any(key in head for key in _POLICY_KEYS)


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in ``path``.

    Raises:
        UserError: damaged, unsafe, a policy that cannot be a teacher, or at odds with its environment.
    """
    archive = read_archive(path) if is_archive(path) else _unpacked(path, hints)
    zoo = read_zoo(path, hints)
    data = archive.data
    arguments = policy_arguments(data)
    model = Model(
        data=data,
        arguments=_configured_arguments(zoo) if arguments is None else arguments,
        observations=read_space(data.get("observation_space")),
        actions=read_space(data.get("action_space")),
        statistics=zoo.statistics,
    )
    network = read_network(path, archive.tensors, model, hints.image_size)
    weights = network.weights
    env, assumed = sb3_environment(path, hints, weights, zoo)
    spec = TeacherSpec(env, network.outputs, weights.network, weights.options, network.algorithm)
    return Checkpoint(spec, weights.state_dict, NAME, assumed=assumed | network.assumed)


def _configured_arguments(zoo: Zoo) -> dict[str, object] | None:
    """``policy_kwargs`` of RL Zoo's configuration, where ``data`` has none to read."""
    stated = literal(zoo.config.get("policy_kwargs"))
    return stated if isinstance(stated, dict) else None


def _unpacked(path: Path, hints: Hints) -> Archive:
    """A model whose zip was unpacked into a folder: ``policy.pth`` and ``data`` beside it."""
    own, companions = beside(path, hints)
    name = str(PurePosixPath(own).with_name(DATA))
    if name not in companions.names:
        raise UserError(
            f"{path} is the policy of an unpacked Stable-Baselines3 model, and its {DATA!r} is not beside "
            "it; name the zip, or the whole folder"
        )
    return Archive(load_tensors(path), read_data_file(companions.path_of(name)))
