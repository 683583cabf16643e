"""What the model learns at the ends of games: hand-made sequences and a slow reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.losses import action_windows, later, masked_mean, state_windows, unroll_targets, value_target


def bools(*rows: str) -> torch.Tensor:
    """``"110"`` -> [[True, True, False]]."""
    return torch.tensor([[c == "1" for c in row] for row in rows])


def slow(reward, value, valid, terminal, truncated, steps):
    """One root and one step at a time, by following the game."""
    B, T = reward.shape
    out = {
        name: np.zeros((B, T, steps))
        for name in ("reward", "reward_mask", "value", "value_mask", "policy_mask")
    }
    for b in range(B):
        for t in range(T):
            at, over = t, False  # the row of the current state; over: absorbed
            for k in range(steps):
                if over:
                    out["reward_mask"][b, t, k] = out["value_mask"][b, t, k] = 1
                    continue
                if at is None or at >= T or not valid[b, at]:
                    at = None
                    continue
                out["reward"][b, t, k], out["reward_mask"][b, t, k] = reward[b, at], 1
                if terminal[b, at]:
                    over = True
                    out["value_mask"][b, t, k] = 1
                    continue
                at = None if truncated[b, at] or at + 1 >= T or not valid[b, at + 1] else at + 1
                if at is not None:
                    out["value"][b, t, k] = value[b, at]
                    out["value_mask"][b, t, k] = out["policy_mask"][b, t, k] = 1
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 7), st.integers(0, 9999))
def test_targets_are_what_following_the_game_gives(B: int, T: int, K: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    reward, value = rng.normal(size=(B, T)), rng.normal(size=(B, T))
    valid, terminal = rng.random((B, T)) > 0.2, rng.random((B, T)) < 0.2
    truncated = (rng.random((B, T)) < 0.2) & ~terminal
    arguments = (reward, value, valid, terminal, truncated)
    found = unroll_targets(*(torch.from_numpy(x) for x in arguments), K)
    for name, expected in slow(*arguments, K).items():
        np.testing.assert_array_equal(getattr(found, name).numpy(), expected, err_msg=name)


def test_a_game_that_ends_is_absorbing_and_one_that_is_cut_off_is_unknown() -> None:
    """Rows: two steps, the last ends the game; the row of the final observation; the next game's first."""
    reward, value = torch.tensor([[1.0, 2.0, 9.0, 4.0]]), torch.tensor([[10.0, 20.0, 90.0, 40.0]])
    valid, none = bools("1101"), bools("0000")
    over = unroll_targets(reward, value, valid, bools("0100"), none, 3)
    assert over.reward[0, 0].tolist() == [1.0, 2.0, 0.0]
    assert over.reward_mask[0, 0].tolist() == [True, True, True]
    assert over.value[0, 0].tolist() == [20.0, 0.0, 0.0]
    assert over.value_mask[0, 0].tolist() == [True, True, True]
    assert over.policy_mask[0, 0].tolist() == [True, False, False]
    cut = unroll_targets(reward, value, valid, none, bools("0100"), 3)
    assert cut.reward[0, 0].tolist() == [1.0, 2.0, 0.0]
    assert cut.reward_mask[0, 0].tolist() == [True, True, False]
    assert cut.value_mask[0, 0].tolist() == [True, False, False]
    for found in (over, cut):  # the row without an action is no root, and the last one knows its reward alone
        assert not (found.reward_mask | found.value_mask | found.policy_mask)[0, 2].any()
        assert found.reward_mask[0, 3].tolist() == [True, False, False]
        assert not found.value_mask[0, 3].any()


def test_nothing_crosses_from_one_game_into_the_next() -> None:
    """Whatever the next game holds, targets of the first one stay."""
    base = torch.zeros(1, 8)
    valid, terminal = bools("11101111"), bools("00100000")
    first = unroll_targets(base, base, valid, terminal, bools("00000000"), 5)
    other = torch.where(torch.arange(8) > 3, 1e6, 0.0)[None]
    second = unroll_targets(other, other, valid, terminal, bools("00000000"), 5)
    assert torch.equal(first.reward[:, :3], second.reward[:, :3])
    assert torch.equal(first.value[:, :3], second.value[:, :3])


