"""Muesli's loss put together again row by row, with every weight another, and what each switch changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_muesli_learner import losses_of

from reincarnate.losses import categorical_loss
from reincarnate.students.muesli.objective import distillation

from muesli_games import ACTIONS, SUPPORT, generator, learner, random_batch

K = 3
WEIGHTS = {"policy_weight": 2.0, "cmpo_weight": 5.0, "value_weight": 0.3, "reward_weight": 0.7}
SETTINGS = {"unroll_steps": K, "prior_behaviour": 0.2, "prior_uniform": 0.1, "num_roots": None}


@pytest.fixture
def student():
    made = learner(**SETTINGS, **WEIGHTS)
    with torch.no_grad():  # online and target network are two
        for parameter in made.online.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator(5)))
    return made


def reference(student, batch, targets, prior) -> dict[str, float]:
    """Every term by its formula, a row at a time; returns and sigma as given (tested by themselves)."""
    with torch.no_grad():
        root = student.online(batch.obs, batch.state, batch.game_start)
        pi = torch.softmax(root.policy_logits, dim=2).double().numpy()
    mu = batch.behaviour_log_policy.exp().double().numpy()
    target_pi, q, v = prior.log_policy.exp().double().numpy(), prior.q.numpy(), prior.value.numpy()
    sigma, G = float(targets.sigma), targets.returns.numpy()
    mixed = 0.7 * target_pi + 0.2 * mu + 0.1 / ACTIONS
    cmpo = mixed * np.exp(np.clip((q - v[..., None]) / sigma, -1, 1))
    cmpo /= cmpo.sum(axis=2, keepdims=True)

    def divergence(p, log_policy) -> float:
        return float((p * (np.log(p) - log_policy)).sum())

    terms: dict[str, list[float]] = {name: [] for name in ("pg", "cmpo", "model", "value", "reward")}
    B, T = batch.action.shape

    def cross_entropy(logits, value) -> float:
        return float(categorical_loss(logits, torch.tensor(float(value)), SUPPORT))

    for b in range(B):
        for t in range(T - 1):
            if not batch.executed[b, t]:
                continue
            a = int(batch.action[b, t])
            rho = min(1.0, pi[b, t, a] / mu[b, t, a])
            terms["pg"].append(-rho * (G[b, t] - v[b, t]) / sigma * np.log(pi[b, t, a]))
            terms["cmpo"].append(divergence(cmpo[b, t], np.log(pi[b, t])))
            terms["value"].append(cross_entropy(root.value_logits[b, t], G[b, t]))
            _model_terms(student, batch, root, cmpo, G, (b, t), terms, divergence, cross_entropy)
    return {name: float(np.mean(values)) for name, values in terms.items()}


def _model_terms(student, batch, root, cmpo, G, at, terms, divergence, cross_entropy) -> None:
    """The K steps from one root, until its game is cut or the sequence ends."""
    (b, t), T = at, batch.action.shape[1]
    window = [int(batch.action[b, min(t + k, T - 2)]) for k in range(K)]
    with torch.no_grad():
        out = student.online.unroll(root.features[b, t][None], torch.tensor([window]))
    over = False  # past a terminal: reward 0, value 0
    for k in range(K):  # the step from t + k
        if not over:
            if t + k > T - 2 or not batch.executed[b, t + k]:
                return
            terms["reward"].append(cross_entropy(out.reward_logits[0, k], batch.reward[b, t + k]))
            if batch.truncated[b, t + k]:
                return
            over = bool(batch.terminal[b, t + k])
        else:
            terms["reward"].append(cross_entropy(out.reward_logits[0, k], 0.0))
        if over:
            terms["value"].append(cross_entropy(out.value_logits[0, k], 0.0))
        elif t + k + 1 <= T - 2:
            log_policy = torch.log_softmax(out.policy_logits[0, k].double(), dim=0).numpy()
            terms["model"].append(divergence(cmpo[b, t + k + 1], log_policy))
            terms["value"].append(cross_entropy(out.value_logits[0, k], G[b, t + k + 1]))


def test_the_loss_is_its_terms_row_by_row_each_with_its_weight(student) -> None:
    batch = random_batch(B=4, T=9)
    losses, targets, prior = losses_of(student, batch)
    expected = reference(student, batch, targets, prior)
    found = {
        "pg": losses.policy_gradient,
        "cmpo": losses.cmpo,
        "model": losses.model_policy,
        "value": losses.value,
        "reward": losses.reward,
    }
    for name, value in found.items():
        assert value.item() == pytest.approx(expected[name], rel=2e-4), name
    total = 2.0 * (expected["pg"] + 5.0 * expected["cmpo"] + expected["model"])
    total += 0.3 * expected["value"] + 0.7 * expected["reward"]
    assert losses.total(student._settings).item() == pytest.approx(total, rel=2e-4)
    assert targets.value is not prior.value
    assert torch.equal(targets.value, targets.returns)


def test_an_update_minimises_that_sum(student) -> None:
    """The learner's own ``loss`` is the sum of its logged terms, each with its weight."""
    metrics = student.update(random_batch(), None, torch.ones(()))
    policy = metrics["policy_gradient_loss"] + 5.0 * metrics["cmpo_loss"] + metrics["model_policy_loss"]
    total = 2.0 * policy + 0.3 * metrics["value_loss"] + 0.7 * metrics["reward_loss"]
    torch.testing.assert_close(metrics["loss"], total)


