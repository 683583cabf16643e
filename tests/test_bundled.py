"""The teachers that ship with the package are what their cards say, bit for bit what they came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reincarnate.acting import parse_act_rule
from reincarnate.envs import env_spec
from reincarnate.evaluate import OutputsPolicy, evaluate
from reincarnate.teachers.formats import Checkpoint, detect_and_read
from reincarnate.teachers.reference import BUNDLED, bundled_names
from reincarnate.teachers.teacher import Teacher, TeacherCard

from paths import SHARED_CHECKPOINTS, needs_checkpoints

BUNDLED_TEACHERS = {name: BUNDLED / name / "teacher.safetensors" for name in bundled_names()}
SOURCES = {
    "Breakout-dqn": Path("own", "Breakout-dqn", "dqn_atari.cleanrl_model"),
    "CartPole-dqn": Path("own", "CartPole-v1-dqn-seed1", "dqn.cleanrl_model"),
}


def teacher(checkpoint: Checkpoint) -> Teacher:
    card = TeacherCard("bundled", "bundled", None, "teacher.safetensors", "", checkpoint.format)
    return Teacher(checkpoint.spec, card, checkpoint.state_dict)


def test_there_are_two_and_each_has_a_card() -> None:
    found = BUNDLED_TEACHERS
    assert list(found) == ["Breakout-dqn", "CartPole-dqn"]
    for name, path in found.items():
        assert path.is_file()
        assert (path.parent / "README.md").read_text(encoding="utf-8").startswith(f"# {name}\n")


@needs_checkpoints
@pytest.mark.parametrize("name", SOURCES)
def test_weights_and_environment_are_those_of_the_source(name: str) -> None:
    ours = detect_and_read(BUNDLED_TEACHERS[name])
    source = detect_and_read(SHARED_CHECKPOINTS / SOURCES[name])
    assert ours.format == "native"
    assert ours.spec == source.spec
    assert list(ours.state_dict) == list(source.state_dict)
    assert all(torch.equal(ours.state_dict[key], source.state_dict[key]) for key in source.state_dict)


@pytest.mark.parametrize(
    ("name", "env_id"), [("Breakout-dqn", "Breakout-v5"), ("CartPole-dqn", "CartPole-v1")]
)
def test_the_recorded_environment_is_the_one_that_its_name_makes(name: str, env_id: str) -> None:
    assert detect_and_read(BUNDLED_TEACHERS[name]).spec.env == env_spec(env_id)


@pytest.mark.parametrize("name", SOURCES)
def test_the_card_shows_the_recorded_return_and_the_number_of_parameters(name: str) -> None:
    path = BUNDLED_TEACHERS[name]
    card = (path.parent / "README.md").read_text(encoding="utf-8")
    checkpoint = detect_and_read(path)
    reported = checkpoint.reported
    assert reported is not None
    assert reported.std is not None
    assert reported.act == "epsilon=0.01"
    row = next(line for line in card.splitlines() if line.startswith("| epsilon 0.01 |"))
    assert f"{reported.mean:.1f} ± {reported.std:.1f}" in row
    assert row.split("|")[2].split()[0] == str(reported.n)
    count = sum(value.numel() for value in checkpoint.state_dict.values())
    assert f"{count:,} parameters" in card


@pytest.mark.parametrize("name", [pytest.param("Breakout-dqn", marks=pytest.mark.slow), "CartPole-dqn"])
def test_a_teacher_plays_as_well_as_reported(name: str) -> None:
    """16 games: their mean lies within 4 standard errors of the reported one."""
    checkpoint = detect_and_read(BUNDLED_TEACHERS[name])
    made = teacher(checkpoint)
    rule = parse_act_rule("epsilon=0.01", checkpoint.spec.outputs)
    policy = OutputsPolicy(made.outputs, rule, made.temperature, torch.Generator().manual_seed(5))
    returns = evaluate(policy, checkpoint.spec.env, 16, num_envs=8, seed=5)
    reported = checkpoint.reported
    assert reported is not None
    assert reported.std is not None
    assert returns.mean == pytest.approx(reported.mean, abs=4 * reported.std / 16**0.5)