def test_windows_by_hand() -> None:
    x = torch.tensor([[1, 2, 3]])
    assert later(x, 1).tolist() == [[2, 3, 0]]
    assert later(x, 5).tolist() == [[0, 0, 0]]
    assert action_windows(x, 2).tolist() == [[[1, 2], [2, 3], [3, 1]]]
    assert state_windows(x, 2).tolist() == [[[2, 3], [3, 0], [0, 0]]]
    assert state_windows(torch.ones(2, 3, 4), 5).shape == (2, 3, 5, 4)


def test_value_targets_by_hand() -> None:
    returns, value = torch.tensor([10.0, 10.0]), torch.tensor([4.0, 4.0])
    log_pi, log_mu = torch.tensor([0.1, 0.9]).log(), torch.tensor([0.2, 0.3]).log()
    assert value_target(returns, value, log_pi, log_mu).tolist() == [10.0, 10.0]
    # pi / mu = 1/2, and 3 clipped to 1
    assert value_target(returns, value, log_pi, log_mu, "clipped_rho").tolist() == pytest.approx([7.0, 10.0])


def test_clipped_rho_has_the_policys_value_as_its_mean_where_no_weight_is_clipped() -> None:
    """E_mu[v + pi/mu (q - v)] = sum pi q; the plain return has the behaviour's."""
    pi, mu = torch.tensor([0.3, 0.3, 0.4]), torch.tensor([0.35, 0.25, 0.4])
    q, v = torch.tensor([1.0, -2.0, 5.0]), torch.tensor(0.0).expand(3)
    mixed = value_target(q, v, (pi.clamp(max=mu) / mu).log() + mu.log(), mu.log(), "clipped_rho")
    assert (mu * mixed).sum().item() == pytest.approx(float((pi.clamp(max=mu) * q).sum()), rel=1e-6)
    assert (mu * value_target(q, v, pi.log(), mu.log())).sum().item() == pytest.approx(float((mu * q).sum()))


def test_means_count_valid_entries_and_forget_the_others() -> None:
    x = torch.tensor([1.0, torch.nan, 3.0, torch.inf], requires_grad=True)
    mean = masked_mean(x, torch.tensor([True, False, True, False]))
    assert mean.item() == 2.0
    mean.backward()
    assert x.grad.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert masked_mean(x, torch.zeros(4, dtype=torch.bool)).item() == 0.0


def test_targets_have_no_gradient() -> None:
    x = torch.ones(1, 3, requires_grad=True)
    found = unroll_targets(x, x, bools("111"), bools("000"), bools("000"), 2)
    assert not found.reward.requires_grad
    assert not found.value.requires_grad
    for kind in ("returns", "clipped_rho"):
        assert not value_target(x, x, x, x, kind).requires_grad


def test_nothing_is_read_by_the_host() -> None:
    x, flags = torch.zeros(2, 6, device="meta"), torch.zeros(2, 6, dtype=torch.bool, device="meta")
    assert unroll_targets(x, x, flags, flags, flags, 5).value.shape == (2, 6, 5)
    assert action_windows(flags.long(), 5).shape == (2, 6, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, f: unroll_targets(x, x[:, :2], f, f, f, 2),
            r"value must have shape \[1, 3\], got \[1, 2\]",
        ),
        (lambda x, f: unroll_targets(x, x, f[0], f, f, 2), r"valid must have shape \[1, 3\]"),
        (lambda x, f: unroll_targets(x, x, f, f, f, 0), "at least 1 step, got 0"),
        (lambda x, f: value_target(x, x[0], x, x), r"value must have shape \[1, 3\]"),
        (lambda x, f: value_target(x, x, x, x, "mean"), "returns or clipped_rho"),
    ],
)
def test_what_does_not_fit_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(1, 3), bools("111"))
