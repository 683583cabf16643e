"""Losses: hand-made numbers, independent oracles, gradients by finite differences."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from reincarnate.losses import kl, log_policy, q_targets, td_loss

from random_tensors import normal


def test_targets_by_hand() -> None:
    reward, discount = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0.9, 0.0, 0.5])
    next_q = torch.tensor([[1.0, 3.0], [50.0, 60.0], [-4.0, -2.0]])
    # 1 + 0.9 * 3; a terminal cuts the bootstrap off; -1 + 0.5 * (-2)
    torch.testing.assert_close(q_targets(reward, discount, next_q), torch.tensor([3.7, 2.0, -2.0]))


def test_double_q_chooses_with_one_network_and_values_with_the_other() -> None:
    reward, discount = torch.zeros(2), torch.ones(2)
    next_q = torch.tensor([[1.0, 3.0], [5.0, 4.0]])
    selector_q = torch.tensor([[9.0, 8.0], [0.0, 0.1]])
    assert q_targets(reward, discount, next_q, selector_q).tolist() == [1.0, 4.0]
    assert torch.equal(q_targets(reward, discount, next_q, next_q), q_targets(reward, discount, next_q))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 999))
def test_targets_are_what_a_loop_computes_and_double_q_is_never_larger(B: int, A: int, seed: int) -> None:
    reward, discount, next_q = (
        normal(B, seed=seed),
        normal(B, seed=seed + 1).abs(),
        normal(B, A, seed=seed + 2),
    )
    selector_q = normal(B, A, seed=seed + 3)
    found, double = q_targets(reward, discount, next_q), q_targets(reward, discount, next_q, selector_q)
    for i in range(B):
        assert found[i].item() == pytest.approx(float(reward[i] + discount[i] * max(next_q[i])))
        chosen = int(np.argmax(selector_q[i].numpy()))
        assert double[i].item() == pytest.approx(float(reward[i] + discount[i] * next_q[i, chosen]))
    assert (double <= found + 1e-12).all()


def test_td_losses_by_hand() -> None:
    q = torch.tensor([[0.5, 9.0], [9.0, 3.0], [-3.0, 9.0], [1.0, 9.0]])
    action, target = torch.tensor([0, 1, 0, 0]), torch.tensor([0.0, 0.0, 0.0, 0.0])
    assert td_loss(q, action, target).tolist() == [0.125, 2.5, 2.5, 0.5]
    assert td_loss(q, action, target, "mse").tolist() == [0.25, 9.0, 9.0, 1.0]


def test_huber_is_scipys_and_its_gradient_is_the_clipped_error() -> None:
    q, action, target = normal(200, 3).mul(3).requires_grad_(), torch.arange(200) % 3, normal(200, seed=1)
    losses = td_loss(q, action, target)
    error = q.detach()[torch.arange(200), action] - target
    np.testing.assert_allclose(losses.detach().numpy(), special.huber(1.0, error.numpy()))
    losses.sum().backward()
    expected = torch.zeros(200, 3, dtype=torch.float64)
    expected[torch.arange(200), action] = error.clamp(-1, 1)
    torch.testing.assert_close(q.grad, expected)


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_td_gradients_by_finite_differences(kind) -> None:
    q, action, target = normal(7, 4).mul(2).requires_grad_(), torch.arange(7) % 4, normal(7, seed=5)
    assert torch.autograd.gradcheck(lambda x: td_loss(x, action, target, kind), q)


def test_a_policy_is_the_softmax_at_its_temperature() -> None:
    outputs = torch.tensor([[1.0, 1.2, 0.9]])
    # at 0.1: exp(0), exp(2), exp(-1)
    weights = np.exp([0.0, 2.0, -1.0])
    np.testing.assert_allclose(log_policy(outputs, 0.1).exp()[0], weights / weights.sum(), rtol=1e-5)
    wide = normal(5, 6)
    np.testing.assert_allclose(log_policy(wide, 0.7), special.log_softmax(wide.numpy() / 0.7, axis=1))


def test_a_policy_of_bfloat16_outputs_is_computed_in_float32() -> None:
    outputs = normal(4, 18).mul(5).to(torch.bfloat16)
    found = log_policy(outputs, 0.1)
    assert found.dtype == torch.float32
    assert torch.equal(found, log_policy(outputs.float(), 0.1))


def test_kl_by_hand_and_it_is_not_symmetric() -> None:
    teacher, student = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    forward = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    backward = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    assert kl(teacher, student).item() == pytest.approx(forward, rel=1e-6)
    assert kl(student, teacher).item() == pytest.approx(backward, rel=1e-6)
    assert abs(forward - backward) > 0.1


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 18), st.floats(0.1, 5), st.integers(0, 999))
def test_kl_is_that_of_scipy_and_torch_never_negative_and_zero_for_equals(B, A, scale, seed) -> None:
    teacher = log_policy(normal(B, A, seed=seed), 1 / scale)
    student = log_policy(normal(B, A, seed=seed + 1), 1 / scale)
    found = kl(teacher, student)
    assert found.shape == (B,)
    np.testing.assert_allclose(found, stats.entropy(teacher.exp(), student.exp(), axis=1), atol=1e-12)
    per_action = F.kl_div(student, teacher, reduction="none", log_target=True)
    torch.testing.assert_close(found, per_action.sum(1))
    assert (found >= -1e-12).all()
    assert (kl(teacher, teacher) == 0).all()
    if A > 1:
        assert (found > 0).all()


def test_an_action_that_the_teacher_never_takes_costs_nothing() -> None:
    teacher = torch.tensor([[0.5, 0.5, 0.0]]).log()
    student = torch.tensor([[0.25, 0.25, 0.5]]).log().requires_grad_()
    loss = kl(teacher, student)
    assert loss.item() == pytest.approx(np.log(2))
    loss.sum().backward()
    assert student.grad.tolist() == [[-0.5, -0.5, 0.0]]


def test_kl_gradients_by_finite_differences_and_in_closed_form() -> None:
    teacher, outputs = log_policy(normal(5, 4), 0.1), normal(5, 4, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl(teacher, log_policy(x, 0.3)), outputs)
    kl(teacher, log_policy(outputs, 0.3)).sum().backward()
    student = log_policy(outputs.detach(), 0.3).exp()
    torch.testing.assert_close(outputs.grad, (student - teacher.exp()) / 0.3)


def test_minimising_it_raises_what_the_teacher_likes() -> None:
    """The sign trap: ``+ sum pi_T log pi`` as a loss would push the other way."""
    teacher = torch.tensor([[0.8, 0.1, 0.1]], dtype=torch.float64).log()
    outputs = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    before = kl(teacher, log_policy(outputs, 1.0))
    before.sum().backward()
    with torch.no_grad():
        outputs -= 0.1 * outputs.grad
    assert outputs.argmax() == 0
    assert outputs[0, 0] > 0 > outputs[0, 1]
    assert kl(teacher, log_policy(outputs.detach(), 1.0)) < before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: q_targets(torch.ones(3, 1), torch.ones(3), torch.ones(3, 2)),
            r"reward must have shape \[3\]",
        ),
        (lambda: q_targets(torch.ones(3), torch.ones(2), torch.ones(3, 2)), r"discount .* \[3\], got \[2\]"),
        (lambda: q_targets(torch.ones(3), torch.ones(3), torch.ones(3)), r"next_q must have shape \[B, A\]"),
        (
            lambda: q_targets(torch.ones(3), torch.ones(3), torch.ones(3, 2), torch.ones(3, 4)),
            r"selector_q must have shape \[3, 2\], got \[3, 4\]",
        ),
        (lambda: td_loss(torch.ones(3, 2), torch.zeros(3, 1).long(), torch.ones(3)), r"action .* \[3\]"),
        (lambda: td_loss(torch.ones(3, 2), torch.zeros(3).long(), torch.ones(3, 1)), r"target .* \[3, 1\]"),
        (lambda: td_loss(torch.ones(3, 2), torch.zeros(3).long(), torch.ones(3), "l1"), "huber or mse"),
        (lambda: kl(torch.ones(3, 2), torch.ones(3, 1)), r"student_log_policy must have shape \[3, 2\]"),
        (lambda: kl(torch.ones(3), torch.ones(3)), r"teacher_log_policy must have shape \[B, A\]"),
        (lambda: log_policy(torch.ones(3), 1.0), r"outputs must have shape \[B, A\]"),
        (lambda: log_policy(torch.ones(3, 2), 0.0), "temperature must be greater than 0"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
