"""CMPO, exact and sampled: plain numpy, rlax, closed forms, finite differences."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.losses import (
    cmpo_log_policy,
    cmpo_loss,
    largest_total_variation,
    mix_prior,
    sample_actions,
    sampled_cmpo_loss,
    sampled_cmpo_weights,
)

from random_tensors import actions, generator, log_policy, normal
from rlax_oracle import float64

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
