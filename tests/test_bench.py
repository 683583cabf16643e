"""The benchmark measures the real phases; nothing here depends on how fast they are."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from reincarnate.bench import bench
from reincarnate.cli import main
from reincarnate.errors import UserError
from reincarnate.meter import TURNS, WARM_UP_TICKS, Meter

from turned_clock import Clock

CPU = torch.device("cpu")


def test_the_meter_counts_the_phase_and_leaves_its_interruptions_out() -> None:
    clock = Clock()

    def bound() -> float:
        clock.now += 1_000.0  # must not count
        return 16.0

    meter = Meter(2.0, bound, CPU, clock)
    done, ticks = 0, 0
    while not meter.tick(done):
        ticks += 1
        done += 8 if ticks > WARM_UP_TICKS else 1  # 8 a second, after a slow start
        clock.now += 1.0
        if ticks == WARM_UP_TICKS + 3:
            clock.now += 500.0  # the next buffer is made
            meter.go_on()
    assert (meter.rate.per_second, meter.rate.bound, meter.rate.fraction) == (8.0, 16.0, 0.5)


def test_the_meter_reports_medians_turn_by_turn() -> None:
    clock, bounds = Clock(), iter([4.0, 2.0, 8.0, 4.0, 4.0])
    meter = Meter(1.0, lambda: next(bounds), CPU, clock)
    done = 0.0
    for rate in [1.0] * WARM_UP_TICKS + [2.0, 1.0, 4.0, 100.0, 2.0]:
        done += rate
        clock.now += 1.0
        if meter.tick(done):
            break
    assert len(list(bounds)) == 0
    assert TURNS == 5
    assert meter.rate.per_second == 2.0
    assert meter.rate.bound == 4.0
    assert meter.rate.fraction == 0.5


@pytest.fixture(scope="module")
def measured() -> dict[str, object]:
    return bench("CartPole-v1", device="cpu", num_envs=4, batch_size=16, seconds=0.2)


def test_every_figure_of_the_contract_is_there(measured) -> None:
    assert {"device", "precision", "network", "batch_size"} < measured.keys()
    assert (measured["device"], measured["precision"], measured["network"]) == ("cpu", "fp32", "mlp")
    for phase, unit in (
        ("collect", "agent_steps_per_s"),
        ("offline", "updates_per_s"),
        ("online", "agent_steps_per_s"),
    ):
        figures = measured[phase]
        assert figures.keys() == {unit, "bound", "fraction"}
        assert min(figures.values()) > 0
    assert 0 < measured["sample"]["seconds_per_batch"] < 1
    assert 0 < measured["sample"]["fraction_of_update"] < 1
    assert measured["memory"]["bytes_per_transition"] == 4 * 4 + 4 * (6 + 2) + 2 * 5 + 11


def test_a_student_of_sequences_is_measured_with_its_own_batches_and_bound() -> None:
    found = bench(
        "CartPole-v1", student="qdagger-muesli", device="cpu", num_envs=4, batch_size=4, seconds=0.1
    )
    assert (found["student"], found["batch_size"]) == ("qdagger-muesli", 4)
    for phase in ("collect", "offline", "online"):
        assert min(found[phase].values()) > 0
    assert found["sample"]["seconds_per_batch"] > 0


def test_a_student_without_an_offline_phase_is_refused() -> None:
    with pytest.raises(UserError, match="'muesli' has no offline one; try qdagger-dqn"):
        bench("CartPole-v1", student="muesli")


def test_the_command_prints_json_or_a_table() -> None:
    arguments = ["bench", "--env", "CartPole-v1", "--device", "cpu", "--seconds", "0.1"]
    printed = CliRunner().invoke(main, [*arguments, "--json"])
    assert json.loads(printed.stdout)["env"] == "CartPole-v1"
    table = CliRunner().invoke(main, arguments).stdout
    assert "agent steps/s of" in table
    assert "bytes per transition" in table
    lines = table.splitlines()
    assert (
        lines[1] == "medians of 5 turns; a share is the median of the turns' shares, not the rates' quotient"
    )
    assert [", share " in line for line in lines[2:5]] == [True] * 3
    assert "not the quotient of the two medians" in " ".join(
        CliRunner().invoke(main, ["bench", "--help"]).stdout.split()
    )


def test_an_environment_without_a_bundled_teacher_gets_random_weights() -> None:
    assert bench("MountainCar-v0", device="cpu", seconds=0.05)["env"] == "MountainCar-v0"


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="no environment"):
        bench("Braekout-v5")
    with pytest.raises(UserError, match="batch_size"):
        bench("CartPole-v1", batch_size=0)
