"""From a teacher's weights to the file that a CleanRL script would have saved, for its evaluation to load.

CleanRL's networks have fixed sizes, and its evaluations build them from the script's class. So a teacher fits
a script exactly or not at all, and what does not fit is said: each script below states the network it builds.
Layer names are those that the readers know.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reincarnate.envs import env_spec
from reincarnate.errors import UserError
from reincarnate.networks import default_options
from reincarnate.teachers.formats import _msgpack_write, cleanrl_flax, cleanrl_torch
from reincarnate.teachers.formats._cleanrl import Layout
from reincarnate.teachers.formats._environment import _CLEANRL_ATARI
from reincarnate.teachers.formats._weights import FLAX, TORCH, Convention, feature_side
from reincarnate.teachers.teacher import TeacherSpec

Library = Literal["torch", "flax"]
_ATARI_OBS = (4, 84, 84)
_NATURE: dict[str, Any] = {"hidden": 512, "padding": "valid", "neck": []}
_IMPALA: dict[str, Any] = {"hidden": 256, "channels": [16, 32, 32], "neck": []}
_Q_MLP: dict[str, Any] = {"hidden": [120, 84], "activation": "relu"}
_ACTOR_MLP: dict[str, Any] = {"hidden": [64, 64], "activation": "tanh"}


@dataclass(frozen=True)
class Script:
    """A CleanRL script that saves its model, and the network that its class builds."""

    name: str  # exp_name: the file is called {name}.cleanrl_model
    layers_of: str  # the script whose layout the reader knows these layers by
    network: str
    options: Mapping[str, Any]  # what the class hard-codes
    outputs: str = "q_values"
    categorical: bool = False  # C51: model_weights and args in one file
    envpool: bool = False  # names games as EnvPool does


_SCRIPTS: dict[Library, tuple[Script, ...]] = {
    "torch": (
        Script("dqn_atari", "dqn_atari", "nature", _NATURE),
        Script("c51_atari", "dqn_atari", "nature", _NATURE, categorical=True),
        Script(
            "qdagger_dqn_atari_impalacnn",
            "qdagger_dqn_atari_impalacnn",
            "impala",
            _IMPALA | {"pool_padding": "torch"},
        ),
        Script("ppo_atari", "ppo_atari", "nature", _NATURE, outputs="policy_logits"),
        Script("dqn", "dqn", "mlp", _Q_MLP),
        Script("c51", "dqn", "mlp", _Q_MLP, categorical=True),
        Script("ppo", "ppo", "mlp", _ACTOR_MLP, outputs="policy_logits"),
    ),
    "flax": (
        Script("dqn_atari_jax", "dqn_atari_jax", "nature", _NATURE),
        Script("c51_atari_jax", "dqn_atari_jax", "nature", _NATURE, categorical=True),
        Script(
            "qdagger_dqn_atari_jax_impalacnn",
            "qdagger_dqn_atari_jax_impalacnn",
            "impala",
            _IMPALA | {"pool_padding": "same"},
        ),
        Script(
            "ppo_atari_envpool_xla_jax_scan",
            "ppo_atari_envpool_xla_jax_scan",
            "nature",
            _NATURE,
            outputs="policy_logits",
            envpool=True,
        ),
        Script("dqn_jax", "dqn_jax", "mlp", _Q_MLP),
        Script("c51_jax", "dqn_jax", "mlp", _Q_MLP, categorical=True),
    ),
}
_LIBRARY_NAMES: dict[Library, str] = {"torch": "PyTorch", "flax": "JAX"}


@dataclass(frozen=True)
class Written:
    """A CleanRL checkpoint in memory."""

    script: str
    env_id: str  # as the script names the environment
    content: bytes
    notes: tuple[str, ...] = field(default=())  # what the reader of the file must know


def write_cleanrl(spec: TeacherSpec, state_dict: Mapping[str, Tensor], library: Library) -> Written:
    """The file that the fitting CleanRL script saves, in PyTorch or in flax's msgpack.

    A policy's critic was not kept when it was loaded; it is written as zeros, and a note says so.

    Raises:
        UserError: no script has this network; the line says what differs.
    """
    script = _fitting_script(spec, library)
    layout, convention = _layout(script, library, state_dict), TORCH if library == "torch" else FLAX
    arrays = _arrays(spec, state_dict, layout, convention)
    notes = list(_environment_notes(spec, script))
    if layout.critic:
        arrays |= _critic_of_zeros(spec, state_dict, layout, convention)
        notes.append(
            "the critic is written as zeros (a teacher is its policy alone): acting does not use it, "
            "training on from this file would start with it"
        )
    args = _arguments(spec, script)
    save = _torch_bytes if library == "torch" else _flax_bytes
    return Written(script.name, args["env_id"], save(script, layout, arrays, args), tuple(notes))


def _fitting_script(spec: TeacherSpec, library: Library) -> Script:
    if spec.network_options.get("normalise") is not None:
        raise UserError(
            "it normalises its observations, which no CleanRL script's network does; export it as native"
        )
    if spec.network_options.get("core") is not None:
        raise UserError("it has a memory (an LSTM), which no CleanRL script here has; export it as native")
    categorical = spec.network_options.get("head") is not None
    kind = (spec.network, spec.outputs, categorical)
    for script in _SCRIPTS[library]:
        if (script.network, script.outputs, script.categorical) == kind:
            _refuse_misfit(spec, script, library)
            return script
    head = "a categorical head" if categorical else spec.outputs.replace("_", " ")
    raise UserError(
        f"CleanRL has no {_LIBRARY_NAMES[library]} script with the {spec.network} network and {head}; "
        "export it as native"
    )


def _refuse_misfit(spec: TeacherSpec, script: Script, library: Library) -> None:
    """Raise UserError unless the script's class builds exactly this network for this environment."""
    options = default_options(spec.network) | spec.network_options
    differing = [
        f"{name} is {options[name]} (the script's is {expected})"
        for name, expected in script.options.items()
        if options[name] != expected
    ]
    env = spec.env
    if env.kind == "atari" and env.obs_shape != _ATARI_OBS:
        differing.append(f"observations are {list(env.obs_shape)} (the script's are {list(_ATARI_OBS)})")
    usual = env_spec(env.env_id).num_actions
    if env.num_actions != usual:
        differing.append(f"it has {env.num_actions} actions (the script plays {env.env_id} with {usual})")
    if differing:
        other = "cleanrl-jax" if library == "torch" else "cleanrl"
        twin = f"--format {other} or native" if _only_pooling(differing) else "native"
        raise UserError(
            f"it does not fit CleanRL's {script.name}: {'; '.join(differing)}; export it as {twin}"
        )


