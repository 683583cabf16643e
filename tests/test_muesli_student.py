"""Muesli as a student that runs: phases, resuming, the run as the next teacher, and what it is told."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import reincarnate
from reincarnate.acting import ActRule, behaviour_log_policy, greedy_policy_log_prob
from reincarnate.config import RunConfig, override, preset
from reincarnate.errors import UserError
from reincarnate.phases import Stopped
from reincarnate.phases.learner import total_updates
from reincarnate.replay import SequenceDraws
from reincarnate.runner import Run
from reincarnate.students.muesli import Muesli
from reincarnate.students.student import BatchSpec, get_student
from reincarnate.teachers.collect import watching
from reincarnate.types import EnvSpec, EnvStep

from muesli_games import random_batch
from small_runs import quiet, read, small_config, stopping

CPU = torch.device("cpu")
VECTOR = EnvSpec("Chain-v0", "vector", 3, (4,))
LENGTH, UPDATES, STEPS, UNITS = 8, 20, 300, 8
SMALL = {
    "student": "qdagger-muesli",
    "optimizer__batch_size": 8,
    "muesli__sequence_length": LENGTH,
    "muesli__core_units": UNITS,
    "offline__updates": UPDATES,
    "online__learning_starts_agent_steps": 0,
    "online__agent_steps": STEPS,
    "online__replay_capacity_agent_steps": 1_000,
    "collect__agent_steps": 400,
}


@pytest.fixture(scope="module")
def rates() -> list[float]:
    """Learning rates of the finished run's updates, in order."""
    return []


