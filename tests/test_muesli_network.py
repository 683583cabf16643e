"""Muesli's network against plain loops, separate passes and PyTorch's own LSTM."""

import pytest
import torch

from reincarnate.device import autocast
from reincarnate.networks import acting_network, build_muesli_network
from reincarnate.networks.normaliser import Normaliser

from muesli_networks import A, build, chosen, close, every_kind, observations, torch_lstm
from random_tensors import generator

# ------------------------------------------------------------ representation


@every_kind
def test_a_sequence_is_the_same_as_its_steps_one_by_one(kind: str, core: int | None) -> None:
    network = build(kind, core)
    obs, first = observations(3, 6, kind=kind), torch.rand(3, 6, generator=generator()) < 0.3
    whole = network(obs, network.initial_state(3), first)
    assert whole.features.shape == (3, 6, 8 + (core or 0))
    assert whole.policy_logits.shape == (3, 6, A)
    assert whole.value_logits.shape == (3, 6, 21)
    state = network.initial_state(3)
    for t in range(6):
        logits, state = network.step(obs[:, t], state, first[:, t])
        close(logits, whole.policy_logits[:, t])
    if core is None:
        assert state is whole.state is None
    else:
        close(state, whole.state)


@every_kind
def test_a_sequence_over_games_is_the_same_as_its_games_apart(kind: str, core: int | None) -> None:
    network = build(kind, core)
    obs, first = observations(1, 7, kind=kind), torch.zeros(1, 7, dtype=torch.bool)
    first[0, 3] = True
    whole = network(obs, None, first)
    games = [network(obs[:, :3]), network(obs[:, 3:])]
    for name in ("features", "policy_logits", "value_logits"):
        close(getattr(whole, name), torch.cat([getattr(game, name) for game in games], dim=1))


def test_the_state_goes_on_from_one_sequence_to_the_next() -> None:
    network = build()
    obs = observations(2, 8)
    whole = network(obs)
    begin = network(obs[:, :5])
    close(network(obs[:, 5:], begin.state).features, whole.features[:, 5:])
    with_memory, without = whole.policy_logits[:, 5:], network(obs[:, 5:]).policy_logits
    assert (with_memory - without).abs().max() > 1e-5


def test_environments_do_not_mix() -> None:
    network, obs = build(), observations(3, 5)
    changed = obs.clone()
    changed[1] += 1.0
    one, other = network(obs), network(changed)
    close(one.features[[0, 2]], other.features[[0, 2]])
    assert (one.features[1] - other.features[1]).abs().max() > 1e-3


def test_heads_see_what_the_trunk_says_now_and_what_the_lstm_remembers() -> None:
    network, obs = build(core=9), observations(3, 6)
    root = network(obs)
    now = network.trunk(obs.flatten(0, 1)).unflatten(0, (3, 6))
    remembered, _ = network.core.sequence(now, network.initial_state(3), torch.zeros(3, 6, dtype=torch.bool))
    close(root.features, torch.cat((now, remembered), dim=2))
    close(root.policy_logits, network.policy(root.features))


def test_feedback_is_read_except_at_the_start_of_a_game() -> None:
    network, obs = build(feedback=True), observations(2, 4)
    first = torch.tensor([[True, False, False, False], [True, False, True, False]])
    action, reward = chosen(2, 4), torch.randn(2, 4, generator=generator())
    base = network(obs, None, first, (action, reward)).features
    other = network(obs, None, first, ((action + 1) % A, reward + 1)).features
    close(other[:, 0], base[:, 0])
    close(other[1, 2], base[1, 2])
    assert (other[:, [1, 3]] - base[:, [1, 3]]).abs().amin(dim=(0, 1)).max() > 1e-4
    for only in ((action, reward + 1), ((action + 1) % A, reward)):
        assert not torch.allclose(network(obs, None, first, only).features[:, 1], base[:, 1])
    logits, _ = network.step(obs[:, 0], None, first[:, 0], (action[:, 0], reward[:, 0]))
    close(logits, network(obs, None, first, (action, reward)).policy_logits[:, 0])
    with pytest.raises(ValueError, match="needs the previous actions"):
        network(obs, None, first)


# ------------------------------------------------------------ observations


def test_running_statistics_are_those_of_everything_seen() -> None:
    normaliser, seen = Normaliser(5), torch.zeros((), dtype=torch.float64)
    rows = observations(3, 40) * torch.tensor([1e-3, 1.0, 50.0, 1.0, 0.0]) + 7.0
    for part in rows:
        normaliser.observe(part, seen)
    expected = rows.reshape(-1, 5).double()
    assert seen == 120
    torch.testing.assert_close(normaliser.mean.double(), expected.mean(dim=0), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        normaliser.variance.double(), expected.var(dim=0, unbiased=False), rtol=2e-3, atol=1e-9
    )
    assert normaliser(rows[0])[:, 4].abs().max() == 0  # a feature that never changes


