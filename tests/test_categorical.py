"""Value transform, two-hot targets and read-out: rlax, closed forms, finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.losses import (
    Support,
    categorical_loss,
    categorical_mean,
    signed_hyperbolic,
    signed_parabolic,
    two_hot,
)

from random_tensors import normal
from rlax_oracle import float64

SUPPORT = Support()
SMALL = Support(limit=3.0, bins=7)
values = st.floats(-5e4, 5e4)


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def magnitudes() -> torch.Tensor:
    """Both signs, from 1e-8 to 1e6."""
    sizes = torch.logspace(-8, 6, 141, dtype=torch.float64)
    return torch.cat([-sizes.flip(0), tensor(0.0), sizes])


# ------------------------------------------------------------ the transform


def test_the_transform_and_its_inverse_are_rlaxs() -> None:
    x = magnitudes()
    with float64() as rlax:
        forward, back = rlax.signed_hyperbolic(x.numpy()), rlax.signed_parabolic(x.numpy())
    # rlax's forms lose digits near 0 by cancellation, even in float64: 1e-9 of the value or of 1e-3
    np.testing.assert_allclose(signed_hyperbolic(x), forward, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(signed_parabolic(x), back, rtol=1e-9, atol=1e-12)


def test_the_transform_by_hand() -> None:
    # sqrt(3 + 1) - 1 + 0.003; the last atom stands for 58,706
    assert signed_hyperbolic(tensor(3.0, -3.0, 0.0)).tolist() == pytest.approx([1.003, -1.003, 0.0])
    assert signed_parabolic(tensor(300.0)).item() == pytest.approx(58_706, abs=0.5)


def test_the_transform_is_odd_increasing_and_inverts() -> None:
    x = magnitudes()
    for function in (signed_hyperbolic, signed_parabolic):
        assert torch.equal(function(-x), -function(x))
        assert (function(x).diff() > 0).all()
    torch.testing.assert_close(signed_parabolic(signed_hyperbolic(x)), x, rtol=1e-12, atol=0)
    torch.testing.assert_close(signed_hyperbolic(signed_parabolic(x)), x, rtol=1e-12, atol=0)


def test_float32_keeps_its_digits_near_zero() -> None:
    """The textbook inverse is off by 3 % at 1e-3 in float32."""
    y = torch.logspace(-6, 2, 50, dtype=torch.float64)
    torch.testing.assert_close(signed_parabolic(y.float()).double(), signed_parabolic(y), rtol=1e-6, atol=0)
    torch.testing.assert_close(signed_hyperbolic(y.float()).double(), signed_hyperbolic(y), rtol=1e-6, atol=0)


def test_gradients_of_the_transform_by_finite_differences_and_at_zero() -> None:
    x = normal(20, scale=30).requires_grad_()
    assert torch.autograd.gradcheck(signed_hyperbolic, x)
    assert torch.autograd.gradcheck(signed_parabolic, x)
    for function, slope in ((signed_hyperbolic, 0.501), (signed_parabolic, 1 / 0.501)):
        zero = tensor(0.0).requires_grad_()
        function(zero).sum().backward()
        assert zero.grad.item() == pytest.approx(slope)


# ------------------------------------------------------------ two-hot


def test_two_hot_by_hand() -> None:
    assert two_hot(tensor(0.25, 3.0, -9.0, -2.0), SMALL).tolist() == [
        [0, 0, 0, 0.75, 0.25, 0, 0],
        [0, 0, 0, 0, 0, 0, 1],
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("support", [SUPPORT, SMALL, Support(20.0, 51)])
def test_two_hot_is_rlaxs(support: Support) -> None:
    x = normal(400, scale=support.limit / 2)
    edges = tensor(-2 * support.limit, -support.limit, 0.0, support.limit, 1.0)
    x = torch.cat([x, edges]).float().double()
    with float64() as rlax:
        expected = rlax.transform_to_2hot(x.numpy(), -support.limit, support.limit, support.bins)
    # rlax adds 1e-5 to a width that is 1 here, or less
    np.testing.assert_allclose(two_hot(x, support), expected, atol=2e-5 / min(1, support.width))
    np.testing.assert_allclose(two_hot(x.float(), support), expected, atol=2e-5 / min(1, support.width))


@settings(max_examples=100, deadline=None)
@given(st.floats(-1000, 1000), st.integers(2, 60), st.floats(0.1, 1000))
def test_two_hot_keeps_the_mean_inside_and_clips_outside(x: float, bins: int, limit: float) -> None:
    support = Support(limit, bins)
    weights = two_hot(tensor(x), support)[0]
    atoms = support.atoms(weights)
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert (weights @ atoms).item() == pytest.approx(min(max(x, -limit), limit), abs=1e-11 * limit)
    assert (weights >= 0).all()
    assert ((weights > 0).sum() <= 2) or weights.sort().values[-3] < 1e-12  # rounding of the atoms
    assert not torch.isnan(weights).any()


def test_two_hot_is_exact_on_every_atom_and_at_the_edges() -> None:
    for dtype in (torch.float32, torch.float64):
        atoms = SUPPORT.atoms(torch.zeros((), dtype=dtype))
        assert torch.equal(two_hot(atoms, SUPPORT), torch.eye(601, dtype=dtype))
    beyond = torch.tensor([1e30, -1e30, torch.inf, -torch.inf])
    assert two_hot(beyond, SUPPORT).argmax(1).tolist() == [600, 0, 600, 0]


def test_float32_two_hot_is_within_rounding_of_float64() -> None:
    """An index computed from (x + 300) would be off by 3e-5."""
    x = (normal(2_000, scale=100)).float()
    error = (two_hot(x, SUPPORT).double() - two_hot(x.double(), SUPPORT)).abs().max()
    assert error < 1e-6


# ------------------------------------------------------------ read-out and loss


def test_the_read_out_is_rlaxs() -> None:
    logits = normal(50, 601, scale=3)
    with float64() as rlax:
        pair = rlax.muzero_pair(-300.0, 300.0, 601, rlax.SIGNED_HYPERBOLIC_PAIR)
        expected = pair.apply_inv(torch.softmax(logits, 1).numpy())
    np.testing.assert_allclose(categorical_mean(logits, SUPPORT), expected, rtol=1e-9)
    np.testing.assert_allclose(categorical_mean(logits.float(), SUPPORT), expected, rtol=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=8))
def test_what_is_written_is_read(numbers: list[float]) -> None:
    y = tensor(*numbers)
    weights = two_hot(signed_hyperbolic(y), SUPPORT)
    torch.testing.assert_close(categorical_mean(weights.log(), SUPPORT), y, rtol=1e-7, atol=1e-7)


def test_the_loss_is_rlaxs_targets_in_a_cross_entropy() -> None:
    logits, target = normal(30, 601), normal(30, seed=1, scale=2_000)
    with float64() as rlax:
        pair = rlax.muzero_pair(-300.0, 300.0, 601, rlax.SIGNED_HYPERBOLIC_PAIR)
        labels = torch.from_numpy(np.array(pair.apply(target.numpy())))
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(categorical_loss(logits, target, SUPPORT), expected, rtol=1e-5, atol=2e-4)


def test_knowing_nothing_costs_ln_601_and_knowing_costs_the_entropy_of_the_target() -> None:
    target = tensor(0.0, 5.3, -100.0, 1e9)
    flat = categorical_loss(torch.zeros(4, 601, dtype=torch.float64), target, SUPPORT)
    assert flat.tolist() == pytest.approx([math.log(601)] * 4)
    assert math.log(601) == pytest.approx(6.3986, abs=1e-4)
    weights = two_hot(signed_hyperbolic(target), SUPPORT)
    known = categorical_loss(weights.clamp(min=1e-300).log(), target, SUPPORT)
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(1)
    torch.testing.assert_close(known, entropy)
    assert known.max() <= math.log(2)
    assert known[0] == known[3] == 0


def test_gradients_of_the_loss_by_finite_differences_and_none_into_the_target() -> None:
    logits, target = normal(2, 3, 7).requires_grad_(), normal(2, 3, seed=2, scale=5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: categorical_loss(x, target, SMALL), logits)
    categorical_loss(logits, target, SMALL).sum().backward()
    assert target.grad is None
    weights = two_hot(signed_hyperbolic(target.detach()), SMALL)
    torch.testing.assert_close(logits.grad, torch.softmax(logits.detach(), 2) - weights)


def test_descending_the_loss_reads_out_the_mean_of_noisy_targets() -> None:
    """Two returns, 0 and 10, seen equally often: in the space of h the read-out is between them."""
    logits = torch.zeros(1, 601, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=1.0)
    target = tensor(0.0, 10.0)
    for _ in range(120):
        optimizer.zero_grad()
        categorical_loss(logits.expand(2, 601), target, SUPPORT).mean().backward()
        optimizer.step()
    middle = signed_parabolic(signed_hyperbolic(target).mean())
    assert categorical_mean(logits, SUPPORT).item() == pytest.approx(middle.item(), rel=0.02)


def test_bfloat16_logits_are_taken_as_float32_and_extreme_targets_stay_finite() -> None:
    logits = normal(6, 601).to(torch.bfloat16)
    target = torch.tensor([0.0, 1e30, -1e30, 3e38, 1e-30, 58_706.0])
    found = categorical_loss(logits, target, SUPPORT)
    assert found.dtype == torch.float32
    assert torch.equal(found, categorical_loss(logits.float(), target, SUPPORT))
    assert torch.isfinite(found).all()
    assert torch.isfinite(categorical_mean(logits * 1000, SUPPORT)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Support(bins=1), "2 bins or more"),
        (lambda: Support(limit=0.0), "a limit above 0"),
        (
            lambda: categorical_loss(torch.ones(3, 7), torch.ones(3, 1), SMALL),
            r"target .* \[3\], got \[3, 1\]",
        ),
        (
            lambda: categorical_loss(torch.ones(3, 6), torch.ones(3), SMALL),
            r"logits .* \[3, 7\], got \[3, 6\]",
        ),
        (lambda: categorical_mean(torch.ones(8), SMALL), r"logits must have shape \[7\]"),
        (lambda: categorical_mean(torch.tensor(1.0), SMALL), r"logits must have shape \[..., bins\]"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
