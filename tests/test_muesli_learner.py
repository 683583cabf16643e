"""Muesli's update as a whole: targets from the target network, ablations, resuming, and that it learns."""

import dataclasses
import math

import pytest
import torch

from reincarnate.errors import UserError
from reincarnate.losses import AdvantageMoment, retrace_returns
from reincarnate.students.muesli import MuesliConfig
from reincarnate.students.muesli.objective import muesli_losses
from reincarnate.students.muesli.optimizer import ClippedAdam
from reincarnate.students.muesli.targets import make_targets, prior_of

from muesli_games import ACTIONS, SUPPORT, generator, learner, play_recall, random_batch

M = torch.ones(())


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def losses_of(student, batch, **settings):
    """Losses and targets of a batch under other settings, with a fresh running scale."""
    chosen = dataclasses.replace(student._settings, **settings)
    root = student.online(batch.obs, batch.state, batch.game_start)
    prior = prior_of(student.target, batch, SUPPORT, chosen.discount)
    online = torch.log_softmax(root.policy_logits, dim=2)
    targets = make_targets(chosen, batch, prior, online, AdvantageMoment.zero(), generator())
    return muesli_losses(chosen, student.online, root, batch, targets, SUPPORT, generator(1)), targets, prior


# ------------------------------------------------------------ the optimiser


def gradients(i: int) -> list[torch.Tensor]:
    return [torch.randn(s, generator=generator(i)) * 10 ** (i % 3 - 1) for s in ((4, 3), (5,))]


def trained(optimizer_class, updates: int, **options) -> tuple[list[torch.Tensor], object]:
    parameters = [torch.ones(4, 3, requires_grad=True), torch.ones(5, requires_grad=True)]
    optimizer = optimizer_class(parameters, **options)
    for i in range(updates):
        for parameter, gradient in zip(parameters, gradients(i), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_a_clip_it_is_pytorchs_adamw(decay: float) -> None:
    found, _ = trained(ClippedAdam, 30, rate=1e-2, max_update=math.inf, weight_decay=decay)
    expected, _ = trained(torch.optim.AdamW, 30, lr=1e-2, weight_decay=decay)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_step_is_never_longer_than_the_learning_rate() -> None:
    """Adam's own is, where a large gradient follows many small ones: 0.1 / sqrt(0.001 / (1 - 0.999^501))."""
    for limit, longest in ((1.0, 1.0), (math.inf, 1.985)):
        parameter = torch.zeros(1, requires_grad=True)
        optimizer = ClippedAdam([parameter], 0.1, max_update=limit)
        for gradient in [1e-4] * 500 + [1.0]:
            before, parameter.grad = parameter.detach().clone(), torch.tensor([gradient])
            optimizer.step()
        step = (parameter.detach() - before).abs().item() / 0.1
        assert step == pytest.approx(longest, rel=0.01)


def test_the_optimiser_goes_on_where_it_was_and_its_tensors_stay() -> None:
    parameters, optimizer = trained(ClippedAdam, 7, rate=1e-2)
    copies = [p.detach().clone().requires_grad_() for p in parameters]
    other = ClippedAdam(copies, 0.5)
    places = [x.data_ptr() for x in (*other._first, *other._second, other._missing, other.rate)]
    other.load_state_dict(optimizer.state_dict())
    for i in range(7, 12):
        for rows in (parameters, copies):
            for parameter, gradient in zip(rows, gradients(i), strict=True):
                parameter.grad = gradient.clone()
        optimizer.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, copies, strict=True))
    assert [x.data_ptr() for x in (*other._first, *other._second, other._missing, other.rate)] == places


# ------------------------------------------------------------ targets