@pytest.fixture(scope="module")
def finished(cache: Path, rates: list[float], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Teacher evaluated, D_T collected, offline, online, report: with an LSTM."""
    run = Run.start(small_config(**SMALL), tmp_path_factory.mktemp("runs") / "finished", quiet())
    real = Muesli.update

    def update(learner, *arguments):
        rates.append(learner.optimizer.rate.item())
        return real(learner, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Muesli, "update", update)
        run.execute()
    return run


def test_all_phases_run_and_every_fresh_row_is_used_once(finished: Run) -> None:
    result = read(finished.folder, "result.json")
    assert result["status"] == "done"
    assert result["student"]["name"] == "qdagger-muesli"
    assert result["student"]["act"] == "sample"
    assert result["phases"]["offline"]["updates"] == UPDATES
    state, data = finished.record.online, finished.record.student_data
    assert data is not None
    assert state.fresh_rows is not None
    used = sum(state.fresh_rows) // (LENGTH - 1)  # nothing was overwritten
    assert used == state.updates * 2  # a quarter of eight is fresh
    left = (data.marks - np.array(state.fresh_rows) - 1) // (LENGTH - 1)
    assert left.sum() < 2
    assert (finished.folder / "report.html").exists()
    assert data.bytes_per_transition > 4 * 2 * UNITS


def test_the_learning_rate_falls_to_its_end_over_both_phases(finished: Run, rates: list[float]) -> None:
    total = total_updates(finished.stage)
    high = finished.config.optimizer.learning_rate
    assert len(rates) == UPDATES + finished.record.online.updates
    expected = [high * max(0.0, 1 - i / total) for i in range(len(rates))]
    assert rates == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert rates[-1] < 0.1 * high


def test_what_is_saved_acts_as_the_student_did_and_can_teach(
    finished: Run, cache: Path, tmp_path: Path
) -> None:
    saved = reincarnate.load_teacher(str(finished.folder))
    student = finished.stage.student
    assert saved.recurrent
    assert saved.spec.outputs == "policy_logits"
    theirs, ours = student.initial_state(3), saved.initial_state(3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        obs = torch.randn(3, 4, generator=generator)
        _, log_policy, theirs = student.act_with_policy(obs, theirs, ActRule("sample"))
        outputs, ours = saved.step(obs, ours)
        torch.testing.assert_close(torch.log_softmax(outputs, dim=1), log_policy)
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(UserError, match="has a memory"):
        saved.outputs(obs)
    with pytest.raises(UserError, match="normalises its observations"):
        reincarnate.export_teacher(str(finished.folder), "cleanrl", tmp_path / "file")
    following = small_config(teacher=str(finished.folder), **SMALL)
    result = Run.start(following, tmp_path / "next", quiet()).execute()
    assert result["status"] == "done"
    assert result["teacher"]["format"] == "native"


def test_a_teacher_with_a_memory_forgets_where_a_game_starts(finished: Run) -> None:
    saved = reincarnate.load_teacher(str(finished.folder))
    watch, g = watching(saved), torch.Generator().manual_seed(1)
    obs = [torch.randn(2, 4, generator=g) for _ in range(3)]
    starts = np.array([[True, True], [False, False], [False, True]])
    found = [watch(each, _step(start)) for each, start in zip(obs, starts, strict=True)]
    state = saved.initial_state(2)
    for each, outputs in zip(obs, found, strict=True):
        expected, state = saved.step(each, state)
        torch.testing.assert_close(outputs[0], expected[0])  # this lane's game goes on
    fresh, _ = saved.step(obs[2], saved.initial_state(2))
    torch.testing.assert_close(found[2][1], fresh[1])
    assert not torch.allclose(expected[1], fresh[1])


def _step(start: np.ndarray) -> EnvStep:
    blank = np.zeros(len(start), dtype=np.float32)
    off = blank.astype(bool)
    return EnvStep(np.arange(len(start)), blank, blank, blank, off, off, off, start, start)


def test_a_stopped_run_goes_on_where_it_was(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Run.start(small_config(**SMALL), folder, quiet())
    with stopping(UPDATES + 50), pytest.raises(Stopped):
        run.execute()
    resumed = Run.resume(folder, quiet())
    before, after = run.record.student_data, resumed.record.student_data
    assert before is not None
    assert after is not None
    assert resumed.record.online == run.record.online
    assert run.record.online.updates > 0
    begin = SequenceDraws(before, LENGTH).draw(16, torch.Generator().manual_seed(0))
    again = SequenceDraws(after, LENGTH).draw(16, torch.Generator().manual_seed(0))
    assert torch.equal(begin, again)
    old, new = before.gather_sequences(begin, LENGTH), after.gather_sequences(again, LENGTH)
    for name, value in vars(old).items():
        assert torch.equal(value, getattr(new, name)), name
    assert old.state is not None
    assert old.state.abs().sum() > 0  # the actor's memory, not a blank
    _equal_trees(run.stage.student.state_dict(), resumed.stage.student.state_dict())
    assert resumed.execute()["status"] == "done"
    assert resumed.record.online.agent_steps >= STEPS


def _equal_trees(old, new) -> None:
    if isinstance(old, torch.Tensor):
        assert torch.equal(old, new)
    elif isinstance(old, dict):
        assert old.keys() == new.keys()
        for key in old:
            _equal_trees(old[key], new[key])
    elif isinstance(old, list):
        for a, b in zip(old, new, strict=True):
            _equal_trees(a, b)
    else:
        assert old == new


# ---------------------------------------------------------------- what the student says and is told


def build(generator: torch.Generator | None = None, **settings):
    values = {key.replace("__", "."): value for key, value in settings.items()}
    small = {"muesli.model_units": 16, "muesli.sequence_length": 8, "optimizer.batch_size": 3}
    config = override(preset("quick", student="qdagger-muesli"), small | values)
    return get_student("qdagger-muesli").factory(
        config, VECTOR, CPU, "fp32", generator or torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize("core", [None, 16])
def test_one_update_goes_on_bit_for_bit_after_a_round_trip(core: int | None) -> None:
    """The generator, which chooses the roots, is the run's, and the run's checkpoint has its state."""
    generators = torch.Generator().manual_seed(0), torch.Generator()
    student, resumed = (build(generator, muesli__core_units=core) for generator in generators)
    teacher = torch.log_softmax(torch.randn(3, 8, 3), dim=2)
    m = torch.tensor(0.5)
    for seed in range(3):
        student.update(random_batch(seed=seed, core=core), teacher, m)
    buffer = io.BytesIO()
    torch.save(student.state_dict(), buffer)
    buffer.seek(0)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    generators[1].set_state(generators[0].get_state())
    metrics = [each.update(random_batch(seed=9, core=core), teacher, m) for each in (student, resumed)]
    assert {"loss", "distill_loss", "policy_gradient_loss", "reward_loss"} <= set(metrics[0])
    _equal_trees(student.state_dict(), resumed.state_dict())
    assert all(math.isfinite(value) for value in metrics[0].values())
    assert student.batch_spec.sequence_length == 8
    assert student.batch_spec.extras.state_shape == (None if core is None else (2, core))


def test_a_batch_says_how_often_there_is_an_update() -> None:
    assert BatchSpec(30, 0.75).fresh_count(96) == 24
    assert BatchSpec(30, 0.75).agent_steps_per_update(96) == 24 * 29
    assert BatchSpec(30, 0.95).fresh_count(96) == 5
    assert BatchSpec(30, 1.0).agent_steps_per_update(96) is None
    assert BatchSpec().agent_steps_per_update(96) is None


def test_the_trial_update_that_is_timed_is_one_of_sequences() -> None:
    entry = get_student("qdagger-muesli")
    config = override(
        preset("quick", student=entry.name), {"muesli.core_units": 8, "optimizer.batch_size": 2}
    )
    entry.trial_step(config, VECTOR, CPU, "fp32")()


def test_behaviour_from_what_is_stored_of_a_teacher() -> None:
    q, epsilon = torch.randn(40, 5), torch.rand(40)
    found = behaviour_log_policy(q, epsilon, "q_values", 0.1)
    for action in range(5):
        expected = greedy_policy_log_prob(q.argmax(dim=1), torch.full((40,), action), epsilon, 5)
        torch.testing.assert_close(found[:, action], expected)
    torch.testing.assert_close(found.exp().sum(dim=1), torch.ones(40))
    sampled = behaviour_log_policy(q, epsilon, "policy_logits", 2.0)
    torch.testing.assert_close(sampled, torch.log_softmax(q / 2, dim=1))
    assert behaviour_log_policy(q, torch.zeros(40), "q_values", 0.1).isfinite().all()


def test_presets_of_muesli() -> None:
    for name in ("quick", "default", "paper"):
        for student in ("muesli", "qdagger-muesli"):
            config = preset(name, student=student)
            assert RunConfig.from_dict(config.to_dict()) == config
    with pytest.raises(UserError, match="no preset 'cleanrl'; it has quick, default, paper"):
        preset("cleanrl", student="muesli")
    paper = preset("paper", scratch=True, student="muesli")
    assert (paper.muesli.core_units, paper.muesli.model_units, paper.muesli.unroll_steps) == (512, 1024, 5)
    assert (paper.optimizer.batch_size, paper.muesli.sequence_length) == (96, 30)
    assert paper.optimizer.schedule == "linear"
    assert preset("paper", scratch=True, student="dqn") == preset("paper", scratch=True)
    off = override(paper, {"muesli.cmpo": "false", "muesli.cmpo_clip": "none"}).muesli
    assert not off.cmpo
    assert off.clip == math.inf
    with pytest.raises(UserError, match=r"muesli.sequence_length must be at least 2"):
        override(paper, {"muesli.sequence_length": 1})
    with pytest.raises(UserError, match=r"did you mean 'muesli.cmpo_clip'"):
        override(paper, {"muesli.cmpo_clp": 1})