def _only_pooling(differing: list[str]) -> bool:
    """Whether the other library's script fits where this one does not: they pad the pooling differently."""
    return len(differing) == 1 and differing[0].startswith("pool_padding")


def _layout(script: Script, library: Library, names: Iterable[str]) -> Layout:
    """The reader's layout of the script that has exactly these parameters (an MLP has one for each depth)."""
    layers = {name.rpartition(".")[0] for name in names}
    layouts: tuple[Layout, ...] = (cleanrl_torch if library == "torch" else cleanrl_flax)._LAYOUTS
    return next(
        layout
        for layout in layouts
        if layout.script == script.layers_of and set(layout.layers.values()) == layers
    )


def _arrays(
    spec: TeacherSpec, state_dict: Mapping[str, Tensor], layout: Layout, convention: Convention
) -> dict[str, npt.NDArray[np.float32]]:
    """Key in the file -> array in its library's layout."""
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    for prefix, canonical in layout.layers.items():
        for kind, name in ((convention.weight, f"{canonical}.weight"), ("bias", f"{canonical}.bias")):
            value = state_dict[name].detach().to("cpu", torch.float32)
            key = f"{prefix}{convention.separator}{kind}"
            arrays[key] = _stored(name, value, spec, convention).contiguous().numpy()
    return arrays


