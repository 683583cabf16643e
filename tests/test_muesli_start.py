"""What Muesli's network is before it has learnt anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reincarnate.networks import build_network
from reincarnate.networks.muesli import MuesliNetwork, build_muesli_network

IMAGE = (4, 84, 84)


def drawn(name: str, shape: tuple[int, ...]) -> MuesliNetwork:
    generator = torch.Generator().manual_seed(3)
    return build_muesli_network(name, shape, 4, generator=generator, core=None, model=16, bins=11)


def layers(network: nn.Module) -> list[nn.Conv2d | nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_convolutional_trunks_keep_the_variance_of_their_inputs(name: str) -> None:
    """N(0, 1 / fan_in), no biases: flax's and haiku's default."""
    for layer in layers(drawn(name, IMAGE).trunk):
        assert not layer.bias.any()
        count = layer.weight.numel()
        ratio = float(layer.weight.detach().square().mean()) * layer.weight[0].numel()
        assert ratio == pytest.approx(1.0, abs=6 * (2 / count) ** 0.5)  # of a mean of squares of normals


def test_an_mlp_is_drawn_as_everywhere() -> None:
    for layer in layers(drawn("mlp", (6,)).trunk):
        bound = layer.weight[0].numel() ** -0.5
        assert 0.8 * bound < layer.weight.abs().max() <= bound
        assert layer.bias.any()


def test_more_of_an_image_comes_through_than_with_pytorchs_default() -> None:
    """The spread of the features between images, beside that of a student of DQN."""
    images = torch.randint(0, 256, (32, *IMAGE), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    usual = build_network("nature", IMAGE, 4, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours = drawn("nature", IMAGE).trunk(images / 255.0).std(dim=0).mean()
        theirs = usual.trunk(images / 255.0).std(dim=0).mean()
    assert ours > 3 * theirs
