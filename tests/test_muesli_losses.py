"""Muesli's policy losses and its running scale: plain numpy, rlax, closed forms, finite differences."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.losses import (
    AdvantageMoment,
    advantage_centre,
    advantage_scale,
    cmpo_log_policy,
    cmpo_loss,
    expected_advantage_loss,
    largest_total_variation,
    masked_mean,
    mix_prior,
    one_step_q,
    policy_gradient_loss,
    retrace_returns,
    sample_actions,
    sampled_cmpo_loss,
    sampled_cmpo_weights,
    update_moment,
)

from rlax_oracle import float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed)) * scale


def log_policy(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.log_softmax(normal(*shape, seed=seed, scale=scale), dim=-1)


def actions(*shape: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, size, shape, generator=generator(seed))


# ------------------------------------------------------------ plain numpy


def np_cmpo(prior: np.ndarray, advantage: np.ndarray, clip: float) -> np.ndarray:
    """Hessel et al. 2021, eq. 9, one state at a time."""
    weights = prior * np.exp(np.clip(advantage, -clip, clip))
    return weights / weights.sum(axis=-1, keepdims=True)


def np_sampled_weights(advantage: np.ndarray, clip: float, z_init: float) -> np.ndarray:
    """Eq. 12, sample by sample."""
    out = np.empty_like(advantage)
    for k in range(len(advantage)):
        total = z_init
        for j in range(len(advantage)):
            if j != k:
                total += math.exp(min(max(advantage[j], -clip), clip))
        out[k] = math.exp(min(max(advantage[k], -clip), clip)) / (total / len(advantage))
    return out


# ------------------------------------------------------------ CMPO, exact


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 18), st.floats(0.01, 30), st.floats(0.1, 3), st.integers(0, 999))
def test_cmpo_is_numpys_and_stays_close_to_its_prior(A: int, scale: float, clip: float, seed: int) -> None:
    prior, advantage = log_policy(5, A, seed=seed, scale=scale), normal(5, A, seed=seed + 1, scale=scale)
    found = cmpo_log_policy(prior, advantage, clip).exp()
    np.testing.assert_allclose(found, np_cmpo(prior.exp().numpy(), advantage.numpy(), clip), atol=1e-12)
    distance = (found - prior.exp()).abs().sum(1) / 2
    assert distance.max() <= largest_total_variation(clip) + 1e-12


@pytest.mark.parametrize("clip", [0.1, 1.0, 2.0])
def test_the_bound_on_the_total_variation_is_reached(clip: float) -> None:
    p = 1 / (1 + math.exp(clip))
    prior = torch.tensor([p, 1 - p], dtype=torch.float64).log()
    found = cmpo_log_policy(prior, torch.tensor([1e9, -1e9], dtype=torch.float64), clip).exp()
    assert (found[0] - p).item() == pytest.approx(math.tanh(clip / 2))
    assert largest_total_variation(1.0) == pytest.approx(0.4621, abs=1e-4)


def test_the_bound_holds_for_the_mixture_inside() -> None:
    mixed = mix_prior(log_policy(200, 6, scale=4), log_policy(200, 6, seed=1, scale=4))
    found = cmpo_log_policy(mixed, normal(200, 6, seed=2, scale=100)).exp()
    assert ((found - mixed.exp()).abs().sum(1) / 2).max() <= math.tanh(0.5) + 1e-12


def test_the_mixture_is_numpys_and_a_policy() -> None:
    target, behaviour = log_policy(9, 5, scale=3), log_policy(9, 5, seed=1, scale=3)
    expected = 0.967 * np.exp(target.numpy()) + 0.03 * np.exp(behaviour.numpy()) + 0.003 / 5
    np.testing.assert_allclose(mix_prior(target, behaviour).exp(), expected, rtol=1e-12)
    torch.testing.assert_close(mix_prior(target, behaviour).exp().sum(1), torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(mix_prior(target, behaviour, 0.0, 0.0), target)


def test_no_advantage_leaves_the_prior_and_a_common_one_too() -> None:
    prior = log_policy(4, 3, 6)
    for advantage in (torch.zeros_like(prior), torch.full_like(prior, 0.7), torch.full_like(prior, -50.0)):
        torch.testing.assert_close(cmpo_log_policy(prior, advantage), prior)
    torch.testing.assert_close(
        cmpo_loss(prior, prior), torch.zeros(4, 3, dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_the_loss_has_the_target_first_and_its_gradient_is_the_difference_of_policies() -> None:
    logits, cmpo = normal(5, 4).requires_grad_(), log_policy(5, 4, seed=1)
    loss = cmpo_loss(cmpo, torch.log_softmax(logits, 1))
    p, pi = cmpo.exp().numpy(), torch.softmax(logits.detach(), 1).numpy()
    np.testing.assert_allclose(loss.detach(), (p * np.log(p / pi)).sum(1), rtol=1e-10)
    loss.sum().backward()
    np.testing.assert_allclose(logits.grad, pi - p, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: cmpo_loss(cmpo, torch.log_softmax(x, 1)), logits)


def test_the_exact_loss_is_rlaxs_kl() -> None:
    cmpo, policy = log_policy(6, 5), log_policy(6, 5, seed=1)
    with float64() as rlax:
        expected = rlax.categorical_kl_divergence(cmpo.numpy(), policy.numpy())
    np.testing.assert_allclose(cmpo_loss(cmpo, policy), expected, rtol=1e-9)


def test_an_action_without_prior_stays_without() -> None:
    prior = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64).log()
    cmpo = cmpo_log_policy(prior, torch.tensor([9.0, 0.0, 0.0], dtype=torch.float64))
    assert cmpo.exp().tolist() == pytest.approx([0.0, 0.5, 0.5])
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    cmpo_loss(cmpo, torch.log_softmax(logits, 0)).backward()
    np.testing.assert_allclose(logits.grad, [1 / 3, -1 / 6, -1 / 6], atol=1e-12)


# ------------------------------------------------------------ CMPO, sampled


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.floats(0.1, 4), st.integers(0, 999))
def test_sampled_weights_are_numpys(N: int, z_init: float, seed: int) -> None:
    advantage = normal(3, N, seed=seed, scale=2)
    found = sampled_cmpo_weights(advantage, 1.0, z_init)
    for row, expected in zip(found, advantage.numpy(), strict=True):
        np.testing.assert_allclose(row, np_sampled_weights(expected, 1.0, z_init), rtol=1e-12)


def test_weights_by_hand() -> None:
    # e = 1, 1, e: z_1 = (1 + 1 + e) / 3, z_3 = (1 + 1 + 1) / 3
    found = sampled_cmpo_weights(torch.tensor([0.0, 0.0, 5.0]))
    assert found.tolist() == pytest.approx([3 / (2 + math.e)] * 2 + [math.e])
    assert sampled_cmpo_weights(torch.tensor([0.3])).item() == pytest.approx(math.exp(0.3))
    assert sampled_cmpo_weights(torch.zeros(2, 7)).tolist() == [[1.0] * 7] * 2


def test_the_sampled_loss_is_rlaxs() -> None:
    logits, action, advantage = normal(8, 5), actions(8, 16, size=5), normal(8, 16, seed=1)
    weight = sampled_cmpo_weights(advantage)
    found = sampled_cmpo_loss(torch.log_softmax(logits, 1), action, weight)
    with float64() as rlax:
        import distrax

        distribution = distrax.Categorical(logits=logits.numpy()[None])
        target = rlax.PolicyTarget(actions=action.numpy().T, weights=weight.numpy().T)
        expected = rlax.sampled_policy_distillation_loss(distribution, target)
    np.testing.assert_allclose(found.mean(), expected, rtol=1e-9)


def every_draw(prior: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All A^N draws [draws, N] from a prior [A], with their probabilities [draws]."""
    draws = torch.tensor(list(itertools.product(range(len(prior)), repeat=samples)))
    return draws, prior[draws].prod(dim=1)