def _stored(name: str, value: Tensor, spec: TeacherSpec, convention: Convention) -> Tensor:
    """A canonical parameter as the library stores it; the inverse of what the reader does."""
    if value.ndim == 1:
        return value
    if name == "trunk.fc.weight" and convention.flatten == "hwc":
        height, width = (feature_side(spec.network, side) for side in spec.env.obs_shape[1:])
        value = value.reshape(len(value), -1, height, width).permute(0, 2, 3, 1).flatten(1)
    axes = convention.conv if value.ndim == 4 else convention.dense
    return value.permute(sorted(range(value.ndim), key=axes.__getitem__))


def _critic_of_zeros(
    spec: TeacherSpec, state_dict: Mapping[str, Tensor], layout: Layout, convention: Convention
) -> dict[str, npt.NDArray[np.float32]]:
    """Arrays of the shapes that the script's critic has: one output on the features that it reads."""
    features = state_dict["head.weight"].shape[1]
    sizes = [features, 1]
    if spec.network == "mlp":  # a network of its own beside the actor
        sizes = [*spec.env.obs_shape, *spec.network_options["hidden"], 1]
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    for index, prefix in enumerate(layout.critic):
        shape = [sizes[index + 1], sizes[index]]
        stored = [shape[convention.dense.index(axis)] for axis in range(2)]
        arrays[f"{prefix}{convention.separator}{convention.weight}"] = np.zeros(stored, np.float32)
        arrays[f"{prefix}{convention.separator}bias"] = np.zeros(shape[0], np.float32)
    return arrays


def _arguments(spec: TeacherSpec, script: Script) -> dict[str, Any]:
    """Of the script's arguments those that are known: the others would be invented."""
    env_id = spec.env.env_id
    if spec.env.kind == "atari" and not script.envpool:
        env_id = env_id.replace("-v5", "NoFrameskip-v4")
    arguments: dict[str, Any] = {"exp_name": script.name, "env_id": env_id}
    if script.categorical:
        head = spec.network_options["head"]
        arguments |= {"n_atoms": head["atoms"], "v_min": head["v_min"], "v_max": head["v_max"]}
    return arguments


def _environment_notes(spec: TeacherSpec, script: Script) -> list[str]:
    """Settings in which CleanRL's environment is not the teacher's: the same policy, another return."""
    if spec.env.kind != "atari":
        return []
    return [
        f"CleanRL's {script.name} plays with {name}={usual}, this teacher with {getattr(spec.env, name)}"
        for name, usual in _CLEANRL_ATARI.items()
        if getattr(spec.env, name) != usual
    ]


def _torch_bytes(
    script: Script, layout: Layout, arrays: Mapping[str, npt.NDArray[np.float32]], args: Mapping[str, Any]
) -> bytes:
    """``torch.save`` of the state dict, or of CleanRL's C51 dict around it."""
    state = OrderedDict((key, torch.from_numpy(value)) for key, value in arrays.items())
    content: Any = state
    if script.categorical:
        state["atoms"] = torch.linspace(args["v_min"], args["v_max"], args["n_atoms"])
        content = {"model_weights": state, "args": dict(args)}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _flax_bytes(
    script: Script, layout: Layout, arrays: Mapping[str, npt.NDArray[np.float32]], args: Mapping[str, Any]
) -> bytes:
    """The parameters alone; C51's dict around them; or a policy's ``[args, [network, actor, critic]]``."""
    tree = _nested(arrays)
    if layout.critic:
        parts = [{"params": tree[name]} for name in ("network", "actor", "critic")]
        return _msgpack_write.to_bytes([dict(args), parts])
    weights = {"params": tree}
    if script.categorical:
        return _msgpack_write.to_bytes({"model_weights": weights, "args": dict(args)})
    return _msgpack_write.to_bytes(weights)


def _nested(arrays: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
    """``{"Conv_0/kernel": ...}`` as ``{"Conv_0": {"kernel": ...}}``, sorted as JAX leaves its dicts."""
    tree: dict[str, Any] = {}
    for key, value in sorted(arrays.items()):
        *parents, name = key.split("/")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = value
    return tree
