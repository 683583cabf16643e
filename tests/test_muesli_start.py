"""What Muesli's network is before it has learnt anything."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from reincarnate.losses import Support, categorical_loss
from reincarnate.networks import build_network
from reincarnate.networks.muesli import MuesliNetwork, build_muesli_network

from muesli_networks import VECTOR, A, build, chosen, observations
from random_tensors import generator

IMAGE = (4, 84, 84)


def drawn(name: str, shape: tuple[int, ...]) -> MuesliNetwork:
    return build_muesli_network(name, shape, 4, generator=generator(3), core=None, model=16, bins=11)


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
    images = torch.randint(0, 256, (32, *IMAGE), generator=generator()).to(torch.uint8)
    usual = build_network("nature", IMAGE, 4, generator=generator(3))
    with torch.no_grad():
        ours = drawn("nature", IMAGE).trunk(images / 255.0).std(dim=0).mean()
        theirs = usual.trunk(images / 255.0).std(dim=0).mean()
    assert ours > 3 * theirs


def test_weights_are_drawn_by_the_generator_alone_and_heads_are_small() -> None:
    before = torch.get_rng_state()
    first, same, other = build(seed=1), build(seed=1), build(seed=2)
    assert torch.equal(before, torch.get_rng_state())
    biases = {"policy.bias", "value.bias", "model.reward.bias", "model.value.bias", "model.policy.bias"}
    for key, value in first.state_dict().items():
        assert torch.equal(value, same.state_dict()[key])
        assert torch.equal(value, other.state_dict()[key]) == (key in biases)
    big = build_muesli_network("mlp", VECTOR, A, generator=generator())
    for head in (big.value, big.model.reward, big.model.value):
        assert head.weight.std().item() == pytest.approx(0.01, rel=0.02)
        assert (head.bias == 0).all()


def test_it_starts_knowing_nothing() -> None:
    """The papers' first loss: ln 601 for every scalar, ln A for every policy."""
    network = build_muesli_network("mlp", VECTOR, A, generator=generator(), core=64, model=64)
    root = network(observations(16, 4))
    out = network.unroll(root.features.flatten(0, 1), chosen(64, 5))
    support, zero = Support(), torch.zeros(64, 5)
    assert categorical_loss(out.reward_logits, zero, support).mean().item() == pytest.approx(6.3986, abs=0.05)
    assert categorical_loss(out.value_logits, zero, support).mean().item() == pytest.approx(6.3986, abs=0.05)
    root_loss = categorical_loss(root.value_logits, torch.full((16, 4), 3.0), support).mean()
    assert root_loss.item() == pytest.approx(math.log(601), abs=0.05)
    for logits in (root.policy_logits, out.policy_logits):
        assert (torch.softmax(logits, -1) - 1 / A).abs().max() < 0.03