def test_the_part_that_acts_normalises_as_the_network_does() -> None:
    network = build(core=None, normalise={"epsilon": 1e-8, "clip": 10.0})
    assert network.normaliser is not None
    network.normaliser.observe(3 * observations(90) + 1, torch.zeros((), dtype=torch.float64))
    acting, obs = acting_network(network), observations(6)
    assert {"normaliser.mean", "normaliser.variance"} < acting.state_dict().keys()
    close(acting(obs), network.step(obs)[0])
    plain = build(core=None)
    assert not torch.allclose(plain.step(obs)[0], network.step(obs)[0])


# ------------------------------------------------------------ model


def test_an_unroll_of_all_roots_is_a_loop_over_roots_with_pytorchs_lstm() -> None:
    network = build()
    model, oracle = network.model, torch_lstm(network.model.lstm)
    features, actions = network(observations(2, 3)).features.flatten(0, 1), chosen(6, 5)
    out = network.unroll(features, actions)
    for i in range(6):
        cell = model.initial.weight @ features[i] + model.initial.bias
        cell = (cell - cell.mean()) / (cell.var(unbiased=False) + 1e-5).sqrt()
        state = (torch.tanh(cell).view(1, 1, -1), cell.view(1, 1, -1))
        for k in range(5):
            one_hot = torch.eye(A)[actions[i, k]].view(1, 1, A)
            hidden, state = oracle(one_hot, state)
            close(out.reward_logits[i, k], model.reward(hidden[0, 0]))
            close(out.value_logits[i, k], model.value(hidden[0, 0]))
            close(out.policy_logits[i, k], model.policy(hidden[0, 0]))


def test_the_models_start_never_saturates() -> None:
    """However large h(s) and its weights have become, states differ in what the model begins with."""
    model = build().model
    with torch.no_grad():
        model.initial.weight.mul_(1e4)
    hidden, cell = model._start(torch.rand(50, model.initial.in_features, generator=generator())).unbind(1)
    close(cell.square().mean(dim=1), torch.ones(50))
    assert hidden.abs().max() < 0.99
    assert hidden.std(dim=0).min() > 1e-3


def test_expansion_is_the_first_step_of_an_unroll_for_each_action() -> None:
    network = build()
    features = network(observations(3, 2)).features.flatten(0, 1)
    every = network.expand(features)
    assert every.reward_logits.shape == (6, A, 21)
    for action in range(A):
        step = network.unroll(features, torch.full((6, 1), action))
        for name in ("reward_logits", "value_logits", "policy_logits"):
            close(getattr(every, name)[:, action], getattr(step, name)[:, 0])
    some = network.expand(features, chosen(6, 9))
    for name in ("reward_logits", "value_logits"):
        expected = getattr(every, name).gather(1, chosen(6, 9)[..., None].expand(6, 9, 21))
        close(getattr(some, name), expected)


def test_later_actions_do_not_change_earlier_predictions_and_earlier_ones_do() -> None:
    network, actions = build(), chosen(6, 5)
    features = network(observations(6, 1)).features[:, 0]
    changed = actions.clone()
    changed[:, 2] = (changed[:, 2] + 1) % A
    one, other = network.unroll(features, actions), network.unroll(features, changed)
    close(one.value_logits[:, :2], other.value_logits[:, :2])
    assert ((one.value_logits - other.value_logits)[:, 2:].abs().amax(dim=2) > 0).all()


# ------------------------------------------------------------ precision


@pytest.mark.parametrize("kind", ["vector", "image"])
def test_autocast_computes_the_trunk_in_bfloat16_and_everything_else_in_float32(kind: str) -> None:
    network, obs = build(kind), observations(2, 3, kind=kind)
    seen: dict[str, torch.Tensor] = {}
    network.trunk.register_forward_hook(lambda module, inputs, output: seen.update(features=output))
    plain = network(obs)
    with autocast(torch.device("cpu"), "bf16"):
        root = network(obs)
        out = network.unroll(root.features[:, 0], chosen(2, 5))
        every = network.expand(root.features[:, 0])
    assert seen["features"].dtype == torch.bfloat16
    for tensor in (root.features, root.policy_logits, root.value_logits, root.state, out.reward_logits):
        assert tensor.dtype == torch.float32
    assert torch.equal(out.value_logits, network.unroll(root.features[:, 0], chosen(2, 5)).value_logits)
    assert torch.equal(every.reward_logits, network.expand(root.features[:, 0]).reward_logits)
    torch.testing.assert_close(root.policy_logits, plain.policy_logits, atol=0.02, rtol=0)
    (root.value_logits.sum() + out.reward_logits.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


def test_nothing_is_read_by_the_host() -> None:
    """On meta tensors every read raises: what CUDA could not capture."""
    network = build_muesli_network("impala", (3, 96, 96), 18, device="meta", feedback=True)
    obs = torch.zeros(2, 3, 3, 96, 96, dtype=torch.uint8, device="meta")
    first = torch.zeros(2, 3, dtype=torch.bool, device="meta")
    action = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    root = network(obs, network.initial_state(2), first, (action, action.float()))
    assert root.state.shape == (2, 2, 512)
    roots, taken = root.features.flatten(0, 1), torch.zeros(6, 5, dtype=torch.int64, device="meta")
    assert network.unroll(roots, taken).reward_logits.shape == (6, 5, 601)
    assert network.expand(roots).value_logits.shape == (6, 18, 601)
