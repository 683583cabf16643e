"""Every part of Muesli's network learns, and its target follows."""

import torch

from reincarnate.losses import Support, categorical_loss, masked_mean
from reincarnate.networks import MuesliNetwork, average_, target_of

from muesli_networks import build, chosen, close, every_kind, observations
from random_tensors import generator

SUPPORT = Support(limit=10.0, bins=21)


def losses(network: MuesliNetwork, obs, actions, reward, value, policy) -> dict[str, torch.Tensor]:
    """Every head's loss, on made-up targets."""
    root = network(obs)
    out = network.unroll(root.features.flatten(0, 1), actions.flatten(0, 1))
    rewards = reward.flatten(0, 1)
    every = torch.ones(actions.shape[0] * actions.shape[1], actions.shape[2], dtype=torch.bool)
    cross = torch.nn.functional.cross_entropy
    return {
        "root_policy": cross(root.policy_logits.flatten(0, 1), torch.ones(6, dtype=torch.int64)),
        "root_value": categorical_loss(root.value_logits, value[..., 0], SUPPORT).mean(),
        "model_policy": cross(out.policy_logits.flatten(0, 1), policy.flatten()),
        "model_value": masked_mean(categorical_loss(out.value_logits, value.flatten(0, 1), SUPPORT), every),
        "model_reward": masked_mean(categorical_loss(out.reward_logits, rewards, SUPPORT), every),
    }  # fmt: skip


def made_up(kind: str) -> tuple[torch.Tensor, ...]:
    g = generator(3)
    reward, value = torch.randn(2, 3, 5, generator=g), torch.randn(2, 3, 5, generator=g) * 5
    actions = chosen(2, 3, 5)
    return observations(2, 3, kind=kind), actions, reward, value, actions  # policies follow the actions


@every_kind
def test_every_loss_falls_and_every_parameter_learns(kind: str, core: int | None) -> None:
    """Losses that do not move are how most attempts ended: parameters that no gradient reaches."""
    network, data = build(kind, core), made_up(kind)
    first = losses(network, *data)
    sum(first.values()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-2)
    for _ in range(40):
        optimizer.zero_grad()
        sum(losses(network, *data).values()).backward()
        optimizer.step()
    assert all(not torch.equal(before[name], value) for name, value in network.named_parameters())
    for name, loss in losses(network, *data).items():
        assert loss < first[name] - 0.1, name


def test_gradients_of_the_models_losses_reach_the_representation() -> None:
    for name in ("model_policy", "model_value", "model_reward"):
        network = build("image")
        losses(network, *made_up("image"))[name].backward()
        for part in (network.trunk, network.core, network.model.initial, network.model.lstm):
            assert all(parameter.grad.abs().sum() > 0 for parameter in part.parameters())
        assert all(parameter.grad is None for parameter in network.policy.parameters())


def test_the_target_is_an_average_that_stays_where_it_is() -> None:
    online, target = build(seed=1), target_of(build(seed=2))
    assert not any(parameter.requires_grad for parameter in target.parameters())
    places = [parameter.data_ptr() for parameter in target.parameters()]
    before = [parameter.clone() for parameter in target.parameters()]
    average_(target, online, 0.1)
    for now, old, new in zip(target.parameters(), before, online.parameters(), strict=True):
        close(now, 0.9 * old + 0.1 * new)
    assert [parameter.data_ptr() for parameter in target.parameters()] == places
    same = target_of(online)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), online.parameters(), strict=True))
    assert all(
        a.data_ptr() != b.data_ptr() for a, b in zip(same.parameters(), online.parameters(), strict=True)
    )
