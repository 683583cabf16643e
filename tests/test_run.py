import io
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import reincarnate
from reincarnate import runfiles
from reincarnate.errors import UserError
from reincarnate.phases import Stopped, evaluation
from reincarnate.phases.stage import Stage
from reincarnate.progress import Progress
from reincarnate.runner import Run

from paths import SHARED_CHECKPOINTS, needs_checkpoints
from small_runs import TEACHER, quiet, read, scalar_steps, small_config, stopping


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    """Teacher data of this module's runs, shared as a user's cache is."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REINCARNATE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    Run.start(small_config(), folder, quiet()).execute()
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return reincarnate.load_teacher(str(folder)).network.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


RETURN = {"mean", "std", "n", "ci95", "returns"}
CONTRACT: dict[str, Any] = {
    "format": None,
    "status": None,
    "env": None,
    "teacher": {"ref", "resolved", "revision", "sha256", "format", "act", "return", "reported"},
    "random": RETURN,
    "student": {
        "name", "act", "offline_return", "final_return", "teacher_normalized", "human_normalized",
    },
    "buffers": {"teacher", "student"},
    "phases": {"evaluate", "collect", "offline", "online"},
    "distill": {"online_first", "online_last", "latched_at_agent_step"},
    "device": None,
    "precision": None,
    "seed": None,
    "versions": None,
}  # fmt: skip


def test_result_keeps_the_contract(finished: Path) -> None:
    result = read(finished, "result.json")
    assert set(result) == set(CONTRACT)
    for name, keys in CONTRACT.items():
        assert keys is None or set(result[name]) == keys, name
    assert (result["status"], result["env"], result["seed"]) == ("done", "CartPole-v1", 1)
    assert (result["teacher"]["act"], result["student"]["act"]) == ("epsilon=0.01", "epsilon=0.01")
    for returns in (result["teacher"]["return"], result["random"], result["student"]["final_return"]):
        assert set(returns) == RETURN
        assert len(returns["returns"]) == returns["n"] == 4
    assert set(result["phases"]["collect"]) == {"seconds", "agent_steps", "agent_steps_per_s", "reused"}
    assert set(result["phases"]["offline"]) == {"seconds", "updates", "updates_per_s"}
    assert set(result["phases"]["online"]) == {"seconds", "agent_steps", "updates", "agent_steps_per_s"}
    assert result["phases"]["offline"]["updates"] == 120
    scale = result["teacher"]["return"]["mean"] - result["random"]["mean"]
    final = (result["student"]["final_return"]["mean"] - result["random"]["mean"]) / scale
    assert math.isclose(result["student"]["teacher_normalized"]["final"], final)
    assert result["student"]["human_normalized"] == {"offline": None, "final": None}  # no game of Atari's


def test_updates_and_agent_steps_keep_their_exact_ratio(finished: Path) -> None:
    online = read(finished, "result.json")["phases"]["online"]
    assert 600 <= online["agent_steps"] < 604
    assert online["updates"] == (online["agent_steps"] - 100) // 4


def test_a_teacher_that_is_never_to_go_stays_to_the_last_step(cache: Path, tmp_path: Path) -> None:
    config = small_config(
        distill__stop_fraction=1.0, distill__window_games=1_000, offline__updates=10, online__agent_steps=301
    )
    result = Run.start(config, tmp_path / "run", quiet()).execute()
    assert result["phases"]["online"]["agent_steps"] > 301  # the last vector step passes the end
    assert result["distill"] == {"online_first": 1.0, "online_last": 1.0, "latched_at_agent_step": None}
    rows = read(tmp_path / "run", "curves.json")["coefficient"]
    assert {row["m"] for row in rows} == {1.0}


def test_the_teacher_buffer_is_where_the_result_says(finished: Path, cache: Path) -> None:
    buffer = read(finished, "result.json")["buffers"]["teacher"]
    folder = (finished / buffer["path"]).resolve()
    assert folder.parent == (cache / "teacher-data").resolve()
    assert read(folder, "manifest.json")["complete"]
    assert 600 <= buffer["agent_steps"] < 604


def test_every_file_of_the_run_directory_is_there(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {
        "config.json",
        "teacher.json",
        "result.json",
        "curves.json",
        "curves.png",
        "report.html",
        "student.safetensors",
        "README.md",
        "checkpoint",
        "snapshots",
    } <= names
    snapshots = {path.name for path in (finished / "snapshots").iterdir()}
    assert {"offline-60.safetensors", "offline-120.safetensors"} <= snapshots
    assert sum(name.startswith("online-") for name in snapshots) == 2
    assert not [name for name in names if name.startswith(".")]  # nothing half-written


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


def test_evaluations_come_at_the_presets_points(finished: Path) -> None:
    points = [(e["phase"], e["updates"]) for e in read(finished, "curves.json")["evaluations"]]
    assert points[:2] == [("offline", 60), ("offline", 120)]
    assert [phase for phase, _ in points] == ["offline", "offline", "online", "online"]


def test_tensorboard_has_what_a_user_would_plot(finished: Path) -> None:
    tags = set(scalar_steps(finished))
    for name in ("td_loss", "distill_loss", "loss", "q_mean", "q_max", "teacher_agreement"):
        assert {f"offline/{name}", f"online/{name}"} <= tags
    assert {"online/m", "online/epsilon", "online/updates", "online/game_return"} <= tags
    assert {"offline/evaluation/return", "online/evaluation/teacher_normalized"} <= tags
    assert any("hparams" in tag for tag in tags)


def test_the_student_is_the_next_runs_teacher(finished: Path, cache: Path, tmp_path: Path) -> None:
    config = small_config(str(finished), offline__evaluations=0, online__evaluations=0, network="mlp")
    result = Run.start(config, tmp_path / "child", quiet()).execute()
    assert result["teacher"]["format"] == "native"
    assert result["teacher"]["sha256"] == read(tmp_path / "child", "teacher.json")["sha256"]
    assert result["teacher"]["reported"]["n"] == 4
    assert result["student"]["final_return"] is None


def test_the_same_seed_gives_the_same_student_and_reuses_the_teacher_data(
    finished: Path, cache: Path, tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.suffix != ".lock"}
    result = Run.start(small_config(), tmp_path / "again", quiet()).execute()
    assert result["phases"]["collect"]["reused"]
    assert result["phases"]["collect"]["agent_steps_per_s"] is None
    assert same(weights(tmp_path / "again"), weights(finished))
    after = {path: path.stat().st_mtime_ns for path in before}
    changed = [path for path in before if after[path] != before[path] and path.is_file()]
    assert [path.name for path in changed if path.name != "lock"] == []


def test_another_seed_gives_another_student(finished: Path, cache: Path, tmp_path: Path) -> None:
    config = small_config(seed=2, offline__evaluations=0, online__agent_steps=0, online__evaluations=0)
    Run.start(config, tmp_path / "other", quiet()).execute()
    assert not same(weights(tmp_path / "other"), weights(finished))


# ---------------------------------------------------------------- stop and resume


# The first update; in the middle of the offline phase; the first and a middle step of the online phase.
@pytest.mark.parametrize("point", [1, 77, 121, 200])
def test_a_stopped_run_goes_on_where_it_was(finished: Path, cache: Path, tmp_path: Path, point: int) -> None:
    folder = tmp_path / "run"
    with stopping(point), pytest.raises(Stopped):
        Run.start(small_config(), folder, quiet()).execute()
    assert read(folder, "result.json")["status"] == "stopped"
    stopped = read(folder, "checkpoint/state.json")["state"]
    result = Run.resume(folder, quiet()).execute()
    assert result["status"] == "done"
    # Finished phases are not repeated: their returns are the uninterrupted run's, every point is there once.
    expected = read(finished, "result.json")
    assert result["teacher"]["return"] == expected["teacher"]["return"]
    assert result["random"] == expected["random"]
    assert result["student"]["offline_return"] == expected["student"]["offline_return"]
    assert result["phases"]["offline"]["updates"] == 120
    online = result["phases"]["online"]
    assert online["updates"] == (online["agent_steps"] - 100) // 4
    evaluations = read(folder, "curves.json")["evaluations"]
    assert [e["phase"] for e in evaluations] == ["offline", "offline", "online", "online"]
    if point > 120:
        vector_steps = point - 121
        assert 3.9 * vector_steps <= stopped["online"]["agent_steps"] <= 4 * vector_steps  # resets are none
    for tag, steps in scalar_steps(folder).items():
        assert steps == sorted(steps), tag
    # Up to the end of the offline phase nothing depends on the interruption, to the last bit.
    name = "snapshots/offline-120.safetensors"
    assert (folder / name).read_bytes() == (finished / name).read_bytes()


def test_resume_restores_buffer_window_and_counters(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Run.start(small_config(), folder, quiet())
    with stopping(240), pytest.raises(Stopped):
        run.execute()
    resumed = Run.resume(folder, quiet())
    before, after = run.record.student_data, resumed.record.student_data
    assert before is not None
    assert after is not None
    assert after.agent_steps == before.agent_steps > 0
    generator = torch.Generator().manual_seed(0)
    drawn = before.sample(64, generator), after.sample(64, torch.Generator().manual_seed(0))
    assert all(torch.equal(getattr(drawn[0], name), getattr(drawn[1], name)) for name in ("obs", "reward"))
    assert run.record.coefficient is not None
    assert resumed.record.coefficient is not None
    assert resumed.record.coefficient.state_dict() == run.record.coefficient.state_dict()
    assert resumed.record.online == run.record.online
    assert torch.equal(run.stage.generator.get_state(), resumed.stage.generator.get_state())
    old, new = run.stage.student.state_dict(), resumed.stage.student.state_dict()
    assert same(old["network"], new["network"])
    assert same(old["target"], new["target"])
    for key, values in old["optimizer"]["state"].items():
        assert same(values, new["optimizer"]["state"][key])


def test_a_stopped_collection_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))
    folder, log = tmp_path / "run", io.StringIO()
    original = Stage.stop_point
    steps = 0

    def stop_point(stage: Stage) -> None:
        nonlocal steps
        if "collect" not in str(stage.progress) and stage.random_return is not None:
            steps += 1
            if steps == 50:
                monkeypatch.setattr(stage, "stop_requested", lambda: True)
        original(stage)

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "stop_point", stop_point)
        with pytest.raises(Stopped):
            Run.start(small_config(), folder, Progress(stream=log)).execute()
    assert log.getvalue().splitlines()[-1] == f"stopped; `reincarnate run --resume {folder}` goes on with it"
    (data,) = (tmp_path / "cache" / "teacher-data").iterdir()
    partial = read(data, "manifest.json")
    assert not partial["complete"]
    assert 0 < partial["agent_steps"] <= 200
    result = Run.resume(folder, quiet()).execute()
    whole = read(data, "manifest.json")
    assert whole["complete"]
    assert whole["segments"][: len(partial["segments"])] == partial["segments"]
    assert 600 <= result["buffers"]["teacher"]["agent_steps"] < 604


def test_a_finished_run_is_not_repeated(finished: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    before = (folder / "student.safetensors").read_bytes()
    result = reincarnate.resume(folder, progress=quiet())
    assert result.document["status"] == "done"
    assert result.document["student"] == read(finished, "result.json")["student"]
    assert (folder / "student.safetensors").read_bytes() == before


def test_a_damaged_checkpoint_is_one_clear_line(finished: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    (tensors,) = (folder / "checkpoint").glob("tensors-*.pt")
    tensors.write_bytes(tensors.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"tensors-\d+.pt is missing or damaged .*start a new run"):
        Run.resume(folder, quiet())


def test_a_changed_teacher_is_noticed(finished: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    record = (folder / "teacher.json").read_text()
    sha256 = read(folder, "teacher.json")["sha256"]
    (folder / "teacher.json").write_text(record.replace(sha256, "0" * 64))
    with pytest.raises(UserError, match=r"teacher of .* has changed since the run began"):
        Run.resume(folder, quiet())


# ---------------------------------------------------------------- other students and teachers


def test_a_run_that_was_made_while_another_one_prepared_is_not_written_over(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock = tmp_path / "run", runfiles.lock

    def late(where: Path) -> FileLock:
        shutil.copytree(finished, folder, dirs_exist_ok=True)
        return lock(where)

    monkeypatch.setattr(runfiles, "lock", late)
    with pytest.raises(UserError, match="already holds a run"):
        Run.start(small_config(seed=5), folder, quiet())
    assert read(folder, "config.json") == read(finished, "config.json")


def test_a_run_that_lost_its_teacher_record_is_not_resumed_with_whatever_is_there(
    finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    (folder / "teacher.json").unlink()
    with pytest.raises(UserError, match=r"teacher\.json is missing; put it back or start a new run"):
        Run.resume(folder, quiet())


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
    result = Run.start(config, tmp_path / "scratch", quiet()).execute()
    assert result["student"]["teacher_normalized"]["final"] is not None
    assert result["buffers"]["teacher"]["agent_steps"] == 0


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


def test_teacher_temperature_is_that_of_its_kind(cache: Path, tmp_path: Path) -> None:
    run = Run.start(small_config(), tmp_path / "run", quiet())
    from reincarnate.phases.learner import Learner
    from reincarnate.replay import Replay

    replay = Replay(run.stage.spec, 1, 10, n_step=1, discount=0.99)
    assert Learner(run.stage, replay, True)._temperature == 0.1
    assert run.stage.teacher is not None
    object.__setattr__(run.stage.teacher.spec, "outputs", "policy_logits")
    assert Learner(run.stage, replay, True)._temperature == 1.0


# ---------------------------------------------------------------- runs that are compared


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
    assert not same(weights(tmp_path / "first"), weights(tmp_path / "second"))
    # A student does not depend on who measured the teacher: the same seed on a warm cache gives the same one.
    run("again")
    assert same(weights(tmp_path / "first"), weights(tmp_path / "again"))
    # Whatever stands in the cache and is not a measurement is measured again.
    for path in (tmp_path / "cache" / "shared-returns").glob("*.json"):
        path.write_text("{}")
    assert run("repaired")["teacher"]["return"] == first["teacher"]["return"]
