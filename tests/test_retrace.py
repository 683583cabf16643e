"""Retrace: rlax, hand-made numbers, closed forms, and what happens at the ends of games."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.losses import clipped_ratio, retrace_returns, trace_weights

from random_tensors import normal
from rlax_oracle import batched, float64


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sequence(batch: int, steps: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q_t, v_t, r_t, discount_t (with terminals), c_t."""
    going_on = uniform(batch, steps, seed=seed) > 0.2
    return (
        normal(batch, steps - 1, seed=seed + 1),
        normal(batch, steps, seed=seed + 2),
        normal(batch, steps, seed=seed + 3, scale=3),
        going_on * 0.97,
        uniform(batch, steps - 1, seed=seed + 4),
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 29])
def test_returns_are_rlaxs(steps: int) -> None:
    arguments = sequence(16, steps, seed=steps)
    with float64() as rlax:
        expected = batched(rlax.general_off_policy_returns_from_q_and_v, *(x.numpy() for x in arguments))
    np.testing.assert_allclose(retrace_returns(*arguments), expected, rtol=1e-9, atol=1e-12)


def test_returns_from_all_actions_are_rlaxs_with_our_trace_weights() -> None:
    """From q over all actions and two policies to G: the whole of section 4.4's estimator."""
    batch, steps, actions = 7, 12, 5
    q, r = normal(batch, steps, actions), normal(batch, steps, seed=1)
    pi = torch.softmax(normal(batch, steps, actions, seed=2), 2)
    mu = torch.softmax(normal(batch, steps, actions, seed=3), 2)
    taken = torch.randint(0, actions, (batch, steps), generator=torch.Generator().manual_seed(4))
    discount = (uniform(batch, steps, seed=5) > 0.1) * 0.99

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x.gather(2, taken[..., None])[..., 0]

    valid = torch.ones(batch, steps, dtype=torch.bool)
    c = trace_weights(chosen(pi).log(), chosen(mu).log(), valid, 0.95)
    found = retrace_returns(chosen(q)[:, :-1], (pi * q).sum(2), r, discount, c[:, :-1])
    with float64() as rlax:
        expected = batched(
            rlax.general_off_policy_returns_from_action_values,
            *(x.numpy() for x in (q, taken, r, discount, c, pi)),
        )
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_the_error_is_rlaxs_continuous_retrace() -> None:
    q_t, v_t, r_t, discount_t, _ = sequence(8, 6)
    q_tm1, log_rho = normal(8, 6, seed=9), normal(8, 5, seed=10)
    valid = torch.ones(8, 5, dtype=torch.bool)
    c = trace_weights(log_rho, torch.zeros(8, 5, dtype=torch.float64), valid, 0.9)
    found = retrace_returns(q_t, v_t, r_t, discount_t, c) - q_tm1
    with float64() as rlax:
        expected = batched(
            lambda *x: rlax.retrace_continuous(*x, 0.9),
            *(x.numpy() for x in (q_tm1, q_t, v_t, r_t, discount_t, log_rho)),
        )
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_returns_by_hand() -> None:
    q_t, v_t = torch.tensor([[4.0, 1.0]]), torch.tensor([[2.0, 3.0, 10.0]])
    r_t, discount_t = torch.tensor([[1.0, 2.0, -1.0]]), torch.tensor([[0.5, 0.5, 0.5]])
    # last: -1 + 0.5 * 10 = 4; then 2 + 0.5 (3 + 0.5 (4 - 1)) = 4.25; then 1 + 0.5 (2 + 1 (4.25 - 4)) = 2.125
    found = retrace_returns(q_t, v_t, r_t, discount_t, torch.tensor([[1.0, 0.5]]))
    assert found.tolist() == [[2.125, 4.25, 4.0]]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 999))
def test_traces_of_zero_are_one_step_returns_and_of_one_reach_the_end(B: int, K: int, seed: int) -> None:
    q_t, v_t, r_t, discount_t, c_t = sequence(B, K, seed)
    one_step = retrace_returns(q_t, v_t, r_t, discount_t, torch.zeros_like(c_t))
    torch.testing.assert_close(one_step, r_t + discount_t * v_t)
    # on-policy with a deterministic policy V = q of the action taken: a Monte-Carlo return
    on_policy = retrace_returns(v_t[:, :-1], v_t, r_t, discount_t, torch.ones_like(c_t))
    expected = r_t[:, -1] + discount_t[:, -1] * v_t[:, -1]
    for k in range(K - 1, -1, -1):
        if k < K - 1:
            expected = r_t[:, k] + discount_t[:, k] * expected
        torch.testing.assert_close(on_policy[:, k], expected)


def test_a_constant_reward_has_the_geometric_series_as_its_return() -> None:
    """gamma^k, not gamma, k steps away; with the bootstrap at its own fixed point 1 / (1 - gamma)."""
    ones, gamma = torch.ones(1, 40, dtype=torch.float64), 0.9
    q = torch.zeros(1, 39, dtype=torch.float64)
    v = torch.zeros(1, 40, dtype=torch.float64)
    found = retrace_returns(q, v, ones, gamma * ones, torch.ones_like(q))[0]
    torch.testing.assert_close(found, (1 - gamma ** torch.arange(40, 0, -1.0).double()) / (1 - gamma))
    exact = retrace_returns(q + 10, v + 10, ones, gamma * ones, 0.3 * torch.ones_like(q))
    torch.testing.assert_close(exact, 10 * ones)


