"""Muesli's network: PyTorch's own LSTM, plain loops and separate passes as oracles, and that it learns."""

import math

import pytest
import torch

from reincarnate.device import autocast
from reincarnate.errors import UserError
from reincarnate.losses import Support, categorical_loss, masked_mean
from reincarnate.networks import (
    MuesliNetwork,
    acting_network,
    average_,
    build_muesli_network,
    muesli_options,
    target_of,
)
from reincarnate.networks.lstm import Lstm
from reincarnate.networks.normaliser import Normaliser

from random_tensors import generator

CPU = torch.device("cpu")
SUPPORT = Support(limit=10.0, bins=21)
IMAGE, VECTOR = (3, 20, 24), (5,)
A = 4


def build(kind: str = "vector", core: int | None = 9, seed: int = 0, **options) -> MuesliNetwork:
    name, shape = ("mlp", VECTOR) if kind == "vector" else ("impala", IMAGE)
    trunk = {"hidden": (8,)} if kind == "vector" else {"hidden": 8, "channels": (3, 5)}
    return build_muesli_network(
        name, shape, A, generator=generator(seed), core=core, model=7, bins=21, trunk=trunk, **options
    )


def observations(*shape: int, kind: str = "vector", seed: int = 0) -> torch.Tensor:
    if kind == "image":
        return torch.randint(0, 256, (*shape, *IMAGE), dtype=torch.uint8, generator=generator(seed))
    return torch.randn(*shape, *VECTOR, generator=generator(seed))


def chosen(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, A, shape, generator=generator(seed))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


cases = pytest.mark.parametrize(
    ("kind", "core"), [("vector", 9), ("vector", None), ("image", 9), ("image", None)]
)


# ------------------------------------------------------------ the LSTM


def torch_lstm(lstm: Lstm) -> torch.nn.LSTM:
    """PyTorch's own, with the same weights."""
    other = torch.nn.LSTM(lstm.weight_ih.shape[1], lstm.units, batch_first=True)
    with torch.no_grad():
        other.weight_ih_l0.copy_(lstm.weight_ih)
        other.weight_hh_l0.copy_(lstm.weight_hh)
        other.bias_ih_l0.copy_(lstm.bias)
        other.bias_hh_l0.zero_()
    return other


