"""Runs of other kinds: students and teachers of every sort, phases left out, several with one teacher."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from reincarnate.errors import UserError
from reincarnate.phases import evaluation
from reincarnate.phases.stage import Stage
from reincarnate.progress import Progress
from reincarnate.runner import Run
from reincarnate.sharing import lineage
from reincarnate.wording import number_text

from paths import SHARED_CHECKPOINTS, needs_checkpoints
from small_runs import TEACHER, quiet, read, same_tensors, scalar_steps, small_config, student_weights


def test_a_teacher_that_is_never_to_go_stays_to_the_last_step(cache: Path, tmp_path: Path) -> None:
    config = small_config(
        distill__stop_fraction=1.0, distill__window_games=1_000, offline__updates=10, online__agent_steps=301
    )
    result = Run.start(config, tmp_path / "run", quiet()).execute()
    assert result["phases"]["online"]["agent_steps"] >= 301  # the last vector step meets or passes the end
    assert result["distill"] == {"online_first": 1.0, "online_last": 1.0, "latched_at_agent_step": None}
    rows = read(tmp_path / "run", "curves.json")["coefficient"]
    assert {row["m"] for row in rows} == {1.0}


def test_a_run_without_an_online_phase_evaluates_its_student_once(cache: Path, tmp_path: Path) -> None:
    log = io.StringIO()
    config = small_config(online__agent_steps=0, offline__updates=40, offline__evaluations=1)
    document = Run.start(config, tmp_path / "run", Progress(stream=log)).execute()
    assert log.getvalue().count("evaluate student after offline") == 3  # its beginning, its end, its result
    assert "evaluate student after online" not in log.getvalue()
    student = document["student"]
    assert student["final_return"] == student["offline_return"] is not None
    evaluations = read(tmp_path / "run", "curves.json")["evaluations"]
    assert [(each["phase"], each["updates"]) for each in evaluations] == [("offline", 40), ("online", 0)]
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == ["offline-40.safetensors"]
    none = small_config(online__agent_steps=0, offline__updates=0, offline__evaluations=0)
    document = Run.start(none, tmp_path / "none", quiet()).execute()
    assert document["student"]["offline_return"] is None
    assert document["student"]["final_return"] is not None  # measured, as nobody has before


def test_closing_lines_have_the_last_evaluation_and_titles_say_when_it_was(
    cache: Path, tmp_path: Path
) -> None:
    log = io.StringIO()
    Run.start(small_config(), tmp_path / "run", Progress(stream=log, every_seconds=0.0)).execute()
    lines = log.getvalue().splitlines()
    step_of = {"offline": "updates", "online": "agent_steps"}
    evaluations = read(tmp_path / "run", "curves.json")["evaluations"]
    means = {(each["phase"], each[step_of[each["phase"]]]): each["return"]["mean"] for each in evaluations}
    for phase, unit in (("offline", "updates"), ("online", "agent steps")):
        steps = [step for each, step in means if each == phase]
        assert len(steps) == 2
        titles = [line for line in lines if line.startswith("evaluate student") and phase in line]
        assert any(
            line.startswith(f"evaluate student during {phase}, at {steps[0]:,} {unit} (") for line in titles
        )
        assert any(line.startswith(f"evaluate student after {phase} (") for line in titles)
        closing = next(line for line in lines if line.startswith(f"{phase}: ") and " in " in line)
        assert f"evaluation {number_text(means[phase, steps[1]])}" in closing
    assert "training return" in closing
    assert not any("return" in line for line in lines if line.startswith("offline: "))


def test_scratch_student_learns_by_the_same_loop_without_a_teacher(cache: Path, tmp_path: Path) -> None:
    config = small_config(None, "dqn", env__id="CartPole-v1")
    result = Run.start(config, tmp_path / "scratch", quiet()).execute()
    assert result["teacher"] is None
    assert result["student"]["offline_return"] is None
    assert result["student"]["final_return"]["n"] == 4
    assert result["distill"] == {"online_first": None, "online_last": None, "latched_at_agent_step": None}
    assert result["phases"]["online"]["updates"] == (result["phases"]["online"]["agent_steps"] - 100) // 4
    tags = scalar_steps(tmp_path / "scratch")
    assert "online/distill_loss" not in tags
    assert not (tmp_path / "scratch" / "teacher.json").exists()


def test_scratch_student_beside_a_teacher_is_measured_against_it(cache: Path, tmp_path: Path) -> None:
    config = small_config(TEACHER, "dqn", online__agent_steps=100, online__evaluations=1)
    log, folder = io.StringIO(), tmp_path / "scratch"
    result = Run.start(config, folder, Progress(stream=log)).execute()
    assert result["student"]["teacher_normalized"]["final"] is not None
    assert result["buffers"]["teacher"]["agent_steps"] == 0
    said = f"student dqn does not learn from a teacher: {TEACHER} is only measured beside it; "
    assert said + "qdagger-dqn learns from it" in log.getvalue().splitlines()
    assert result["teacher"]["learnt_from"] is False
    assert lineage.ancestors(folder, result) == []
    with safe_open(folder / "student.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["reincarnate"])["metadata"]["teacher"] is None
    card = (folder / "README.md").read_text()
    assert f"trained from scratch and measured beside the teacher `{TEACHER}`" in card
    assert "reincarnating-rl" not in card
    assert f"CartPole-v1: dqn, measured beside {TEACHER}" in (folder / "report.html").read_text()


def test_the_student_of_a_teacher_says_nothing_of_scratch(cache: Path, tmp_path: Path) -> None:
    log = io.StringIO()
    config = small_config(offline__updates=10, online__agent_steps=0)
    result = Run.start(config, tmp_path / "run", Progress(stream=log)).execute()
    assert "does not learn" not in log.getvalue()
    assert result["teacher"]["learnt_from"] is True
    assert len(lineage.ancestors(tmp_path / "run", result)) == 1


def test_qdagger_without_a_teacher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'qdagger-dqn' needs a teacher: pass --teacher REF"):
        Run.start(small_config(None), tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()


@needs_checkpoints
@pytest.mark.parametrize(
    "file", ["Breakout-ppo/ppo_atari_envpool.cleanrl_model", "Breakout-dqn/dqn_atari.cleanrl_model"]
)
def test_atari_teachers_of_both_kinds_run_through_all_phases(file: str, cache: Path, tmp_path: Path) -> None:
    config = small_config(
        str(SHARED_CHECKPOINTS / "own" / file),
        network="nature",
        evaluate__games=1,
        collect__agent_steps=200,
        offline__updates=4,
        offline__evaluations=1,
        online__agent_steps=160,
        online__learning_starts_agent_steps=100,
        online__agent_steps_per_update=4,
        online__evaluations=1,
        evaluate__teacher_act="epsilon=0.5",  # short games
        system__precision="fp32",
    )
    result = Run.start(config, tmp_path / "run", quiet()).execute()
    assert result["status"] == "done"
    assert result["phases"]["online"]["updates"] == (result["phases"]["online"]["agent_steps"] - 100) // 4
    losses = read(tmp_path / "run", "curves.json")["losses"]
    assert all(row["distill_loss"] > 0 for row in losses if row["phase"] == "offline")
    assert losses[-1]["phase"] == "online"
    assert losses[-1]["distill_loss"] is None  # m is latched at 0: the teacher is not asked any more
    student = result["student"]
    for moment, value in student["human_normalized"].items():  # of Breakout, published: 1.7 and 30.5
        assert math.isclose(value, (student[f"{moment}_return"]["mean"] - 1.7) / (30.5 - 1.7))
    assert set(student["human_normalized"]) == {"offline", "final"}
    scalars = set(scalar_steps(tmp_path / "run"))
    assert {f"{phase}/evaluation/human_normalized" for phase in ("offline", "online")} <= scalars


def test_teacher_temperature_is_that_of_its_kind(cache: Path, tmp_path: Path) -> None:
    run = Run.start(small_config(), tmp_path / "run", quiet())
    from reincarnate.phases.learner import Learner
    from reincarnate.replay import Replay

    replay = Replay(run.stage.spec, 1, 10, n_step=1, discount=0.99)
    assert Learner(run.stage, replay, True)._temperature == 0.1
    assert run.stage.teacher is not None
    object.__setattr__(run.stage.teacher.spec, "outputs", "policy_logits")
    assert Learner(run.stage, replay, True)._temperature == 1.0


def test_runs_with_one_teacher_seed_share_the_teachers_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))
    played: list[str] = []
    original = evaluation._evaluate

    def counted(stage: Stage, policy: Any, title: str, seed: int, generator: torch.Generator) -> Any:
        played.append(title.split(" (")[0])
        return original(stage, policy, title, seed, generator)

    monkeypatch.setattr(evaluation, "_evaluate", counted)
    short = {"offline__updates": 4, "offline__evaluations": 0, "online__agent_steps": 0, "teacher_seed": 7}

    def run(name: str, **changes: Any) -> dict[str, Any]:
        config = small_config(**{**short, "online__evaluations": 0, **changes})
        return Run.start(config, tmp_path / name, quiet()).execute()

    first, second, alone = run("first"), run("second", seed=2), run("alone", teacher_seed=8)
    assert played == ["evaluate teacher", "evaluate random play"] * 2
    assert second["teacher"]["return"] == first["teacher"]["return"] != alone["teacher"]["return"]
    assert second["random"] == first["random"] != alone["random"]
    assert [each["phases"]["collect"]["reused"] for each in (first, second, alone)] == [False, True, False]
    assert first["buffers"]["teacher"]["path"] == second["buffers"]["teacher"]["path"]
    assert not same_tensors(student_weights(tmp_path / "first"), student_weights(tmp_path / "second"))
    # A student does not depend on who measured the teacher: the same seed on a warm cache gives the same one.
    run("again")
    assert same_tensors(student_weights(tmp_path / "first"), student_weights(tmp_path / "again"))
    # Whatever stands in the cache and is not a measurement is measured again.
    for path in (tmp_path / "cache" / "shared-returns").glob("*.json"):
        path.write_text("{}")
    assert run("repaired")["teacher"]["return"] == first["teacher"]["return"]
