"""Muesli's policy losses together: the scale of rewards, a known optimum, and edges."""

import numpy as np
import pytest
import torch

from reincarnate.losses import (
    AdvantageMoment,
    advantage_scale,
    cmpo_log_policy,
    cmpo_loss,
    expected_advantage_loss,
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

from random_tensors import actions, log_policy, normal


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
