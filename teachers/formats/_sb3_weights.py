"""From the state dict of a Stable-Baselines3 policy to this project's networks.

The algorithm shows in the keys, sizes in the shapes; activations stand in the readable arguments, else the
policy class's default holds. A network of Stable-Baselines3 is its CNN (if any), linear layers each followed
by one activation, and a last linear layer, which is what :mod:`reincarnate.networks` has too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.teachers.formats import _weights
from reincarnate.teachers.formats._sb3_data import Space, class_name, policy_module
from reincarnate.teachers.formats._weights import TORCH, Entry, Layers, Weights
from reincarnate.types import OutputKind

_ACTIVATIONS = {
    "ReLU": "relu",
    "Tanh": "tanh",
    "ELU": "elu",
    "GELU": "gelu",
    "LeakyReLU": "leaky_relu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_CNN = {"cnn.0": "trunk.conv1", "cnn.2": "trunk.conv2", "cnn.4": "trunk.conv3", "linear.0": "trunk.fc"}
_CNN_KEYS = frozenset(f"{layer}.{kind}" for layer in _CNN for kind in ("weight", "bias"))
_LIBRARIES = ("stable_baselines3.", "sb3_contrib.")
_EXTRACTORS = frozenset({"NatureCNN", "FlattenExtractor"})
_DEFAULT_QUANTILES = 200


@dataclass(frozen=True)
class Statistics:
    """Running statistics of observations that a model was trained with (VecNormalize)."""

    mean: Tensor  # [features]
    variance: Tensor  # [features]
    epsilon: float
    clip: float
    file: str  # where they stand, for messages


@dataclass(frozen=True)
class Model:
    """What is known of a policy besides its weights."""

    data: Mapping[str, Any]
    arguments: Mapping[str, Any] | None  # of the policy's class; None: nothing readable
    observations: Space
    actions: Space
    statistics: Statistics | None = None


@dataclass(frozen=True)
class _Policy:
    """One algorithm's policy: where its layers are."""

    algorithm: str
    outputs: OutputKind
    layers: dict[str, str]  # prefix in the file -> canonical prefix
    unused: list[str]  # other keys that must be there
    activation: str  # the class's default


@dataclass(frozen=True)
class Network:
    """A policy brought to this project's network."""

    algorithm: str
    outputs: OutputKind
    weights: Weights
    assumed: dict[str, str] = field(default_factory=dict)


def read_network(
    path: Path, tensors: Mapping[str, Tensor], model: Model, image_size: tuple[int, int] | None
) -> Network:
    """The network in the tensors of ``policy.pth``.

    Raises:
        UserError: a policy that cannot be a teacher, or keys and shapes that do not belong together.
    """
    _refuse_kinds(path, tensors, model)
    policy = _policy(path, tensors, model)
    expected = [f"{prefix}.{kind}" for prefix in policy.layers for kind in ("weight", "bias")]
    _weights.refuse_keys(
        path, tensors, [*expected, *policy.unused], f"Stable-Baselines3's {policy.algorithm}"
    )
    activation, why = _activation(path, policy, model)
    entries = {
        f"{canonical}.{kind}": Entry.of(
            TORCH, f"{canonical}.{kind}", f"{prefix}.{kind}", tensors[f"{prefix}.{kind}"]
        )
        for prefix, canonical in policy.layers.items()
        for kind in ("weight", "bias")
    }
    assumed = {"activation": why} if why else {}
    if policy.algorithm == "qrdqn":
        assumed |= _average_quantiles(path, entries, model)
    is_image = "trunk.conv1.weight" in entries
    if is_image:
        assumed |= _pixels(entries, model)
    options = _options(path, entries, activation, is_image, model.statistics)
    layers = Layers(path, "nature" if is_image else "mlp", TORCH, entries, options)
    weights = _weights.assemble(layers, image_size or _image_size(path, model.observations, entries))
    _check_spaces(path, model, weights)
    return Network(policy.algorithm, policy.outputs, weights, assumed)


