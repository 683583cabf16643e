"""Acting rules: what is drawn, and whether its log-probability is the truth."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from reincarnate.acting import (
    ActRule,
    act,
    default_temperature,
    distillation_temperature,
    epsilon_greedy,
    greedy_policy_log_prob,
    parse_act_rule,
    sample,
)
from reincarnate.errors import UserError

from random_tensors import generator

OUTPUTS = torch.tensor([0.3, -1.0, 2.0, 0.9])
DRAWS = 20_000
EPSILONS = st.floats(0.0, 1.0)


def many(outputs=OUTPUTS):
    return outputs.expand(DRAWS, -1)


def agrees(action, probabilities):
    """Chi-square test of drawn actions against the probabilities they should have."""
    counts = torch.bincount(action, minlength=len(probabilities)).double()
    expected = probabilities.double() / probabilities.double().sum() * len(action)
    return stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "outputs", "rule"),
    [
        ("auto", "q_values", ActRule("epsilon", 0.01)),
        ("auto", "policy_logits", ActRule("sample")),
        ("greedy", "policy_logits", ActRule("greedy")),
        ("sample", "q_values", ActRule("sample")),
        ("epsilon=0.05", "q_values", ActRule("epsilon", 0.05)),
        ("epsilon=1", "policy_logits", ActRule("epsilon", 1.0)),
        ("epsilon=0", "q_values", ActRule("epsilon", 0.0)),
    ],
)
def test_rules_are_read(text, outputs, rule):
    assert parse_act_rule(text, outputs) == rule


@pytest.mark.parametrize(
    "text",
    ["", "epsilon", "epsilon=", "epsilon=1.1", "epsilon=-0.1", "epsilon=nan", "eps=0.1", "Greedy", "0.1"],
)
def test_other_texts_are_refused(text):
    with pytest.raises(UserError, match=r"no acting rule .*; use auto, greedy, sample or epsilon=X"):
        parse_act_rule(text, "q_values")


@pytest.mark.parametrize("rule", [ActRule("greedy"), ActRule("sample"), ActRule("epsilon", 0.05)])
def test_a_recorded_rule_can_be_read_back(rule):
    assert parse_act_rule(str(rule), "q_values") == rule


def test_default_temperatures():
    assert default_temperature("q_values") == 0.1
    assert default_temperature("policy_logits") == 1.0


@pytest.mark.parametrize(
    ("teacher", "student", "temperature"),
    [
        ("q_values", "q_values", 0.1),
        ("q_values", "policy_logits", 0.03),
        ("policy_logits", "q_values", 1.0),
        ("policy_logits", "policy_logits", 1.0),
    ],
)
def test_a_student_that_samples_is_taught_a_policy_that_can_be_sampled(teacher, student, temperature):
    assert distillation_temperature(teacher, student) == temperature


# ---------------------------------------------------------------- epsilon-greedy


@settings(max_examples=50, deadline=None)
@given(epsilon=EPSILONS, num_actions=st.integers(1, 18))
def test_epsilon_greedy_probabilities_sum_to_one(epsilon, num_actions):
    actions = torch.arange(num_actions)
    log_prob = greedy_policy_log_prob(torch.zeros_like(actions), actions, epsilon, num_actions)
    assert log_prob.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_epsilon_greedy_closed_form():
    log_prob = greedy_policy_log_prob(torch.tensor([2, 2]), torch.tensor([2, 0]), 0.2, 4)
    assert log_prob.exp().tolist() == pytest.approx([0.85, 0.05])
    assert log_prob.dtype == torch.float32


def test_an_action_that_cannot_happen_has_probability_zero():
    log_prob = greedy_policy_log_prob(torch.tensor([1]), torch.tensor([0]), 0.0, 3)
    assert log_prob.item() == -math.inf


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy_draws_what_it_claims(epsilon):
    action, log_prob = epsilon_greedy(many(), epsilon, generator())
    probabilities = torch.full((4,), epsilon / 4)
    probabilities[2] += 1 - epsilon
    torch.testing.assert_close(log_prob.exp(), probabilities[action])
    if epsilon:
        assert agrees(action, probabilities)
    else:
        assert (action == 2).all()


def test_epsilon_may_be_a_tensor_and_follows_each_row_its_own_greedy_action():
    outputs = torch.eye(3)
    action, log_prob = epsilon_greedy(outputs, torch.tensor(0.0), generator())
    assert action.tolist() == [0, 1, 2]
    assert log_prob.tolist() == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_gumbel_trick_draws_from_the_softmax(temperature):
    action, log_prob = sample(many(), temperature, generator())
    policy = torch.softmax(OUTPUTS / temperature, dim=0)
    torch.testing.assert_close(log_prob, policy.log()[action])
    assert agrees(action, policy)


def test_the_test_of_frequencies_can_fail():
    action, _ = sample(many(), 1.0, generator())
    assert not agrees(action, torch.softmax(OUTPUTS / 1.1, dim=0))


def test_a_low_temperature_is_greedy_and_a_high_one_uniform():
    assert (sample(many(), 1e-3, generator())[0] == 2).all()
    action, log_prob = sample(many(), 1e6, generator())
    assert agrees(action, torch.full((4,), 0.25))
    torch.testing.assert_close(log_prob, torch.full((DRAWS,), math.log(0.25)), atol=1e-5, rtol=0)


def test_sampling_is_done_in_single_precision_whatever_the_network_gives():
    _, log_prob = sample(OUTPUTS.to(torch.bfloat16)[None], 0.1, generator())
    assert log_prob.dtype == torch.float32


# ---------------------------------------------------------------- act


@pytest.mark.parametrize("rule", [ActRule("greedy"), ActRule("sample"), ActRule("epsilon", 0.5)])
def test_act_repeats_itself_under_the_same_generator(rule):
    first = act(many(), rule, 1.0, generator(1))
    again = act(many(), rule, 1.0, generator(1))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert first[0].dtype == torch.int64
    assert first[0].shape == first[1].shape == (DRAWS,)


def test_act_chooses_the_rule():
    policy = torch.softmax(OUTPUTS / 2, dim=0)
    assert (act(many(), ActRule("greedy"), 2.0, generator())[0] == 2).all()
    assert agrees(act(many(), ActRule("sample"), 2.0, generator())[0], policy)
    action, log_prob = act(many(), ActRule("epsilon", 1.0), 2.0, generator())
    assert agrees(action, torch.full((4,), 0.25))
    torch.testing.assert_close(log_prob, torch.full((DRAWS,), math.log(0.25)))


def test_greedy_is_certain():
    action, log_prob = act(many(), ActRule("greedy", epsilon=0.5), 1.0, None)
    assert (action == 2).all()
    assert (log_prob == 0).all()
