import dataclasses
import functools
import math
import typing
from collections.abc import Callable

import pytest
import torch

from reincarnate import cli
from reincarnate.config import PRESETS, RunConfig, field_names, override, preset
from reincarnate.errors import UserError
from reincarnate.students.student import get_student
from reincarnate.types import EnvSpec

# The table of presets in docs/qdagger.md, row by row.
TABLE = {
    "env.num_envs": (8, 16, 8, 1),
    "collect.agent_steps": (40_000, 500_000, 1_000_000, 500_000),
    "collect.epsilon_start": (0.05, 0.05, 0.01, 1.0),
    "collect.epsilon_end": (0.05, 0.05, 0.01, 0.01),
    "offline.updates": (2_500, 500_000, 1_000_000, 500_000),
    "offline.target_update_every_updates": (500, 2_000, 2_000, 1_000),
    "offline.evaluations": (1, 10, 10, 10),
    "online.agent_steps": (10_000, 10_000_000, 2_500_000, 10_000_000),
    "online.learning_starts_agent_steps": (1_000, 20_000, 20_000, 80_000),
    "online.replay_capacity_agent_steps": (10_000, 1_000_000, 1_000_000, 1_000_000),
    "online.epsilon_start": (0.01, 0.01, 0.01, 1.0),
    "online.epsilon_end": (0.01, 0.01, 0.01, 0.01),
    "online.target_update_every_agent_steps": (2_000, 8_000, 8_000, 1_000),
    "online.evaluations": (1, 10, 10, 10),
    "online.agent_steps_per_update": (8, 4, 4, 4),
    "td.n_step": (3, 3, 3, 1),
    "td.loss": ("huber", "huber", "huber", "mse"),
    "td.discount": (0.99, 0.99, 0.99, 0.99),
    "distill.coefficient": (3.0, 3.0, 3.0, 1.0),
    "distill.student_temperature": (0.1, 0.1, 0.1, 1.0),
    "distill.teacher_temperature": (None, None, None, 1.0),
    "distill.window_games": (20, 20, 20, 20),
    "distill.stop_fraction": (1.0, 0.6, 0.6, 0.6),
    "optimizer.batch_size": (32, 32, 32, 32),
    "optimizer.learning_rate": (3e-4, 1e-4, 1e-4, 1e-4),
    "network": ("light", "auto", "auto", "auto"),
    "optimizer.learning_rate_final": (1e-5, 1e-5, 1e-5, 1e-4),
    "optimizer.adam_eps": (1.5e-4, 1.5e-4, 1.5e-4, 1e-8),
    "evaluate.games": (16, 30, 100, 10),
}


def get(config: RunConfig, name: str) -> object:
    part, _, leaf = name.rpartition(".")
    return getattr(getattr(config, part) if part else config, leaf)


@pytest.mark.parametrize("name", TABLE)
def test_presets_hold_the_documented_table(name: str) -> None:
    assert (
        tuple(get(preset(which), name) for which in ("quick", "default", "paper", "cleanrl")) == TABLE[name]
    )


def test_with_a_teacher_no_preset_touches_the_environment_but_its_number() -> None:
    for name in PRESETS:
        changed = dataclasses.replace(preset(name).env, num_envs=16)
        assert changed == RunConfig().env


