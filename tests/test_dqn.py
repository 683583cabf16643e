"""DQN against a plain second implementation."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from reincarnate.acting import ActRule
from reincarnate.config import RunConfig
from reincarnate.losses import kl, log_policy
from reincarnate.types import Batch

from student_cases import (
    ATARI,
    SPECS,
    VECTOR,
    advice,
    batch_of,
    build,
    config,
    same,
    train,
    weights,
)


def plain_training(learner, settings: RunConfig, batches: list[Batch], m: float) -> dict[str, torch.Tensor]:
    """The same updates by a second implementation: loops over the batch, PyTorch's plain Adam."""
    online, target = copy.deepcopy(learner.network), copy.deepcopy(learner.target)
    rates = settings.optimizer
    adam = torch.optim.Adam(
        online.parameters(), lr=rates.learning_rate, eps=rates.adam_eps, foreach=False, fused=False
    )
    for batch in batches:
        with torch.no_grad():
            next_target, next_online = target(batch.next_obs), online(batch.next_obs)
        outputs, terms = online(batch.obs), []
        for i in range(len(outputs)):
            best = (next_online if settings.td.double_q else next_target)[i].argmax()
            error = outputs[i, batch.action[i]] - (batch.reward[i] + batch.discount[i] * next_target[i, best])
            terms.append(error**2 if settings.td.loss == "mse" else
                         0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5)  # fmt: skip
        teacher = log_policy(batch.teacher_outputs, 0.5)
        student_ = F.log_softmax(outputs / settings.distill.student_temperature, dim=1)
        divergence = F.kl_div(student_, teacher, reduction="batchmean", log_target=True)
        loss = torch.stack(terms).mean() + settings.distill.coefficient * m * divergence
        adam.zero_grad()
        loss.backward()
        adam.step()
    return weights(online)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(
    ("loss", "double_q", "m"), [("huber", False, 0.7), ("mse", True, 0.7), ("huber", True, 0.0)]
)
def test_updates_are_those_of_a_plain_implementation(kind: str, loss: str, double_q: bool, m: float) -> None:
    settings = {"td__loss": loss, "td__double_q": double_q}
    learner, spec = build(kind=kind, **settings), SPECS[kind]
    train(learner, spec, 1, m=0.5)  # so that online and target differ
    fresh = build(kind=kind, **settings)
    fresh.network.load_state_dict(learner.network.state_dict())
    batches = [batch_of(spec, seed=50 + i) for i in range(5)]
    expected = plain_training(fresh, config(**settings), batches, m)
    for batch in batches:
        fresh.update(batch, advice(batch), torch.tensor(m))
    for key, value in weights(fresh.network).items():
        torch.testing.assert_close(value, expected[key], atol=2e-5, rtol=1e-4)


def test_the_metrics_are_what_they_say() -> None:
    learner = build(distill__coefficient=3.0)
    batch = batch_of(VECTOR)
    with torch.no_grad():
        q = learner.network(batch.obs)
    teacher = advice(batch)
    metrics = learner.update(batch, teacher, torch.tensor(0.25))
    divergence = kl(teacher, log_policy(q, 0.1)).mean()
    assert metrics["q_mean"] == pytest.approx(q.mean().item(), rel=1e-5)
    assert metrics["q_max"] == pytest.approx(q.max(dim=1).values.mean().item(), rel=1e-5)
    assert metrics["distill_loss"] == pytest.approx(divergence.item(), rel=1e-5)
    total = metrics["td_loss"].item() + 3.0 * 0.25 * metrics["distill_loss"].item()
    assert metrics["loss"].item() == pytest.approx(total, rel=1e-5)
    agree = (q.argmax(1) == teacher.argmax(1)).float().mean()
    assert metrics["teacher_agreement"] == agree


def test_targets_stay_until_they_are_copied() -> None:
    learner = build()
    before = weights(learner.target)
    assert all(same(before, weights(learner.network)))
    train(learner, VECTOR, 3)
    assert all(same(before, weights(learner.target)))
    learner.sync_target()
    assert all(same(weights(learner.network), weights(learner.target)))


def test_epsilon_greedy() -> None:
    learner, obs = build(), batch_of(VECTOR, size=4000).obs
    with torch.no_grad():
        best = learner.network(obs).argmax(1)
    action, log_prob, _ = learner.act(obs, None, ActRule("greedy"))
    assert torch.equal(action, best)
    assert (log_prob == 0).all()
    action, log_prob, _ = learner.act(obs, None, ActRule("epsilon", 0.3))
    chosen = action == best
    assert chosen.float().mean().item() == pytest.approx(0.7 + 0.1, abs=0.03)
    torch.testing.assert_close(log_prob[chosen], torch.full((int(chosen.sum()),), math.log(0.8)))
    torch.testing.assert_close(log_prob[~chosen], torch.full((int((~chosen).sum()),), math.log(0.1)))


@pytest.mark.parametrize("double_q", [False, True])
def test_bfloat16_leaves_no_parameter_without_a_gradient(double_q: bool) -> None:
    """Weights that autocast casts under no_grad and keeps would cut the online network off."""
    exact, learner = (
        build(kind="atari", precision=precision, td__double_q=double_q, optimizer__adam_eps=1.0)
        for precision in ("fp32", "bf16")
    )
    for one in (exact, learner):
        train(one, ATARI, 1)
        assert all(value.grad.abs().sum() > 0 for value in one.network.parameters())
        assert all(value.dtype == torch.float32 for value in one.network.parameters())
    for reference, found in zip(exact.network.parameters(), learner.network.parameters(), strict=True):
        assert F.cosine_similarity(reference.grad.flatten(), found.grad.flatten(), dim=0) > 0.98


@pytest.mark.parametrize(
    ("name", "convolution"), [("nature", "trunk.conv2"), ("impala", "trunk.sections.1.blocks.0.conv1")]
)
def test_images_are_stored_channels_last(name: str, convolution: str) -> None:
    learner = build(kind="atari", network=name)
    for network in (learner.network, learner.target):
        weight = network.state_dict()[f"{convolution}.weight"]
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()
