"""Dopamine's networks, told by their keys and sizes, brought to this project's.

An action-value that is a linear function of the last features needs no network of its own: the mean over
QR-DQN's quantiles, dueling streams and noisy layers without their noise are folded into the last layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.networks import NetworkName
from reincarnate.teachers.formats._dopamine_gin import Gin
from reincarnate.teachers.formats._weights import (
    FLAX,
    Entry,
    Layers,
    Weights,
    check_shape,
    feature_side,
    refuse_keys,
)

Arrays = Mapping[str, Tensor]
ATOMS, QUANTILES, SUPPORT = 51, 200, 10.0  # Dopamine's configurations for Atari
_FULL_ACTION_SET = 18
_STACK = re.compile(r"encoder/(?P<stack>_stacks_|Stack_)\d+/")
_KINDS = ("kernel", "bias")
_NOISY_KINDS = ("kernel_mu", "kernel_sigma", "bias_mu", "bias_sigma")


@dataclass(frozen=True)
class Body:
    """What carries the heads: everything up to the layers that depend on the number of actions."""

    what: str  # in words
    network: NetworkName
    layers: Mapping[str, str]  # prefix in the file -> canonical prefix
    heads: tuple[str, ...]  # prefixes behind it: action-values; or advantages and value
    options: Mapping[str, Any]

    @property
    def is_image(self) -> bool:
        """Whether it sees images."""
        return self.network != "mlp"


@dataclass(frozen=True)
class Head:
    """The last layer as a linear one."""

    algorithm: str
    kernel: Tensor  # [features, outputs]
    bias: Tensor  # [outputs]
    categorical: dict[str, Any] | None  # build_network's ``head``
    assumed: dict[str, str]


def body_of(path: Path, arrays: Arrays) -> Body:
    """Which network the keys are of.

    Raises:
        UserError: not exactly the keys of a network that can be read.
    """
    layers = {key.rpartition("/")[0] for key in arrays}
    body = _body(layers, arrays)
    if body is not None and body.network == "impala" and len(body.heads) == 2 and _is_iqn(arrays):
        raise UserError(f"{path}: an implicit quantile network with the Impala CNN, which is not read")
    if body is None:
        shown = ", ".join(sorted(arrays)[:4]) or "none"
        raise UserError(
            f"{path}: the keys of no Dopamine network that can be read (Nature and Impala CNNs, classic "
            f"control); found {shown}"
        )
    refuse_keys(path, arrays, _expected(body), f"Dopamine's {body.what}")
    return body


def _body(layers: set[str], arrays: Arrays) -> Body | None:
    noisy = "NoisyNetwork_0" in layers
    dense = "NoisyNetwork" if noisy else "Dense"
    heads = (f"{dense}_1", f"{dense}_2") if f"{dense}_2" in layers else (f"{dense}_1",)
    kind = ("noisy " if noisy else "") + ("dueling " if len(heads) == 2 else "")
    stack = next((match["stack"] for layer in layers if (match := _STACK.match(f"{layer}/"))), None)
    if stack:
        names = _impala_layers(layers, stack) | {f"{dense}_0": "trunk.fc"}
        return Body(f"{kind}Impala network", "impala", names, heads, {"pool_padding": "same"})
    if "Conv_0" in layers:
        names = {f"Conv_{i}": f"trunk.conv{i + 1}" for i in range(3)}
        if len(heads) == 2 and _is_iqn(arrays):
            names |= {"Dense_0": "trunk.embedding", "Dense_1": "trunk.fc"}
            return Body("implicit quantile network", "iqn", names, ("Dense_2",), {"padding": "same"})
        names |= {f"{dense}_0": "trunk.fc"}
        return Body(f"{kind}Nature network", "nature", names, heads, {"padding": "same"})
    return _classic(layers)


def _impala_layers(layers: Iterable[str], stack: str) -> dict[str, str]:
    count = len({layer.split("/")[1] for layer in layers if layer.startswith(f"encoder/{stack}")})
    names: dict[str, str] = {}
    for i in range(count):
        names[f"encoder/{stack}{i}/Conv_0"] = f"trunk.sections.{i}.conv"
        for j in range(4):
            block = f"trunk.sections.{i}.blocks.{j // 2}.conv{j % 2 + 1}"
            names[f"encoder/{stack}{i}/Conv_{j + 1}"] = block
    return names


def _is_iqn(arrays: Arrays) -> bool:
    """IQN and the dueling network have the same keys; IQN's third layer follows its second."""
    second, third = arrays.get("Dense_1/kernel"), arrays.get("Dense_2/kernel")
    if second is None or third is None or second.ndim != 2 or third.ndim != 2:
        return False
    return second.shape[1] == third.shape[0]