def _refuse_kinds(path: Path, keys: Mapping[str, Tensor], model: Model) -> None:
    """Name what cannot be a teacher: the first thing that stands in the way."""
    kind, actions = model.observations.kind, model.actions.kind
    module = policy_module(model.data) or ""
    extractor = class_name((model.arguments or {}).get("features_extractor_class"))
    rules = [
        (any(key.startswith(("lstm_", "gru")) for key in keys), "a recurrent policy (RecurrentPPO)"),
        (
            any(key.startswith(("actor.", "critic.", "critic_target.")) for key in keys),
            "an actor with continuous actions (SAC, TD3, DDPG, TQC or CrossQ)",
        ),
        ("log_std" in keys or actions == "Box", "a policy of continuous actions"),
        (actions in ("MultiDiscrete", "MultiBinary"), f"a policy of several choices at once ({actions})"),
        (model.actions.start != 0, f"actions that count from {model.actions.start}, not from 0"),
        (
            kind in ("Dict", "Tuple") or any(".extractors." in key for key in keys),
            "a policy of several observations at once (MultiInputPolicy)",
        ),
        (kind in ("Discrete", "MultiDiscrete", "MultiBinary"), f"observations that are no vector ({kind})"),
        (".maskable." in module, "MaskablePPO, which chooses among the actions that its environment allows"),
        (any(key.startswith("action_net.0.") for key in keys) or ".ars." in module, "an ARS policy"),
        (
            bool(module) and not f"{module}.".startswith(_LIBRARIES),
            f"a policy of somebody's own class ({module})",
        ),
        (
            bool(extractor) and str(extractor).rpartition(".")[2] not in _EXTRACTORS,
            f"a features extractor of another kind ({extractor})",
        ),
    ]
    for holds, words in rules:
        if holds:
            raise UserError(
                f"{path} holds {words}; DQN, QR-DQN, PPO and A2C policies of discrete actions can be read"
            )


def _policy(path: Path, keys: Mapping[str, Tensor], model: Model) -> _Policy:
    for name, algorithm in (("q_net", "dqn"), ("quantile_net", "qrdqn")):
        if any(key.startswith(f"{name}.") for key in keys):
            own = {key for key in keys if key.startswith(f"{name}.")}
            layers = _cnn(keys, f"{name}.features_extractor") | _dense(keys, f"{name}.{name}", last=True)
            target = [f"{name}_target.{key.removeprefix(f'{name}.')}" for key in sorted(own)]
            return _Policy(algorithm, "q_values", layers, target, "relu")
    if "action_net.weight" in keys and "value_net.weight" in keys:
        return _actor_critic(path, keys, model)
    shown = ", ".join(sorted(keys)[:4]) or "none"
    raise UserError(f"{path}: the keys of no Stable-Baselines3 policy that can be read; found {shown}")


def _actor_critic(path: Path, keys: Mapping[str, Tensor], model: Model) -> _Policy:
    """PPO and A2C; before version 1.8 actor and critic could share their first layers."""
    own = "pi_features_extractor" if _has(keys, "pi_features_extractor") else "features_extractor"
    shared = _dense(keys, "mlp_extractor.shared_net")
    layers = _cnn(keys, own) | shared
    layers |= _dense(keys, "mlp_extractor.policy_net", first=len(shared)) | {"action_net": "head"}
    cnns = (f"{each}features_extractor" for each in ("", "pi_", "vf_"))
    unused = [f"{each}.{key}" for each in cnns if _has(keys, each) for key in sorted(_CNN_KEYS)]
    unused = [key for key in unused if not key.startswith(f"{own}.")]
    unused += [
        f"{layer}.{kind}" for layer in _dense(keys, "mlp_extractor.value_net") for kind in ("weight", "bias")
    ]
    critic = Entry("value_net.weight", keys["value_net.weight"], (0, 1))
    _weights.check_shape(path, critic, (1, None))
    return _Policy(
        _on_policy(model.data),
        "policy_logits",
        layers,
        [*unused, "value_net.weight", "value_net.bias"],
        "tanh",
    )


def _on_policy(data: Mapping[str, Any]) -> str:
    """PPO, A2C and TRPO share their policy's class; what else they save tells them apart."""
    if "cg_max_steps" in data:
        return "trpo"
    return "ppo" if "n_epochs" in data or "clip_range" in data or "n_steps" not in data else "a2c"


def _has(keys: Mapping[str, Tensor], prefix: str) -> bool:
    return any(key.startswith(f"{prefix}.") for key in keys)


def _cnn(keys: Mapping[str, Tensor], prefix: str) -> dict[str, str]:
    """Layers of a NatureCNN, if there is a features extractor with weights."""
    return {f"{prefix}.{layer}": name for layer, name in _CNN.items()} if _has(keys, prefix) else {}


def _dense(keys: Mapping[str, Tensor], prefix: str, *, first: int = 0, last: bool = False) -> dict[str, str]:
    """Linear layers ``prefix.0``, ``prefix.2``, ... (an activation between two); the last may be the head."""
    count = sum(key.startswith(f"{prefix}.") and key.endswith(".weight") for key in keys)
    where = "trunk.neck" if any(".cnn." in key for key in keys) else "trunk.layers"
    layers = {f"{prefix}.{2 * i}": f"{where}.{first + i}" for i in range(count)}
    if last and count:
        layers[f"{prefix}.{2 * count - 2}"] = "head"
    return layers