def test_advantages_that_are_not_normalised_are_plain_differences(student) -> None:
    batch = random_batch()
    _, targets, prior = losses_of(student, batch, normalise_advantage=False)
    torch.testing.assert_close(targets.step_advantage, targets.returns - prior.value[:, :-1])
    torch.testing.assert_close(targets.advantage, prior.q - prior.value[..., None])


def test_leave_one_out_subtracts_the_models_q_of_the_action_taken(student) -> None:
    batch = random_batch()
    _, targets, prior = losses_of(student, batch, leave_one_out=True)
    taken = prior.q.gather(2, batch.action[..., None])[:, :-1, 0]
    torch.testing.assert_close(targets.step_advantage, (targets.returns - taken) / targets.sigma)


@pytest.mark.parametrize("clip", [0.05, None])
def test_the_clip_bounds_what_cmpo_asks_for(student, clip: float | None) -> None:
    batch = random_batch()
    _, targets, prior = losses_of(student, batch, cmpo_clip=clip)
    mixed = torch.log(0.7 * prior.log_policy.exp() + 0.2 * batch.behaviour_log_policy.exp() + 0.1 / ACTIONS)
    wanted = targets.advantage if clip is None else targets.advantage.clamp(-clip, clip)
    torch.testing.assert_close(targets.cmpo, torch.log_softmax(mixed + wanted, dim=2))
    assert targets.advantage.abs().max() > 0.05


def test_fewer_roots_leave_the_terms_of_the_roots_and_thin_the_models(student) -> None:
    batch = random_batch(B=4, T=9)
    every, _, _ = losses_of(student, batch)
    few, _, _ = losses_of(student, batch, num_roots=2)
    assert torch.equal(every.policy_gradient, few.policy_gradient)
    assert torch.equal(every.cmpo, few.cmpo)
    for name in ("model_policy", "reward"):
        assert not torch.isclose(getattr(every, name), getattr(few, name)), name
    seen: list[int] = []
    unroll = type(student.online).unroll
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(student.online),
            "unroll",
            lambda network, features, actions: (
                seen.append(len(features)) or unroll(network, features, actions)
            ),
        )
        losses_of(student, batch, num_roots=2)
    assert seen == [4 * 2]


def test_distillation_counts_the_rows_with_an_action_alone(student) -> None:
    batch = random_batch(B=4, T=9)
    assert not batch.executed.all()
    teacher = torch.log_softmax(torch.randn(4, 9, ACTIONS, generator=generator(3)), dim=2)
    root = student.online(batch.obs, batch.state, batch.game_start)
    log_policy = torch.log_softmax(root.policy_logits, dim=2)
    rows = (teacher.exp() * (teacher - log_policy)).sum(dim=2)[batch.executed]
    torch.testing.assert_close(distillation(teacher, root, batch), rows.mean())


def test_a_sequence_is_learnt_from_the_state_that_is_stored_with_it() -> None:
    batch = random_batch()
    assert batch.state is not None
    other = dataclasses.replace(batch, state=batch.state + 1.0)
    # The online network's alone: the target network has a state of its own to start from.
    found = [
        learner(**SETTINGS).update(each, None, torch.ones(()))["entropy"] for each in (batch, batch, other)
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.isclose(found[0], found[2])