def _classic(layers: set[str]) -> Body | None:
    """Classic control: ``layers_i`` and ``final_layer``, or before 2021 numbered throughout."""
    hidden = sorted(layer for layer in layers if re.fullmatch(r"layers_\d+", layer))
    last = "final_layer"
    if not hidden and layers == {f"Dense_{i}" for i in range(len(layers))}:
        *hidden, last = (f"Dense_{i}" for i in range(len(layers))) if len(layers) > 1 else ("",)
    if not hidden or hidden == [""]:
        return None
    names = {hidden[i]: f"trunk.layers.{i}" for i in range(len(hidden))}
    return Body("classic control network", "mlp", names, (last,), {"activation": "relu"})


def _expected(body: Body) -> list[str]:
    """Every key that the file must have, and no other."""
    return [
        f"{layer}/{kind}"
        for layer in (*body.layers, *body.heads)
        for kind in (_NOISY_KINDS if _is_noisy(layer) else _KINDS)
    ]


def _is_noisy(layer: str) -> bool:
    return layer.startswith("NoisyNetwork_")


def _array(path: Path, arrays: Arrays, layer: str, kind: str) -> tuple[str, Tensor]:
    """A layer's kernel or bias with its key; a noisy one without its noise, as Dopamine evaluates it."""
    if not _is_noisy(layer):
        return f"{layer}/{kind}", arrays[f"{layer}/{kind}"]
    key, mean = f"{layer}/{kind}_mu", arrays[f"{layer}/{kind}_mu"]
    noise = f"{layer}/{kind}_sigma"
    check_shape(path, Entry(noise, arrays[noise], tuple(range(mean.ndim))), tuple(mean.shape))
    return key, mean


def head_of(path: Path, arrays: Arrays, body: Body, actions: int, gin: Gin) -> Head:
    """The action-values as a linear layer, or as the mean of a categorical one.

    Args:
        actions: How many the game has of its own.
        gin: Settings beside the checkpoint, which say what sizes leave open.

    Raises:
        UserError: sizes that fit no agent with this number of actions.
    """
    kernel, bias = _linear(path, arrays, body.heads[0])
    if body.network == "iqn":
        return Head("iqn", kernel, bias, None, {})
    if len(body.heads) == 2:
        value_kernel, value_bias = _linear(path, arrays, body.heads[1])
        atoms = value_bias.numel()
        if value_kernel.shape[0] != kernel.shape[0] or bias.numel() % atoms:
            raise UserError(
                f"{path}: {body.heads[1]}/kernel: {list(value_kernel.shape)} does not go with "
                f"{body.heads[0]}/kernel {list(kernel.shape)}: not an advantage per action and atom"
            )
        kernel, bias = _dueling(kernel, value_kernel, atoms), _dueling(bias, value_bias, atoms)
        return _categorical(path, body, kernel, bias, atoms, gin)
    atoms = _atoms(path, bias.numel(), actions, body, gin)
    if atoms == 1 and gin.agent in (None, "dqn"):
        return Head("dqn", kernel, bias, None, {})
    if gin.agent == "quantile" or (gin.agent is None and atoms == QUANTILES):
        return Head("qrdqn", _mean_of_atoms(kernel, atoms), _mean_of_atoms(bias, atoms), None, {})
    return _categorical(path, body, kernel, bias, atoms, gin)


def _linear(path: Path, arrays: Arrays, layer: str) -> tuple[Tensor, Tensor]:
    """Kernel [in, out] and bias [out] of a layer."""
    key, kernel = _array(path, arrays, layer, "kernel")
    check_shape(path, Entry(key, kernel, (0, 1)), (None, None))
    key, bias = _array(path, arrays, layer, "bias")
    check_shape(path, Entry(key, bias, (0,)), (kernel.shape[1],))
    return kernel, bias


