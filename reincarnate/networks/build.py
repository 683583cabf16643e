"""Networks by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from reincarnate.errors import UserError
from reincarnate.networks.impala import ImpalaTrunk
from reincarnate.networks.iqn import IqnTrunk
from reincarnate.networks.mlp import MlpTrunk
from reincarnate.networks.nature import NatureTrunk
from reincarnate.networks.network import Network, Trunk, initialise
from reincarnate.networks.normaliser import Normaliser

NetworkName = Literal["nature", "impala", "mlp", "iqn"]
NETWORKS: dict[str, type[Trunk]] = {
    "nature": NatureTrunk,
    "impala": ImpalaTrunk,
    "mlp": MlpTrunk,
    "iqn": IqnTrunk,
}


def build_network(
    name: str,
    obs_shape: Sequence[int],
    num_outputs: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    head: Mapping[str, Any] | None = None,
    normalise: Mapping[str, Any] | None = None,
    core: int | None = None,
    **options: Any,
) -> Network:
    """A freshly drawn network; its state-dict names are part of the interface.

    Args:
        name: ``nature`` (``trunk.conv1 .conv2 .conv3 .fc .neck.i``), ``impala`` (``trunk.sections.i.conv``,
            ``trunk.sections.i.blocks.j.conv1 .conv2``, ``trunk.fc .neck.i``), ``mlp`` (``trunk.layers.i``) or
            ``iqn`` (nature's and ``trunk.embedding``); each with ``.weight`` and ``.bias``, and
            ``head.weight``, ``head.bias``.
        obs_shape: [frames, height, width] for images, [features] for mlp; without the batch.
        num_outputs: Size of the last layer, one per action.
        device: Where the parameters live.
        generator: Draws the weights, on ``device``; None uses PyTorch's own.
        head: None is linear; ``{"atoms", "v_min", "v_max"}`` is C51's categorical one, read as its mean.
        normalise: ``{"epsilon", "clip"}`` of running observation statistics (mlp alone), kept as
            ``normaliser.mean`` and ``normaliser.variance``.
        core: units of an LSTM before the head, ``core.weight_ih``, ``core.weight_hh``, ``core.bias``.
        **options: nature: ``hidden`` (512), ``padding`` (``valid`` | ``same``), ``neck`` (()),
            ``neck_activation`` (``relu``). impala: ``hidden`` (256), ``channels`` ((16, 32, 32)),
            ``pool_padding`` (``torch`` | ``same``), ``neck`` (()). mlp: ``hidden`` ((256, 256)),
            ``activation`` (``relu``; see :data:`reincarnate.networks.mlp.ACTIVATIONS`). iqn: ``hidden``
            (512), ``padding`` (``valid``), ``embedding`` (64), ``taus`` (64). All are plain JSON values.

    Raises:
        UserError: unknown name or option, a shape that the network cannot take, an image too small.
    """
    _check_name(name)
    _check(name, tuple(obs_shape), num_outputs, options)
    if normalise is not None and name != "mlp":
        raise UserError(f"only the mlp network normalises observations, not {name}")
    if core is not None and core < 1:
        raise UserError(f"core must have at least 1 unit, got {core}")
    with torch.device("meta"):  # draws nothing from the global generator
        normaliser = None if normalise is None else Normaliser(*obs_shape, **normalise)
        network = Network(NETWORKS[name](tuple(obs_shape), **options), num_outputs, head, normaliser, core)
    if torch.device(device).type != "meta":
        network.to_empty(device=device)
        initialise(network, generator)
    return network


def default_network(kind: Literal["atari", "vector"], *, light: bool = False) -> NetworkName:
    """The student's network: mlp for vectors; for images impala, or nature if ``light``."""
    if kind == "vector":
        return "mlp"
    return "nature" if light else "impala"


def default_options(name: str) -> dict[str, Any]:
    """Every option of a network with its default, as plain JSON values; to be saved beside the weights.

    Raises:
        UserError: unknown name.
    """
    _check_name(name)
    return {
        option: list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        for option, parameter in _options(name).items()
    }


def _options(name: str) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(NETWORKS[name]).parameters)
    del parameters["obs_shape"]
    return parameters


def _check_name(name: str) -> None:
    if name not in NETWORKS:
        raise UserError(f"no network {name!r}; known: {', '.join(NETWORKS)}")


def _check(name: str, obs_shape: tuple[int, ...], num_outputs: int, options: dict[str, Any]) -> None:
    expected = "[features]" if name == "mlp" else "[frames, height, width]"
    if len(obs_shape) != (1 if name == "mlp" else 3) or min(obs_shape) < 1:
        raise UserError(f"the {name} network takes observations {expected}, got {list(obs_shape)}")
    if num_outputs < 1:
        raise UserError(f"a network needs at least one output, got {num_outputs}")
    known = _options(name)
    for option in options:
        if option not in known:
            raise UserError(f"the {name} network has no option {option!r}; known: {', '.join(known)}")