def _activation(path: Path, policy: _Policy, model: Model) -> tuple[str, str | None]:
    """Its name, and why it is believed where nothing states it."""
    if not any(name.startswith(("trunk.neck", "trunk.layers")) for name in policy.layers.values()):
        return policy.activation, None  # no layer has one
    default = f"Stable-Baselines3's default for {policy.algorithm}"
    stated = (model.arguments or {}).get("activation_fn")
    if stated is None:
        readable = model.arguments is not None
        return (
            policy.activation,
            f"{default}: {'policy_kwargs name none' if readable else 'nothing states it'}",
        )
    name = (class_name(stated) or str(stated)[:60]).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UserError(
            f"{path} was trained with the activation {name}; {', '.join(_ACTIVATIONS)} can be read"
        )
    return _ACTIVATIONS[name], None


def _average_quantiles(path: Path, entries: dict[str, Entry], model: Model) -> dict[str, str]:
    """Q is the mean over quantiles of linear outputs, so the mean of their rows gives it exactly.

    The rows of the last layer are quantile by quantile, within each action by action.
    """
    for kind, shape in (("weight", (None, None)), ("bias", (None,))):
        _weights.check_shape(path, entries[f"head.{kind}"], shape)
    rows = entries["head.weight"].shape[0]
    stated = (model.arguments or {}).get("n_quantiles", model.data.get("n_quantiles"))
    quantiles = stated if type(stated) is int and stated > 0 else None
    actions = model.actions.n
    if quantiles is None:
        quantiles = rows // actions if actions else _DEFAULT_QUANTILES
    if not quantiles or rows % quantiles or (actions and rows // quantiles != actions):
        found = f"{rows} outputs, {quantiles} quantiles, {actions or 'unknown'} actions"
        raise UserError(f"{path}: {entries['head.weight'].key}: {found} do not belong together")
    for kind in ("weight", "bias"):
        entry = entries[f"head.{kind}"]
        _weights.check_shape(path, entry, (rows, None)[: entry.array.ndim])
        parts = entry.array.reshape(quantiles, rows // quantiles, *entry.array.shape[1:])
        mean = parts.double().mean(dim=0) if parts.dtype.is_floating_point else parts[0]
        entries[f"head.{kind}"] = Entry(entry.key, mean, entry.axes)
    return (
        {} if stated is not None or actions else {"quantiles": "Stable-Baselines3's default for qrdqn: 200"}
    )


def _pixels(entries: dict[str, Entry], model: Model) -> dict[str, str]:
    """Networks here divide pixels by 255; where the policy did not, its first layer makes up for it."""
    if (model.arguments or {}).get("normalize_images") is not False:
        return {}
    first = entries["trunk.conv1.weight"]
    entries["trunk.conv1.weight"] = Entry(first.key, first.array * 255.0, first.axes)
    return {
        "pixels": "normalize_images=False: the first layer is multiplied by 255, pixels are divided by it"
    }


def _options(
    path: Path, entries: dict[str, Entry], activation: str, is_image: bool, statistics: Statistics | None
) -> dict[str, Any]:
    if is_image:
        if statistics is not None:
            raise UserError(
                f"{path} was trained on normalised images ({statistics.file}); only vectors can be"
            )
        has_neck = any(name.startswith("trunk.neck") for name in entries)
        return {"neck_activation": activation} if has_neck else {}
    if statistics is None:
        return {"activation": activation}
    for name, values in (("mean", statistics.mean), ("variance", statistics.variance)):
        entries[f"normaliser.{name}"] = Entry(f"{statistics.file}: {name}", values, (0,))
    return {"activation": activation, "normalise": {"epsilon": statistics.epsilon, "clip": statistics.clip}}


def _image_size(path: Path, space: Space, entries: Mapping[str, Entry]) -> tuple[int, int] | None:
    """Height and width of the observation space: channels first, or last, where it tells."""
    if "trunk.conv1.weight" not in entries or space.shape is None:
        return None
    if len(space.shape) != 3 or (space.dtype or "uint8") != "uint8":
        raise UserError(
            f"{path} takes observations of shape {list(space.shape)} and type {space.dtype}; images of 8-bit "
            "pixels can be read"
        )
    channels_first = min(space.shape) == space.shape[0]
    height, width = space.shape[1:] if channels_first else space.shape[:2]
    return height, width


def _check_spaces(path: Path, model: Model, weights: Weights) -> None:
    """What ``data`` says of its spaces against the weights."""
    actions, shape = model.actions.n, model.observations.shape
    if actions is not None and actions != weights.num_outputs:
        raise UserError(f"{path}: {weights.num_outputs} outputs in policy.pth, {actions} actions in data")
    if shape is None:
        return
    if len(shape) == 3 and len(weights.obs_shape) == 1:
        raise UserError(
            f"{path} holds a policy that flattens images of shape {list(shape)}; one with a CNN can be read"
        )
    if sorted(shape) != sorted(weights.obs_shape):
        raise UserError(
            f"{path}: policy.pth takes observations of shape {list(weights.obs_shape)}, data "
            f"says {list(shape)}"
        )
