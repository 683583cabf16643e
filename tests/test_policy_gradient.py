"""Muesli's policy gradient: rlax, finite differences, and what no gradient reaches."""

import math

import numpy as np
import torch

from reincarnate.losses import (
    cmpo_log_policy,
    cmpo_loss,
    expected_advantage_loss,
    policy_gradient_loss,
    sampled_cmpo_loss,
    sampled_cmpo_weights,
)

from random_tensors import actions, log_policy, normal
from rlax_oracle import float64


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