def test_targets_come_from_the_target_network_alone() -> None:
    student, batch = learner(), random_batch()
    student.update(batch, None, M)
    _, before, _ = losses_of(student, batch)
    with torch.no_grad():
        for parameter in student.online.parameters():
            parameter.add_(0.3)
    _, after, _ = losses_of(student, batch)
    for name in ("returns", "value", "step_advantage", "advantage", "cmpo", "sigma"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    _, online, _ = losses_of(student, batch, retrace_policy="online")
    assert not torch.equal(online.returns, before.returns)


def test_no_gradient_reaches_the_target_network_and_none_flows_through_targets() -> None:
    student, batch = learner(), random_batch()
    losses, targets, _ = losses_of(student, batch, retrace_policy="online", value_target="clipped_rho")
    losses.total(student._settings).backward()
    assert all(parameter.grad is None for parameter in student.target.parameters())
    for name, value in vars(targets).items():
        parts = vars(value).values() if name == "unroll" else value or () if name == "sampled" else [value]
        assert not any(part.requires_grad for part in parts), name


def test_returns_are_retrace_over_the_models_q_values() -> None:
    """Row by row, by the formula, across a terminal and a truncation."""
    student, batch = learner(discount=0.9, trace_lambda=0.8), random_batch()
    _, targets, prior = losses_of(student, batch)
    B, T = batch.action.shape
    pi, mu = prior.log_policy.exp(), batch.behaviour_log_policy.exp()
    for b in range(B):
        later = None
        for t in range(T - 2, -1, -1):
            bootstrap = float((pi[b, t + 1] * prior.q[b, t + 1]).sum())
            if t + 1 < T - 1 and batch.executed[b, t + 1]:
                a = batch.action[b, t + 1]
                c = 0.8 * min(1.0, float(pi[b, t + 1, a] / mu[b, t + 1, a]))
                bootstrap += c * (later - float(prior.q[b, t + 1, a]))
            later = float(batch.reward[b, t]) + 0.9 * bootstrap * (not batch.terminal[b, t])
            assert targets.returns[b, t].item() == pytest.approx(later, abs=1e-5)
    assert torch.equal(targets.valid, batch.executed[:, :-1])


def test_both_advantages_are_divided_by_the_same_scale() -> None:
    student, batch = learner(), random_batch()
    _, targets, prior = losses_of(student, batch)
    error = (targets.returns - prior.value[:, :-1])[targets.valid]
    sigma = error.square().mean().sqrt()
    torch.testing.assert_close(targets.sigma, sigma)
    torch.testing.assert_close(targets.step_advantage[targets.valid], error / sigma)
    torch.testing.assert_close(targets.advantage, (prior.q - prior.value[..., None]) / sigma)


def test_centred_advantages_are_around_zero_and_the_scale_stays() -> None:
    """By the running mean, which is the batch's own at the first update; for CMPO state by state."""
    student, batch = learner(), random_batch()
    _, plain, prior = losses_of(student, batch)
    _, centred, _ = losses_of(student, batch, centre_advantage=True)
    assert torch.equal(plain.sigma, centred.sigma)
    valid = plain.valid
    torch.testing.assert_close(centred.step_advantage[valid].mean(), torch.zeros(()), rtol=0, atol=1e-6)
    differences = (plain.step_advantage - centred.step_advantage)[valid]
    torch.testing.assert_close(differences, plain.step_advantage[valid].mean().expand_as(differences))
    means = (prior.log_policy.exp() * centred.advantage).sum(dim=2)
    torch.testing.assert_close(means, torch.zeros_like(means), rtol=0, atol=1e-5)
    shift = plain.advantage - centred.advantage
    torch.testing.assert_close(shift, shift[..., :1].expand_as(shift), rtol=0, atol=1e-5)


def test_returns_can_bootstrap_from_v_instead_of_the_model() -> None:
    student, batch = learner(trace_lambda=0.0, discount=0.9), random_batch()
    _, targets, prior = losses_of(student, batch, retrace_q=False)
    expected = batch.reward[:, :-1] + 0.9 * ~batch.terminal[:, :-1] * prior.value[:, 1:]
    torch.testing.assert_close(targets.returns, expected)


def test_what_the_ignored_rows_hold_changes_nothing() -> None:
    student, batch = learner(), random_batch(T=9)
    other = dataclasses.replace(batch, reward=torch.where(batch.executed, batch.reward, 1e3))
    first, _, _ = losses_of(student, batch)
    second, _, _ = losses_of(student, other)
    for name, value in vars(first).items():
        assert torch.equal(value, getattr(second, name)), name


# ------------------------------------------------------------ the update


@pytest.mark.parametrize("core", [16, None])
def test_an_update_moves_every_parameter_and_the_average_follows(core: int | None) -> None:
    student, batch = learner(core), random_batch(core=core)
    before = weights(student.online)
    assert student.network is student.target
    metrics = student.update(batch, torch.log_softmax(torch.zeros(3, 8, ACTIONS), 2), M)
    assert all(torch.isfinite(value) and value.shape == () for value in metrics.values())
    for old, new, average in zip(before, weights(student.online), weights(student.target), strict=True):
        assert not torch.equal(old, new)
        torch.testing.assert_close(average, 0.9 * old + 0.1 * new)
    assert metrics["value_loss"].item() == pytest.approx(math.log(21), abs=0.1)
    assert metrics["reward_loss"].item() == pytest.approx(math.log(21), abs=0.1)


def test_every_loss_of_the_model_falls_on_the_same_data() -> None:
    """The trap of constant losses: they would stay at ln bins for ever."""
    student, batch = learner(rate=1e-2, cmpo=False, policy_gradient=False), random_batch()
    first = student.update(batch, None, M)
    for _ in range(60):
        last = student.update(batch, None, M)
    for name in ("value_loss", "reward_loss"):
        assert last[name] < first[name] - 1.0, name
    # knowing the mean reward alone would leave the entropy of the rewards in the batch
    assert last["reward_loss"] < 1.3


ABLATIONS = {
    "cmpo": {"cmpo": False},
    "policy_gradient": {"policy_gradient": False},
    "model_policy": {"model_policy": False},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_term_that_is_switched_off_is_zero_and_the_others_stay(name: str) -> None:
    student, batch = learner(), random_batch()
    for _ in range(3):
        student.update(batch, None, M)
    whole, _, _ = losses_of(student, batch)
    without, _, _ = losses_of(student, batch, **ABLATIONS[name])
    for other, value in vars(whole).items():
        if other == name:
            assert value != 0
            assert getattr(without, other) == 0
        else:
            assert torch.equal(getattr(without, other), value)


@pytest.mark.parametrize(
    "settings",
    [
        {"cmpo_samples": 1},
        {"cmpo_samples": 16},
        {"num_roots": 2},
        {"num_roots": 99},
        {"unroll_steps": 1},
        {"unroll_steps": 12},
        {"leave_one_out": True},
        {"normalise_advantage": False},
        {"value_target": "clipped_rho", "retrace_policy": "online"},
        {"prior_behaviour": 0.0, "prior_uniform": 0.0},
        {"cmpo_clip": math.inf},
        {"weight_decay": 1e-4, "max_update": math.inf},
        {"model_policy": False, "policy_gradient": False},
    ],
)
def test_every_variant_updates(settings) -> None:
    student, batch = learner(**settings), random_batch()
    for _ in range(2):
        metrics = student.update(batch, None, M)
    assert all(torch.isfinite(value) for value in metrics.values())


def test_many_samples_give_the_gradient_of_the_exact_form() -> None:
    student, batch = learner(), random_batch()
    with torch.no_grad():  # away from the prior, so that there is a gradient to speak of
        for head in (student.online.policy, student.online.model.policy):
            head.bias.add_(torch.tensor([1.0, -1.0, 0.0]))

    def gradient(**settings) -> torch.Tensor:
        student.optimizer.zero_grad()
        losses, _, _ = losses_of(student, batch, policy_gradient=False, **settings)
        (losses.cmpo + losses.model_policy).backward()
        return torch.cat([p.grad.flatten() for p in student.online.parameters() if p.grad is not None])

    exact, sampled = gradient(), gradient(cmpo_samples=20_000)
    assert (sampled - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("T", [2, 3])
def test_short_sequences_and_batches_without_an_action_stay_finite(T: int) -> None:
    student, batch = learner(), random_batch(B=2, T=T)
    nothing = dataclasses.replace(batch, executed=torch.zeros_like(batch.executed))
    for one in (batch, nothing, batch):
        metrics = student.update(one, None, M)
        assert all(torch.isfinite(value) for value in metrics.values())
    assert all(torch.isfinite(parameter).all() for parameter in student.online.parameters())


def test_distillation_pulls_towards_the_teacher_by_its_coefficient() -> None:
    batch = random_batch()
    teacher = torch.log_softmax(torch.tensor([3.0, 0.0, -3.0]), 0).expand(3, 8, ACTIONS)
    divergences = []
    for m in (0.0, 1.0):
        student = learner(rate=1e-2, cmpo=False, policy_gradient=False)
        for _ in range(30):
            last = student.update(batch, teacher, torch.tensor(m))["distill_loss"]
        divergences.append(last.item())
    assert divergences[1] < 0.3 < divergences[0]


def test_a_resumed_learner_goes_on_bit_for_bit() -> None:
    batches = [random_batch(seed=i) for i in range(6)]
    whole, first, second = learner(), learner(), learner(seed=9)
    for batch in batches[:3]:
        whole.update(batch, None, M)
        first.update(batch, None, M)
    places = [p.data_ptr() for p in (*second.online.parameters(), *second.moment.state_dict().values())]
    second.load_state_dict(first.state_dict())
    assert places == [
        p.data_ptr() for p in (*second.online.parameters(), *second.moment.state_dict().values())
    ]
    for batch in batches[3:]:
        whole.update(batch, None, M)
        second.update(batch, None, M)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole.online), weights(second.online), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights(whole.target), weights(second.target), strict=True))


