"""A teacher is frozen, answers in float32, and says where it came from."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from reincarnate.acting import ActRule
from reincarnate.errors import UserError
from reincarnate.teachers.teacher import Reported, Teacher, TeacherCard, TeacherSpec
from reincarnate.types import EnvSpec, OutputKind

ENV = EnvSpec("CartPole-v1", "vector", 2, (4,))


def spec(outputs: OutputKind = "q_values") -> TeacherSpec:
    return TeacherSpec(ENV, outputs, "mlp", {"hidden": [3], "activation": "relu"}, "dqn")


def card(**values: object) -> TeacherCard:
    known = {"resolved": "/models/CartPole", "revision": None, "file": "dqn.cleanrl_model", "sha256": "ab"}
    return TeacherCard(**({"ref": "CartPole", "format": "cleanrl_torch"} | known | values))  # type: ignore[arg-type]


def weights() -> dict[str, Tensor]:
    """relu of the first three observations, then Q = (h0 - h1, 2 h2 + 1)."""
    return {
        "trunk.layers.0.weight": torch.eye(3, 4),
        "trunk.layers.0.bias": torch.zeros(3),
        "head.weight": torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 2.0]]),
        "head.bias": torch.tensor([0.0, 1.0]),
    }


@pytest.fixture
def teacher() -> Teacher:
    return Teacher(spec(), card(), weights())


OBS = torch.tensor([[3.0, 1.0, 0.25, 9.0], [-5.0, 2.0, 1.0, 9.0]])
OUTPUTS = torch.tensor([[2.0, 1.5], [-2.0, 3.0]])  # by hand


def test_outputs_are_those_of_the_weights(teacher: Teacher) -> None:
    outputs = teacher.outputs(OBS)
    torch.testing.assert_close(outputs, OUTPUTS)
    assert outputs.dtype == torch.float32
    assert outputs.is_inference()  # no graph is kept, nothing is counted


def test_pixels_are_scaled_and_images_answered() -> None:
    env = EnvSpec("Breakout-v5", "atari", 4, (1, 36, 36))
    image = TeacherSpec(env, "q_values", "nature", {"hidden": 4}, "dqn")
    network = image.build(device="cpu")
    teacher = Teacher(image, card(), network.state_dict())
    obs = torch.full((2, 1, 36, 36), 51, dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(teacher.outputs(obs), network(torch.full((2, 1, 36, 36), 0.2)))


def test_a_teacher_is_frozen_and_in_eval_mode(teacher: Teacher) -> None:
    assert not teacher.network.training
    assert all(not parameter.requires_grad for parameter in teacher.network.parameters())
    assert teacher.device == torch.device("cpu")
    assert teacher.to("cpu") is teacher


def test_weights_of_another_network_are_refused() -> None:
    state = weights()
    del state["head.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
        Teacher(spec(), card(), state)


@pytest.mark.parametrize(("outputs", "temperature"), [("q_values", 0.1), ("policy_logits", 1.0)])
def test_the_temperature_follows_the_kind_of_outputs(outputs: OutputKind, temperature: float) -> None:
    teacher = Teacher(spec(outputs), card(), weights())
    assert teacher.temperature == temperature
    log_policy = teacher.log_policy(OUTPUTS)
    # softmax over two actions is a sigmoid of their gap
    expected = [-math.log1p(math.exp(-gap / temperature)) for gap in (0.5, -5.0)]
    torch.testing.assert_close(log_policy[:, 0], torch.tensor(expected))
    torch.testing.assert_close(log_policy.exp().sum(1), torch.ones(2))


def test_the_temperature_can_be_set_and_given(teacher: Teacher) -> None:
    teacher.temperature = 2.0
    torch.testing.assert_close(teacher.log_policy(OUTPUTS), torch.log_softmax(OUTPUTS / 2, 1))
    torch.testing.assert_close(teacher.log_policy(OUTPUTS, 0.5), torch.log_softmax(OUTPUTS * 2, 1))


def test_a_loss_may_keep_the_teachers_policy_for_its_backward_pass(teacher: Teacher) -> None:
    """Inference tensors cannot be saved for backward: the policy must not be one."""
    student = torch.zeros(2, 2, requires_grad=True)
    policy = teacher.log_policy(teacher.outputs(OBS))
    (policy * student.log_softmax(1)).sum().backward()
    assert student.grad is not None
    torch.testing.assert_close(student.grad, policy - 0.5 * policy.sum(1, keepdim=True))


def test_acting_follows_the_rule(teacher: Teacher) -> None:
    generator = torch.Generator().manual_seed(0)
    assert teacher.act(OBS, ActRule("greedy"), generator).tolist() == [0, 1]
    many = OBS[:1].expand(20_000, -1)
    explored = teacher.act(many, ActRule("epsilon", 0.4), generator).float().mean()
    assert explored == pytest.approx(0.2, abs=0.015)  # half of the random actions; 5 standard errors
    teacher.temperature = 1.0
    sampled = teacher.act(many, ActRule("sample"), generator).float().mean()
    assert sampled == pytest.approx(1 / (1 + math.exp(0.5)), abs=0.018)
    assert teacher.act(OBS, ActRule("greedy"), None).dtype == torch.int64


def test_acting_repeats_with_the_same_generator(teacher: Teacher) -> None:
    many = OBS[:1].expand(100, -1)
    first, second = (
        teacher.act(many, ActRule("epsilon", 0.5), torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_to_json_holds_what_teachers_show_promises() -> None:
    reported = Reported(70.0, "model card", std=25.0)
    made = Teacher(spec(), card(reported=reported, assumed={"env_id": "--env"}), weights())
    described = made.to_json()
    assert json.loads(json.dumps(described)) == described
    assert list(described) == [
        *("ref", "resolved", "revision", "file", "sha256", "format", "policy_sha256", "algorithm"),
        *("architecture", "parameters", "env", "reported", "assumed"),
    ]
    assert described["parameters"] == 3 * 4 + 3 + 2 * 3 + 2
    assert described["architecture"] == "mlp (hidden=[3], activation=relu)"
    assert EnvSpec.from_dict(described["env"]) == ENV
    assert described["reported"] == {
        "mean": 70.0,
        "source": "model card",
        "std": 25.0,
        "n": None,
        "act": None,
    }
    assert Teacher(spec(), card(), weights()).to_json()["reported"] is None


def test_a_reported_return_reads_as_a_line() -> None:
    assert str(Reported(70.04, "model card", std=25.0)) == "70.0 ± 25.0 (model card)"
    assert str(Reported(70.04, "model card")) == "70.0 (model card)"


def test_a_spec_that_describes_no_network_is_refused() -> None:
    with pytest.raises(UserError, match=r"no network 'cnn'"):
        TeacherSpec(ENV, "q_values", "cnn", {}, "dqn").build()