def test_the_lstm_is_pytorchs_with_its_gradients() -> None:
    lstm = Lstm(3, 6)
    lstm.initialise(generator())
    x, state = torch.randn(4, 11, 3, generator=generator()), torch.randn(4, 2, 6, generator=generator(1))
    other = torch_lstm(lstm)
    expected, (hidden, cell) = other(x, (state[:, 0][None].contiguous(), state[:, 1][None].contiguous()))
    found, last = lstm.sequence(x, state, torch.zeros(4, 11, dtype=torch.bool))
    close(found, expected)
    close(last, torch.stack((hidden[0], cell[0]), dim=1))
    found.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in ((lstm.weight_ih, other.weight_ih_l0), (lstm.weight_hh, other.weight_hh_l0)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_game_that_begins_inside_a_sequence_begins_with_an_empty_state() -> None:
    lstm = Lstm(3, 6)
    lstm.initialise(generator())
    x, state = torch.randn(1, 9, 3, generator=generator()), torch.randn(1, 2, 6, generator=generator(1))
    first = torch.zeros(1, 9, dtype=torch.bool)
    first[0, 4] = True
    whole, last = lstm.sequence(x, state, first)
    before, _ = lstm.sequence(x[:, :4], state, first[:, :4])
    after, end = lstm.sequence(x[:, 4:], lstm.initial_state(1), torch.zeros(1, 5, dtype=torch.bool))
    close(whole, torch.cat([before, after], dim=1))
    close(last, end)


def test_the_lstms_weights_are_pytorchs_and_its_forget_gate_starts_open() -> None:
    lstm = Lstm(20, 30)
    lstm.initialise(generator())
    bound = 30**-0.5
    for value in (lstm.weight_ih, lstm.weight_hh):
        assert 0.99 * bound < value.abs().max() <= bound
    assert (lstm.bias[30:60] == 1).all()
    assert lstm.bias[:30].abs().max() <= bound


# ------------------------------------------------------------ representation


@cases
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


@cases
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


# ------------------------------------------------------------ learning


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


@cases
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


# ------------------------------------------------------------ precision, devices, options


@pytest.mark.parametrize("kind", ["vector", "image"])
def test_autocast_computes_the_trunk_in_bfloat16_and_everything_else_in_float32(kind: str) -> None:
    network, obs = build(kind), observations(2, 3, kind=kind)
    seen: dict[str, torch.Tensor] = {}
    network.trunk.register_forward_hook(lambda module, inputs, output: seen.update(features=output))
    plain = network(obs)
    with autocast(CPU, "bf16"):
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


def test_heads_see_what_the_trunk_says_now_and_what_the_lstm_remembers() -> None:
    network, obs = build(core=9), observations(3, 6)
    root = network(obs)
    now = network.trunk(obs.flatten(0, 1)).unflatten(0, (3, 6))
    remembered, _ = network.core.sequence(now, network.initial_state(3), torch.zeros(3, 6, dtype=torch.bool))
    close(root.features, torch.cat((now, remembered), dim=2))
    close(root.policy_logits, network.policy(root.features))


def test_the_papers_size() -> None:
    network = build_muesli_network(
        "impala", (3, 96, 96), 18, device="meta", trunk={"channels": (64, 128, 128, 64), "hidden": 512}
    )
    assert network.trunk.fc.weight.shape == (512, 2304)  # 6 x 6 x 64
    assert len(network.trunk.sections) == 4
    assert network.core.weight_hh.shape == (4 * 512, 512)
    assert network.model.lstm.weight_ih.shape == (4 * 1024, 18)
    assert network.model.initial.weight.shape == (1024, 512 + 512)
    assert network.value.weight.shape == (601, 512 + 512)
    assert network.model.reward.weight.shape == (601, 1024)


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


def test_names_are_an_interface() -> None:
    assert [name for name, _ in build(core=9).named_parameters()] == [
        "trunk.layers.0.weight", "trunk.layers.0.bias",
        "core.weight_ih", "core.weight_hh", "core.bias",
        "policy.weight", "policy.bias", "value.weight", "value.bias",
        "model.initial.weight", "model.initial.bias",
        "model.lstm.weight_ih", "model.lstm.weight_hh", "model.lstm.bias",
        "model.reward.weight", "model.reward.bias", "model.value.weight", "model.value.bias",
        "model.policy.weight", "model.policy.bias",
    ]  # fmt: skip


def test_options_can_be_saved_and_build_the_same_network() -> None:
    options = muesli_options("mlp", core=None, model=32, trunk={"hidden": (16,)})
    assert options == {
        "core": None,
        "model": 32,
        "bins": 601,
        "feedback": False,
        "trunk": {"hidden": [16], "activation": "relu"},
    }
    network = build_muesli_network("mlp", VECTOR, A, **options)
    assert network.core is None
    assert network.trunk.features == 16
    assert muesli_options("impala")["trunk"]["channels"] == [16, 32, 32]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_muesli_network("mlp", VECTOR, A, core=0), "core must have at least 1 unit, got 0"),
        (lambda: build_muesli_network("mlp", VECTOR, A, model=0), "model must have at least 1 unit"),
        (
            lambda: build_muesli_network("mlp", VECTOR, A, core=None, feedback=True),
            "feedback .* needs an LSTM",
        ),
        (lambda: build_muesli_network("impla", IMAGE, A), "no network 'impla'"),
        (lambda: build_muesli_network("mlp", VECTOR, A, trunk={"hiden": 3}), "no option 'hiden'"),
        (lambda: muesli_options("mlp", cor=3), "no option 'cor'"),
    ],
)
def test_what_does_not_fit_is_refused(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