def _atoms(path: Path, outputs: int, actions: int, body: Body, gin: Gin) -> int:
    """Outputs per action."""
    known = (1, ATOMS, QUANTILES) if gin.atoms is None else (gin.atoms,)
    for count in (actions, _FULL_ACTION_SET) if body.is_image else (actions,):
        atoms, rest = divmod(outputs, count)
        if not rest and atoms in known:
            return atoms
    sizes = " or ".join(str(atoms) for atoms in known)
    raise UserError(
        f"{path}: {body.heads[0]}: {outputs} outputs are not {sizes} for each of {actions} actions; name the "
        "right environment with --env, or put the agent's .gin file beside it if it has other sizes"
    )


def _categorical(path: Path, body: Body, kernel: Tensor, bias: Tensor, atoms: int, gin: Gin) -> Head:
    """A distribution over ``atoms`` returns; its support is in no checkpoint."""
    if atoms < 2:
        raise UserError(f"{path}: {body.heads[-1]}: {bias.numel()} outputs are no distribution over returns")
    if gin.v_max is None and not body.is_image:
        raise UserError(
            f"{path}: a distribution over returns whose range Dopamine's settings give as 10 or 100; put the "
            "agent's .gin file (vmax) beside it"
        )
    v_max = SUPPORT if gin.v_max is None else gin.v_max
    v_min = gin.v_min or -v_max  # as Dopamine reads it: 0 counts as not given
    why = gin.source or f"Dopamine's default: {atoms} returns from {v_min:g} to {v_max:g}"
    support = {"atoms": atoms, "v_min": v_min, "v_max": v_max}
    return Head("rainbow", kernel, bias, support, {"support": why})


def _dueling(advantages: Tensor, values: Tensor, atoms: int) -> Tensor:
    """[..., A x atoms] and [..., atoms] -> [..., A x atoms]: value + advantage - mean advantage."""
    by_action = torch.unflatten(advantages.double(), -1, (-1, atoms))
    centred = by_action - by_action.mean(dim=-2, keepdim=True)
    return (values.double().unsqueeze(-2) + centred).flatten(-2)


def _mean_of_atoms(outputs: Tensor, atoms: int) -> Tensor:
    """[..., A x atoms] -> [..., A]."""
    return torch.unflatten(outputs.double(), -1, (-1, atoms)).mean(dim=-1)


def layers_of(path: Path, arrays: Arrays, body: Body, head: Head) -> Layers:
    """What :func:`reincarnate.teachers.formats._weights.assemble` needs."""
    entries: dict[str, Entry] = {}
    for layer, canonical in body.layers.items():
        for kind, name in (("kernel", "weight"), ("bias", "bias")):
            key, array = _array(path, arrays, layer, kind)
            entries[f"{canonical}.{name}"] = Entry.of(FLAX, f"{canonical}.{name}", key, array)
    entries["head.weight"] = Entry(_array(path, arrays, body.heads[0], "kernel")[0], head.kernel, (1, 0))
    entries["head.bias"] = Entry(_array(path, arrays, body.heads[0], "bias")[0], head.bias, (0,))
    options = dict(body.options)
    if head.categorical:
        options["head"] = head.categorical
    if body.network == "iqn":
        check_shape(path, entries["trunk.embedding.weight"], (None, None))
        options["embedding"] = entries["trunk.embedding.weight"].shape[1]
    return Layers(path, body.network, FLAX, entries, options)


def reorder_embedding(weights: Weights) -> None:
    """IQN's embedding in the order C, H, W of the features that it multiplies, instead of flax's H, W, C."""
    height, width = (feature_side("nature", side, padding="same") for side in weights.obs_shape[1:])
    for name in ("trunk.embedding.weight", "trunk.embedding.bias"):
        rows = torch.unflatten(weights.state_dict[name], 0, (height, width, -1))
        weights.state_dict[name] = rows.movedim(2, 0).flatten(0, 2).contiguous()


def fold_normalisation(weights: Weights, low: Tensor, high: Tensor) -> None:
    """Dopamine's ``2 (x - low) / (high - low) - 1`` before the first layer, folded into that layer."""
    scale = 2.0 / (high.double() - low.double())
    weight = weights.state_dict["trunk.layers.0.weight"].double()
    bias = weights.state_dict["trunk.layers.0.bias"].double()
    weights.state_dict["trunk.layers.0.bias"] = (bias - weight @ (low.double() * scale + 1.0)).float()
    weights.state_dict["trunk.layers.0.weight"] = (weight * scale).float().contiguous()