def gradient_of_samples(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean gradient of the sampled loss over every possible draw, and the exact one."""
    prior, advantage = log_policy(3, scale=0.5), torch.tensor([0.9, -0.2, -2.0], dtype=torch.float64)
    logits = normal(3, seed=3).requires_grad_()
    draws, probability = every_draw(prior.exp(), samples)
    policy = torch.log_softmax(logits, 0).expand(len(draws), 3)
    loss = sampled_cmpo_loss(policy, draws, sampled_cmpo_weights(advantage[draws]))
    (sampled,) = torch.autograd.grad((probability * loss).sum(), logits)
    exact = cmpo_loss(cmpo_log_policy(prior, advantage), torch.log_softmax(logits, 0))
    return sampled, torch.autograd.grad(exact, logits)[0]


def test_the_expected_sampled_gradient_tends_to_the_exact_one() -> None:
    """Over every possible draw, so without chance: the bias of z_init and of 1 / z falls as 1 / N."""
    errors = []
    for samples in (2, 4, 8):
        sampled, exact = gradient_of_samples(samples)
        errors.append(float((sampled - exact).norm() / exact.norm()))
    assert errors[0] > 1.5 * errors[1] > 2.2 * errors[2]
    assert errors[2] < 0.2


def test_the_gradient_of_many_samples_is_the_exact_one() -> None:
    prior, advantage = log_policy(6), normal(6, seed=1)
    logits = normal(6, seed=2).requires_grad_()
    draws = sample_actions(prior, 200_000, generator())
    weight = sampled_cmpo_weights(advantage[draws])
    loss = sampled_cmpo_loss(torch.log_softmax(logits, 0), draws, weight)
    (sampled,) = torch.autograd.grad(loss, logits)
    exact = torch.autograd.grad(
        cmpo_loss(cmpo_log_policy(prior, advantage), torch.log_softmax(logits, 0)), logits
    )[0]
    # the spread of one sample's gradient is below 3: five standard errors
    torch.testing.assert_close(sampled, exact, rtol=0, atol=5 * 3 / math.sqrt(200_000))


def test_the_sampled_gradient_by_finite_differences() -> None:
    action, weight = actions(3, 7, size=4), sampled_cmpo_weights(normal(3, 7))
    logits = normal(3, 4, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: sampled_cmpo_loss(torch.log_softmax(x, 1), action, weight), logits
    )


def test_actions_are_drawn_from_their_policy_by_the_generator_alone() -> None:
    prior = torch.tensor([0.5, 0.3, 0.2, 0.0]).log()
    before = torch.get_rng_state()
    drawn = sample_actions(prior.expand(2, 3, 4), 20_000, generator())
    assert torch.equal(before, torch.get_rng_state())
    assert drawn.shape == (2, 3, 20_000)
    assert drawn.dtype == torch.int64
    shares = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
    assert shares.tolist() == pytest.approx([0.5, 0.3, 0.2, 0.0], abs=0.007)  # 5 standard errors
    assert shares[3] == 0


# ------------------------------------------------------------ policy gradient


def test_the_policy_gradient_is_rlaxs_with_clipped_weights() -> None:
    logits, action = normal(12, 5).requires_grad_(), actions(12, size=5)
    advantage, behaviour = normal(12, seed=1), log_policy(12, 5, seed=2)
    mu = behaviour.gather(1, action[:, None])[:, 0]
    policy = torch.log_softmax(logits, 1)
    loss = policy_gradient_loss(policy, action, advantage, mu).mean()
    loss.backward()
    pi = policy.detach().gather(1, action[:, None])[:, 0]
    weight = np.minimum(1.0, np.exp(pi.numpy()) / np.exp(mu.numpy()))
    with float64() as rlax:
        import jax

        value, gradient = jax.value_and_grad(rlax.policy_gradient_loss)(
            logits.detach().numpy(), action.numpy(), advantage.numpy(), weight
        )
    np.testing.assert_allclose(loss.item(), value, rtol=1e-9)
    np.testing.assert_allclose(logits.grad, gradient, rtol=1e-9, atol=1e-15)


def test_the_weight_is_a_constant_even_where_the_policy_is_above_the_behaviour() -> None:
    """Through the clamp there would be no gradient at all at pi > mu."""
    logits = torch.tensor([[2.0, 0.0], [-2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    action, mu = torch.zeros(2, dtype=torch.int64), torch.full((2,), math.log(0.5), dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0], dtype=torch.float64)
    policy_gradient_loss(torch.log_softmax(logits, 1), action, advantage, mu).sum().backward()
    pi = torch.softmax(logits.detach(), 1)[:, 0]
    weight = torch.tensor([1.0, float(pi[1] / 0.5)])
    torch.testing.assert_close(logits.grad[:, 0], -weight * (1 - pi))


def test_the_policy_gradient_by_finite_differences_where_the_weight_is_clipped() -> None:
    action, advantage = actions(6, size=4), normal(6)
    logits, mu = normal(6, 4, seed=1).requires_grad_(), torch.full((6,), -50.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: policy_gradient_loss(torch.log_softmax(x, 1), action, advantage, mu), logits
    )


def test_on_policy_it_is_the_gradient_of_the_expected_advantage() -> None:
    """Averaged over actions drawn by the policy itself, and the beta-LOO form has the same mean."""
    logits, advantage = normal(1, 5).requires_grad_(), normal(1, 5, seed=1)
    policy = torch.log_softmax(logits, 1)
    probability = policy.detach().exp()[0]
    every, mu = torch.arange(5), policy.detach()[0]
    losses = policy_gradient_loss(policy.expand(5, 5), every, advantage[0], mu)
    (sampled,) = torch.autograd.grad((probability * losses).sum(), logits, retain_graph=True)
    (whole,) = torch.autograd.grad(expected_advantage_loss(policy, advantage).sum(), logits)
    torch.testing.assert_close(sampled, whole)


def test_leave_one_out_has_the_right_mean_off_policy_where_the_plain_weight_has_not() -> None:
    """With q right and G = q + noise-free: the first half vanishes and the second is the true gradient."""
    logits, q = normal(1, 4).requires_grad_(), normal(1, 4, seed=1)
    policy, behaviour = torch.log_softmax(logits, 1), log_policy(4, seed=2, scale=2)
    every, mu = torch.arange(4), behaviour.exp()

    def mean_gradient(advantage: torch.Tensor) -> torch.Tensor:
        losses = policy_gradient_loss(policy.expand(4, 4), every, advantage, behaviour)
        return torch.autograd.grad((mu * losses).sum(), logits, retain_graph=True)[0]

    (true,) = torch.autograd.grad(-(policy.exp() * q).sum(), logits, retain_graph=True)
    (correction,) = torch.autograd.grad(expected_advantage_loss(policy, q).sum(), logits, retain_graph=True)
    torch.testing.assert_close(mean_gradient(torch.zeros(4, dtype=torch.float64)) + correction, true)
    baseline = (policy.detach().exp() * q).sum()
    assert (mean_gradient(q[0] - baseline) - true).norm() > 0.05 * true.norm()


def test_gradients_of_the_expected_advantage_by_finite_differences() -> None:
    advantage, logits = normal(3, 4), normal(3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: expected_advantage_loss(torch.log_softmax(x, 1), advantage), logits
    )


def test_no_gradient_reaches_targets_advantages_or_weights() -> None:
    policy = log_policy(3, 4).requires_grad_()
    prior, advantage = log_policy(3, 4, seed=1).requires_grad_(), normal(3, 4, seed=2).requires_grad_()
    step, mu = normal(3, seed=3).requires_grad_(), normal(3, seed=4).requires_grad_()
    action, drawn = actions(3, size=4), actions(3, 5, size=4)
    weight = normal(3, 5, seed=5).requires_grad_()
    total = (
        cmpo_loss(cmpo_log_policy(prior, advantage), policy).sum()
        + policy_gradient_loss(policy, action, step, mu).sum()
        + expected_advantage_loss(policy, advantage).sum()
        + sampled_cmpo_loss(policy, drawn, weight).sum()
    )
    total.backward()
    assert policy.grad.abs().sum() > 0
    assert all(x.grad is None for x in (prior, advantage, step, mu, weight))
    assert not sampled_cmpo_weights(advantage).requires_grad


# ------------------------------------------------------------ the running scale


def test_the_moment_is_numpys_and_rlaxs() -> None:
    moment = AdvantageMoment.zero()
    variance, mean, product = 0.0, 0.0, 1.0
    with float64() as rlax:
        import jax.numpy as jnp

        init, update = rlax.create_ema(decay=0.9)
        state = init(jnp.zeros(()))
        for i in range(6):
            error, valid = normal(4, 5, seed=i, scale=1 + i), normal(4, 5, seed=100 + i) > 0
            update_moment(moment, error, valid, 0.9)
            kept = error[valid].numpy()
            variance, product = 0.9 * variance + 0.1 * np.mean(kept**2), product * 0.9
            mean = 0.9 * mean + 0.1 * np.mean(kept)
            np.testing.assert_allclose(advantage_centre(moment), mean / (1 - product), rtol=1e-5, atol=1e-6)
            sigma = advantage_scale(moment, 1e-6)
            np.testing.assert_allclose(sigma, math.sqrt(variance / (1 - product) + 1e-6), rtol=1e-6)
            np.testing.assert_allclose(moment.value, variance, rtol=1e-12)
            _, state = update(jnp.asarray(kept), state)
            # rlax's variance subtracts the squared mean; its second moment does not
            np.testing.assert_allclose(sigma**2 - 1e-6, state.nu / (1 - state.decay_product), rtol=1e-5)
            np.testing.assert_allclose(moment.mean, state.mu, rtol=1e-4, atol=1e-6)
    assert sigma.dtype == torch.float32


def test_the_first_batch_counts_in_full_and_its_mean_is_not_subtracted() -> None:
    moment = AdvantageMoment.zero()
    assert advantage_scale(moment) == 1.0  # before any data
    assert advantage_centre(moment) == 0.0
    update_moment(moment, torch.full((3, 2), 7.0), torch.ones(3, 2, dtype=torch.bool), 0.99)
    assert advantage_scale(moment).item() == pytest.approx(7.0)


def test_a_batch_without_valid_entries_changes_nothing() -> None:
    for filled in (False, True):
        moment = AdvantageMoment.zero()
        if filled:
            update_moment(moment, torch.ones(4), torch.ones(4, dtype=torch.bool), 0.9)
        before = {name: x.clone() for name, x in moment.state_dict().items()}
        update_moment(moment, torch.tensor([torch.nan, 5.0]), torch.zeros(2, dtype=torch.bool), 0.9)
        assert all(torch.equal(before[name], x) for name, x in moment.state_dict().items())
        assert torch.isfinite(advantage_scale(moment))


def test_the_state_stays_where_it_is_and_survives_a_round_trip() -> None:
    moment = AdvantageMoment.zero()
    places = [x.data_ptr() for x in moment.state_dict().values()]
    for i in range(3):
        update_moment(moment, normal(5, seed=i), torch.ones(5, dtype=torch.bool), 0.9)
    other = AdvantageMoment.zero()
    elsewhere = [x.data_ptr() for x in other.state_dict().values()]
    other.load_state_dict({name: x.clone() for name, x in moment.state_dict().items()})
    assert advantage_scale(other) == advantage_scale(moment)
    assert [x.data_ptr() for x in moment.state_dict().values()] == places
    assert [x.data_ptr() for x in other.state_dict().values()] == elsewhere


def test_nothing_is_read_by_the_host() -> None:
    """On meta tensors every read raises: what CUDA could not capture."""
    moment = AdvantageMoment.zero("meta")
    valid = torch.zeros(3, 4, dtype=torch.bool, device="meta")
    x = torch.zeros(3, 4, device="meta")
    update_moment(moment, x, valid, 0.99)
    advantage = x / advantage_scale(moment)
    cmpo = cmpo_log_policy(x, advantage)
    drawn = sample_actions(x, 5)
    loss = cmpo_loss(cmpo, x) + sampled_cmpo_loss(x, drawn, sampled_cmpo_weights(x.gather(1, drawn)))
    assert masked_mean(loss, valid[:, 0]).shape == ()


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_losses_do_not_depend_on_the_scale_of_rewards(factor: float) -> None:
    """The paper's figure 4: values in their own space, advantages normalised, then clipped."""

    def losses(scale: float) -> list[float]:
        moment = AdvantageMoment.zero()
        valid = torch.ones(4, 6, dtype=torch.bool)
        logits, taken = log_policy(4, 6, 3, seed=9), actions(4, 6, size=3)
        out = []
        for i in range(3):
            reward = normal(4, 6, seed=i) * scale
            q = one_step_q(normal(4, 6, 3, seed=i + 10) * scale, normal(4, 6, 3, seed=i + 20) * scale, 0.9)
            v = normal(4, 6, seed=i + 30) * scale
            trace = torch.full((4, 5), 0.9, dtype=torch.float64)
            returns = retrace_returns(q[:, 1:, 0], q.mean(2), reward, torch.full_like(reward, 0.9), trace)
            update_moment(moment, returns - v, valid, 0.9)
            sigma = advantage_scale(moment)
            cmpo = cmpo_log_policy(log_policy(4, 6, 3, seed=8), (q - v[..., None]) / sigma)
            gradient = policy_gradient_loss(logits, taken, (returns - v) / sigma, logits[..., 0])
            out += [cmpo_loss(cmpo, logits).mean().item(), gradient.mean().item()]
        return out

    assert losses(factor) == pytest.approx(losses(1.0), rel=1e-5)


# ------------------------------------------------------------ a known optimum

#: Three states that look the same, as in the paper's figure 2 (with rewards of our own, gamma = 1): from
#: state 0, up leads to 1 and down to 2, for nothing; from there the game ends with these rewards.
ALIASED = {1: {"up": -0.2, "down": 1.0}, 2: {"up": 1.0, "down": -1.0}}
UP, DOWN = 0, 1


def aliased_return(p: float) -> float:
    """Expected return of going up with probability p, whatever the state."""
    behind = {s: p * r["up"] + (1 - p) * r["down"] for s, r in ALIASED.items()}
    return p * behind[1] + (1 - p) * behind[2]


def aliased_games(p: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four games of two steps: actions [4, 2], rewards [4, 2], probabilities [4] at p."""
    action = torch.tensor([[UP, UP], [UP, DOWN], [DOWN, UP], [DOWN, DOWN]])
    last = [ALIASED[1 + int(a)]["up" if b == UP else "down"] for a, b in action]
    reward = torch.tensor([[0.0, r] for r in last], dtype=torch.float64)
    chance = torch.tensor([p, 1 - p], dtype=torch.float64)[action].prod(dim=1)
    return action, reward, chance


def aliased_q(p: float) -> torch.Tensor:
    """What a network that cannot tell the states apart predicts: q [2], averaged over visits at p."""
    action, reward, chance = aliased_games(p)
    returns = reward.flip(1).cumsum(1).flip(1)
    weight = chance[:, None].expand(4, 2)
    return torch.stack(
        [(weight * returns)[action == a].sum() / weight[action == a].sum() for a in (UP, DOWN)]
    )


def test_the_best_memoryless_policy_is_five_eighths_and_q_cannot_tell() -> None:
    grid = np.linspace(0.001, 0.999, 9981)
    assert grid[np.argmax([aliased_return(p) for p in grid])] == pytest.approx(5 / 8, abs=1e-3)
    np.testing.assert_allclose(aliased_q(5 / 8), [0.25, 0.25], atol=1e-12)
    assert aliased_return(0.5) < aliased_return(5 / 8) - 0.02  # a policy made of these equal q-values
    assert max(aliased_return(0.0), aliased_return(1.0)) < aliased_return(5 / 8) - 0.4  # a greedy one


@pytest.mark.parametrize("start", [-2.0, 2.0])
@pytest.mark.parametrize("regularised", [True, False])
def test_the_policy_losses_find_it(start: float, regularised: bool) -> None:
    """All four games at once, weighted by their probability: no chance, only the update's own fixed point."""
    logits = torch.tensor([start, 0.0], dtype=torch.float64, requires_grad=True)
    prior = logits.detach().clone()
    moment = AdvantageMoment.zero()
    optimizer = torch.optim.SGD([logits], lr=0.5)
    for _ in range(250):
        policy = torch.log_softmax(logits, 0)
        p = float(policy[UP].detach().exp())
        action, reward, chance = aliased_games(p)
        q = aliased_q(p)
        ended = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(4, 2)
        v = (policy.detach().exp() * q).sum()
        q_t = reward[:, 1:]  # the model at the second step, if it were right about this game
        returns = retrace_returns(q_t, v.expand(4, 2), reward, ended, torch.ones(4, 1, dtype=torch.float64))
        update_moment(moment, returns - v, torch.ones(4, 2, dtype=torch.bool), 0.9)
        sigma = advantage_scale(moment)
        both = policy.expand(4, 2, 2)
        behaviour = policy.detach()[action]
        loss = (chance[:, None] * policy_gradient_loss(both, action, (returns - v) / sigma, behaviour)).sum()
        if regularised:
            loss = loss + cmpo_loss(cmpo_log_policy(torch.log_softmax(prior, 0), (q - v) / sigma), policy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        prior.lerp_(logits.detach(), 0.1)
    assert torch.softmax(logits.detach(), 0)[UP].item() == pytest.approx(5 / 8, abs=0.01)


# ------------------------------------------------------------ edges


@pytest.mark.parametrize("scale", [0.0, 1e30, -1e30])
@pytest.mark.parametrize("A", [1, 18])
@pytest.mark.parametrize("K", [1, 5])
@pytest.mark.parametrize("ended", [True, False])
def test_nothing_is_nan_for_extreme_rewards_single_actions_short_and_ended_sequences(
    scale, A, K, ended
) -> None:
    reward = torch.full((2, K), scale)
    value = torch.zeros(2, K)
    discount = torch.full((2, K), 0.0 if ended else 0.997)
    returns = retrace_returns(value[:, 1:], value, reward, discount, torch.ones(2, K - 1))
    moment = AdvantageMoment.zero()
    update_moment(moment, returns - value, torch.ones(2, K, dtype=torch.bool), 0.99)
    sigma = advantage_scale(moment)
    logits = torch.zeros(2, K, A, requires_grad=True)
    policy = torch.log_softmax(logits, 2)
    advantage = (one_step_q(reward, value, 0.997)[..., None].expand(2, K, A) - value[..., None]) / sigma
    cmpo = cmpo_log_policy(policy.detach(), advantage)
    zero = torch.zeros(2, K, dtype=torch.int64)
    loss = (
        policy_gradient_loss(policy, zero, (returns - value) / sigma, torch.zeros(2, K))
        + cmpo_loss(cmpo, policy)
        + sampled_cmpo_loss(policy, zero[..., None], sampled_cmpo_weights(advantage[..., :1]))
    ).mean()
    loss.backward()
    assert torch.isfinite(sigma)
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()


ONE, MATRIX = torch.ones(3), torch.ones(3, 2)
INDEX = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cmpo_log_policy(MATRIX, MATRIX[:, :1]), r"advantage must have shape \[3, 2\], got \[3, 1\]"),
        (lambda: cmpo_loss(MATRIX, torch.ones(2)), r"log_policy must have shape \[3, 2\]"),
        (lambda: mix_prior(MATRIX, torch.ones(2)), r"log_behaviour must have shape \[3, 2\]"),
        (lambda: mix_prior(MATRIX, MATRIX, 0.9, 0.2), "sum to at most 1, got 0.9 and 0.2"),
        (lambda: one_step_q(MATRIX, ONE, 0.9), r"value must have shape \[3, 2\]"),
        (
            lambda: policy_gradient_loss(MATRIX, INDEX, MATRIX[:, :1], ONE),
            r"advantage .* \[3\], got \[3, 1\]",
        ),
        (lambda: sampled_cmpo_loss(MATRIX, INDEX[:, None], ONE), r"weight must have shape \[3, 1\]"),
        (lambda: expected_advantage_loss(MATRIX, ONE), r"advantage must have shape \[3, 2\]"),
        (lambda: sample_actions(torch.tensor(1.0), 3), r"log_policy must have shape \[..., A\]"),
        (lambda: update_moment(AdvantageMoment.zero(), ONE, MATRIX > 0, 0.9), r"valid must have shape \[3\]"),
        (lambda: masked_mean(ONE, ONE[:1] > 0), r"mask must have shape \[3\]"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