def test_true_values_are_a_fixed_point_whatever_the_behaviour() -> None:
    """On a random MDP, the mean Retrace return of the true q is q, for lambda and behaviour of any kind."""
    states, actions, gamma = 3, 2, 0.8
    transition = torch.softmax(normal(states, actions, states, scale=2), 2)
    reward = normal(states, actions, seed=1)
    pi = torch.softmax(normal(states, actions, seed=2), 1)
    mu = torch.softmax(normal(states, actions, seed=3), 1)
    onward = torch.einsum("sat,tb->satb", transition, pi).reshape(states * actions, -1)
    q = torch.linalg.solve(torch.eye(states * actions) - gamma * onward, reward.flatten()).reshape(
        states, actions
    )
    # all paths s0 a0 s1 a1 s2 of two steps from one start, with their probabilities under mu
    total = torch.zeros((), dtype=torch.float64)
    v = (pi * q).sum(1)
    for s1 in range(states):
        for a1 in range(actions):
            for s2 in range(states):
                p = transition[0, 1, s1] * mu[s1, a1] * transition[s1, a1, s2]
                c = 0.9 * min(1.0, float(pi[s1, a1] / mu[s1, a1]))
                returns = retrace_returns(
                    q[s1, a1].view(1, 1),
                    torch.stack([v[s1], v[s2]])[None],
                    torch.stack([reward[0, 1], reward[s1, a1]])[None],
                    torch.full((1, 2), gamma, dtype=torch.float64),
                    torch.full((1, 1), c, dtype=torch.float64),
                )
                total += p * returns[0, 0]
    torch.testing.assert_close(total, q[0, 1], rtol=1e-12, atol=1e-12)


def test_a_terminal_cuts_bootstrap_and_trace_and_a_time_limit_cuts_the_trace_alone() -> None:
    """Rows: s0 -> s1 (ends), s1's row has no action, s2 opens the next game."""
    q, v = torch.tensor([[0.0, 50.0, 5.0]]), torch.tensor([[70.0, 6.0, 8.0]])
    reward = torch.tensor([[1.0, 0.0, 2.0]])
    log_pi = torch.zeros(1, 3)
    valid = torch.tensor([[True, False, True]])
    c = trace_weights(log_pi, log_pi, valid, 1.0)
    assert c.tolist() == [[1.0, 0.0, 1.0]]
    limit = retrace_returns(q[:, 1:], v, reward, torch.tensor([[0.5, 0.5, 0.5]]), c[:, 1:])
    assert limit[0, 0] == 1 + 0.5 * 70  # bootstraps from the last observation, nothing from the next game
    terminal = retrace_returns(q[:, 1:], v, reward, torch.tensor([[0.0, 0.5, 0.5]]), c[:, 1:])
    assert terminal[0, 0] == 1
    assert limit[0, 2] == terminal[0, 2] == 2 + 0.5 * 8
    for other in (1e6, -1e6):  # what is predicted for the row without an action is irrelevant to the others
        changed = torch.tensor([[other, 5.0]])
        assert retrace_returns(changed, v, reward, torch.full((1, 3), 0.5), c[:, 1:])[0, 0] == limit[0, 0]


def test_weights_are_clipped_at_one_by_numpy() -> None:
    log_pi, log_mu = normal(300, scale=3), normal(300, seed=1, scale=3)
    expected = np.minimum(1.0, np.exp(log_pi.numpy()) / np.exp(log_mu.numpy()))
    np.testing.assert_allclose(clipped_ratio(log_pi, log_mu), expected, rtol=1e-12)
    valid = torch.arange(300).reshape(20, 15) % 3 > 0
    traces = trace_weights(log_pi.reshape(20, 15), log_mu.reshape(20, 15), valid, 0.7)
    np.testing.assert_allclose(traces, 0.7 * expected.reshape(20, 15) * valid.numpy(), rtol=1e-12)


def test_weights_never_overflow_and_traces_never_grow() -> None:
    far = torch.tensor([500.0, -500.0, 0.0, -torch.inf])
    assert clipped_ratio(far, torch.zeros(4)).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert clipped_ratio(torch.zeros(1), torch.tensor([-torch.inf])).tolist() == [1.0]
    c = trace_weights(normal(50, 9), normal(50, 9, seed=1), torch.ones(50, 9, dtype=torch.bool), 0.95)
    assert ((c >= 0) & (c <= 0.95)).all()


def test_nothing_here_has_a_gradient() -> None:
    arguments = [x.requires_grad_() for x in sequence(3, 4)]
    log_pi = normal(3, 4).requires_grad_()
    assert not retrace_returns(*arguments).requires_grad
    assert not clipped_ratio(log_pi, log_pi * 2).requires_grad
    assert not trace_weights(log_pi, log_pi * 2, torch.ones(3, 4, dtype=torch.bool), 0.9).requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r_t": torch.ones(2)}, r"r_t must have shape \[B, K\]"),
        ({"r_t": torch.ones(2, 0)}, "at least one step"),
        ({"v_t": torch.ones(2, 2)}, r"v_t must have shape \[2, 3\], got \[2, 2\]"),
        ({"q_t": torch.ones(2, 3)}, r"q_t must have shape \[2, 2\]"),
        ({"c_t": torch.ones(2, 3)}, r"c_t must have shape \[2, 2\]"),
        ({"discount_t": torch.ones(2, 1)}, r"discount_t must have shape \[2, 3\]"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    names = ("q_t", "v_t", "r_t", "discount_t", "c_t")
    arguments = dict(zip(names, sequence(2, 3), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        retrace_returns(**arguments)


def test_weights_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"log_mu must have shape \[3\]"):
        clipped_ratio(torch.ones(3), torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"valid must have shape \[3, 2\]"):
        trace_weights(torch.ones(3, 2), torch.ones(3, 2), torch.ones(3, dtype=torch.bool), 1.0)