def test_scratch_presets_explore_from_random_and_paper_brings_its_environment() -> None:
    paper = preset("paper", scratch=True)
    assert (paper.online.epsilon_start, paper.online.epsilon_decay_agent_steps) == (1.0, 50_000)
    assert (paper.env.sticky_probability, paper.env.episodic_life) == (0.25, False)
    assert preset("quick", scratch=True).online.epsilon_start == 1.0


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("scratch", [False, True])
def test_json_round_trip(name: str, scratch: bool) -> None:
    config = override(preset(name, scratch=scratch), {"teacher": "a/b", "env.noop_max": "7"})
    assert RunConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("online.agent_steps", "1e6", 1_000_000),
        ("online.agent_steps", "20_000", 20_000),
        ("optimizer.learning_rate", "2.5e-4", 2.5e-4),
        ("env.episodic_life", "false", False),
        ("env.episodic_life", "none", None),
        ("env.sticky_probability", "0.25", 0.25),
        ("td.double_q", "true", True),
        ("network", "nature", "nature"),
    ],
)
def test_text_becomes_the_fields_type(name: str, text: str, expected: object) -> None:
    assert get(override(preset("quick"), {name: text}), name) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"optimizer.batchsize": 1},
            r"no setting 'optimizer.batchsize' \(did you mean 'optimizer.batch_size'\?\)",
        ),
        ({"batch_size": 1}, r"did you mean 'optimizer.batch_size'"),
        ({"qqq": 1}, r"no setting 'qqq'"),
        ({"td.loss": "l1"}, r"td.loss must be one of huber, mse, got 'l1'"),
        ({"td.n_step": "three"}, r"td.n_step takes a value of type int, got 'three'"),
        ({"td.n_step": "1.5"}, r"td.n_step takes a value of type int"),
        ({"td.n_step": 0}, r"td.n_step must be greater than 0, got 0"),
        ({"td.discount": 1.5}, r"td.discount must be between 0 and 1"),
        ({"optimizer.learning_rate": "nan"}, r"optimizer.learning_rate takes a value of type float"),
        ({"offline.updates": -1}, r"offline.updates must be 0 or more"),
        (
            {"optimizer.learning_rate": "-inf"},
            r"takes a value of type float \(a finite number that float32 can hold\), got '-inf'",
        ),
        ({"seed": "1e30"}, r"seed must be at most 1000000000000000, got '1e30'"),
        ({"teacher_seed": -(10**30)}, r"teacher_seed must be at most 1000000000000000"),
        ({"optimizer.batch_size": "1e9"}, r"optimizer.batch_size must be at most 1048576, got 1000000000"),
        ({"env.num_envs": 10**6}, r"env.num_envs must be at most 65536, got 1000000"),
        ({"env.episodic_life": "maybe"}, r"env.episodic_life takes a value of type bool"),
        ({"env.noop_max": "0"}, r"env.noop_max must be greater than 0"),
        ({"muesli.cmpo_weight": -1}, r"muesli.cmpo_weight must be 0 or more, got -1"),
        ({"muesli.weight_decay": "-0.1"}, r"muesli.weight_decay must be 0 or more, got -0.1"),
        ({"online.agent_steps": "inf"}, r"online.agent_steps takes a value of type int"),
    ],
)
def test_bad_settings_get_one_clear_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        override(preset("quick"), values)
    assert "\n" not in str(caught.value)


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"no preset 'quik' \(did you mean 'quick'\?\); known: quick, default"
    ):
        preset("quik")


def test_a_stored_config_with_an_unknown_name_is_refused() -> None:
    values = preset("quick").to_dict()
    values["td"]["lamda"] = 1
    with pytest.raises(UserError, match=r"no setting 'td.lamda'"):
        RunConfig.from_dict(values)


def test_every_command_line_option_is_a_setting_and_a_parameter_of_run() -> None:
    parameters = {parameter.name for parameter in cli.run.run.params}
    for option, setting in cli.run.RUN_OPTIONS.items():
        assert option in parameters
        assert setting in field_names()
    assert parameters == {*cli.run.RUN_OPTIONS, "teacher", "student", "preset", "settings", "out", "resume"}


# ---------------------------------------------------------------- numbers at the edges


def numeric_settings(kind: type) -> list[str]:
    """Every setting whose type is a number of this kind, or that or None."""
    return [name for name, hint in field_names().items() if kind in (typing.get_args(hint) or (hint,))]


def refusal(work: Callable[[], object]) -> str | None:
    """The line in which ``work`` is refused; None where it is not."""
    try:
        work()
    except UserError as error:
        return str(error)
    return None


def test_numbers_beyond_all_use_are_accepted_or_refused_in_one_line() -> None:
    for name in [*numeric_settings(int), *numeric_settings(float)]:
        for value in (1e300, math.nan, -math.inf, 1e-300, 0, -1, 10**12, 10**16):
            line = refusal(functools.partial(override, RunConfig(), {name: value}))
            assert line is None or name.rpartition(".")[2] in line, (name, value)
            assert "\n" not in (line or "")


def test_a_float_is_one_that_float32_can_hold() -> None:
    """The others became infinite, or 0, where they are used, or were a traceback."""
    for name in numeric_settings(float):
        for value in (1e300, -1e39, 1e-300, "1e39", math.nan, -math.inf):
            line = refusal(functools.partial(override, RunConfig(), {name: value}))
            assert line is not None, (name, value)
            assert line.startswith(f"{name} takes a value of type float (a finite number that float32")


@pytest.mark.parametrize("student", ["dqn", "muesli"])
def test_what_is_accepted_builds_a_student_or_says_why_not(student: str) -> None:
    entry, spec, cpu = get_student(student), EnvSpec("Chain-v0", "vector", 3, (5,)), torch.device("cpu")
    base = override(preset("quick", scratch=True, student=student), {"student": student})

    def build(name: str, value: float) -> None:
        config = override(base, {name: value})
        entry.factory(config, spec, cpu, "fp32", torch.Generator().manual_seed(0))

    names = [name for name in [*numeric_settings(int), *numeric_settings(float)] if entry.does_read(name)]
    lines = [refusal(functools.partial(build, n, v)) for n in names for v in (3e38, 1.3e-38, 0, 10**12)]
    assert not any("\n" in line for line in lines if line)
    assert lines.count(None) > 30