def test_an_update_reads_nothing_and_keeps_every_address() -> None:
    """On meta tensors every read raises; on the CPU nothing that was captured may be replaced."""
    student = learner(device="meta", num_roots=3, cmpo_samples=4)
    student.update(random_batch().to("meta"), None, torch.ones((), device="meta"))
    student = learner()
    held = [
        *student.online.parameters(),
        *student.target.parameters(),
        *student.moment.state_dict().values(),
    ]
    held += [*student.optimizer._first, *student.optimizer._second, student.optimizer.rate]
    places = [x.data_ptr() for x in held]
    for i in range(3):
        student.update(random_batch(seed=i), None, M)
        student.set_learning_rate(1e-3)
    assert [x.data_ptr() for x in held] == places


def test_settings_out_of_range_are_refused() -> None:
    for name, value in (("unroll_steps", 0), ("cmpo_samples", 0), ("discount", 1.5), ("prior_uniform", -0.1)):
        with pytest.raises(UserError, match=f"muesli.{name}|prior_behaviour and prior_uniform"):
            MuesliConfig(**{name: value})


# ------------------------------------------------------------ it learns


@pytest.mark.parametrize(
    ("core", "low", "high"),
    [(16, 0.85, 1.0), pytest.param(None, 0.3, 0.7, marks=pytest.mark.slow)],
)
def test_a_game_that_needs_memory_is_learnt_with_it_and_not_without(core, low: float, high: float) -> None:
    """The cue is seen at the first step and asked for at the third; guessing is right half the time."""
    student, g, results = learner(core, rate=1e-2), generator(5), []
    for _ in range(260):
        batch, right = play_recall(student, 48, 2, g)
        student.update(batch, None, M)
        results.append(right)
    assert low <= sum(results[-10:]) / 10 <= high


def test_the_return_of_a_won_game_is_its_discounted_reward() -> None:
    student = learner(discount=0.5, trace_lambda=1.0)
    batch, _ = play_recall(student, 4, 2, generator())
    zeros = torch.zeros(4, 3)
    returns = retrace_returns(
        zeros[:, 1:], zeros, batch.reward[:, :-1], 0.5 * ~batch.terminal[:, :-1], torch.ones(4, 2)
    )
    expected = batch.reward[:, 2:3] * torch.tensor([[0.25, 0.5, 1.0]])
    torch.testing.assert_close(returns, expected)
