"""What phases do with their settings, seen from inside runs: targets, learning rates, epsilon, memories."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_muesli_student import SMALL as SMALL_MUESLI

from reincarnate import schedules
from reincarnate.acting import ActRule
from reincarnate.errors import UserError
from reincarnate.phases.learner import Learner
from reincarnate.phases.online import _Online
from reincarnate.progress import Progress
from reincarnate.runner import Run
from reincarnate.students.dqn import Dqn
from reincarnate.students.muesli.student import MuesliStudent

from small_runs import SMALL, quiet, small_config

OFFLINE, ONLINE = SMALL["offline.updates"], SMALL["online.agent_steps"]


@pytest.fixture(scope="module")
def seen(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one small run of qdagger-dqn: updates at each copy of the target, m and rate, rules of acting."""
    found: dict[str, Any] = {"updates": 0, "copies": [], "rates": [], "rules": []}
    config = small_config(
        distill__window_games=2,
        optimizer__learning_rate_final=1e-5,
        online__epsilon_start=1.0,
        online__epsilon_end=0.02,
        online__epsilon_decay_agent_steps=800,
    )
    update, copy, act, set_m = Dqn.update, Dqn.sync_target, Dqn.act, Learner.set_coefficient

    def counted(student, *arguments):
        found["updates"] += 1
        return update(student, *arguments)

    def copied(student):
        found["copies"].append(found["updates"])
        copy(student)

    def acted(student, obs, state, rule):
        found["rules"].append(rule)
        return act(student, obs, state, rule)

    def weighed(learner, m):
        set_m(learner, m)
        student = learner._stage.student
        found["rates"].append((m, student.optimizer.param_groups[0]["lr"].item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dqn, "update", counted)
        patch.setattr(Dqn, "sync_target", copied)
        patch.setattr(Dqn, "act", acted)
        patch.setattr(Learner, "set_coefficient", weighed)
        found["run"] = Run.start(config, tmp_path_factory.mktemp("runs") / "run", quiet())
        found["run"].execute()
    return found


def test_the_target_is_copied_on_schedule_in_both_phases(seen: dict[str, Any]) -> None:
    timed = seen["updates"] - OFFLINE - seen["run"].record.online.updates  # before the run, for its precision
    copies = {number - timed for number in seen["copies"]}
    # Offline every 40 updates; online every 100 agent steps, of which the first 100 are without updates.
    assert copies == {40, 80, OFFLINE, *(OFFLINE + 25 * hundreds for hundreds in range(1, 6))}


def test_the_learning_rate_follows_m(seen: dict[str, Any]) -> None:
    optimizer = seen["run"].config.optimizer
    high, low = optimizer.learning_rate, optimizer.learning_rate_final
    for m, rate in seen["rates"]:
        assert rate == pytest.approx(schedules.learning_rate(m, high, low), rel=1e-5)
    assert min(m for m, _ in seen["rates"]) < 1.0
    assert seen["rates"][0][1] == pytest.approx(high, rel=1e-5)


def test_epsilon_falls_as_the_student_plays(seen: dict[str, Any]) -> None:
    asked = seen["run"].config.online
    played = [rule.epsilon for rule in seen["rules"] if rule.kind == "epsilon" and rule.epsilon > 0.02]
    assert played[0] == asked.epsilon_start == 1.0
    assert all(a >= b for a, b in itertools.pairwise(played))
    last = schedules.linear(1.0, asked.epsilon_end, asked.epsilon_decay_agent_steps, ONLINE)
    assert last <= played[-1] <= last + 0.01
    assert len(played) >= ONLINE // 4


def test_the_actors_memory_is_stored_before_each_step_and_empty_at_the_start_of_a_game(
    cache: Path, tmp_path: Path
) -> None:
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    act = MuesliStudent.act_with_policy

    def recorded(student, obs, state, rule: ActRule):
        found = act(student, obs, state, rule)
        calls.append((state.clone(), found[2].clone()))
        return found

    def from_here(phase):
        calls.clear()
        play(phase)

    play = _Online.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MuesliStudent, "act_with_policy", recorded)
        patch.setattr(_Online, "run", from_here)
        run = Run.start(small_config(**SMALL_MUESLI, online__evaluations=1), tmp_path / "run", quiet())
        run.execute()
    data = run.record.student_data
    assert data is not None
    rows, counts = data.rows_since(np.zeros(data.num_envs, dtype=np.int64))
    first = 0
    for lane, count in enumerate(counts):
        stored = torch.from_numpy(rows["state"][first : first + count])
        start = rows["game_start"][first : first + count]
        assert start[0]
        for t in range(count):
            before = torch.zeros_like(stored[t]) if start[t] else calls[t - 1][1][lane]
            assert torch.equal(stored[t], before), (lane, t)
            assert torch.equal(calls[t][0][lane], before), (lane, t)
        first += count
    assert rows["game_start"].sum() > len(counts)  # games that started later
    assert np.abs(rows["state"]).max() > 0


def test_a_student_that_diverged_ends_its_run_in_one_line(cache: Path, tmp_path: Path) -> None:
    run = Run.start(small_config(optimizer__learning_rate=1e30), tmp_path / "run", quiet())
    with pytest.raises(UserError, match="the student's weights are NaN or infinite: training has diverged"):
        run.execute()
    assert not (tmp_path / "run" / "student.safetensors").exists()


def test_an_online_phase_without_an_update_says_so(cache: Path, tmp_path: Path) -> None:
    told = io.StringIO()
    config = small_config(
        None,
        "muesli",
        env__id="CartPole-v1",
        muesli__sequence_length=200,
        online__agent_steps=200,
        online__learning_starts_agent_steps=0,
    )
    run = Run.start(config, tmp_path / "run", Progress(stream=told))
    run.execute()
    assert run.record.online.updates == 0
    assert "warning: the online phase made no update: D_S never held what one takes" in told.getvalue()
