"""A run from its start to its result, and stopped and resumed; one finished run serves most of the file."""

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
from reincarnate.phases import Stopped
from reincarnate.phases.stage import Stage
from reincarnate.progress import Progress
from reincarnate.runner import Run

from small_runs import quiet, read, same_tensors, scalar_steps, small_config, stopping, student_weights


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    Run.start(small_config(), folder, quiet()).execute()
    return folder


RETURN = {"mean", "std", "n", "ci95", "returns"}
CONTRACT: dict[str, Any] = {
    "format": None,
    "status": None,
    "env": None,
    "teacher": {
        "ref", "resolved", "revision", "sha256", "format", "learnt_from", "act", "return", "reported",
    },
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
    assert "online/evaluation/human_normalized" not in tags  # no game of Atari's
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
    log = io.StringIO()
    result = Run.start(small_config(), tmp_path / "again", Progress(stream=log)).execute()
    assert result["phases"]["collect"]["reused"]
    steps = result["phases"]["collect"]["agent_steps"]
    assert f"collect: {steps} agent steps found, nothing left to do" in log.getvalue().splitlines()
    assert result["phases"]["collect"]["agent_steps_per_s"] is None
    assert same_tensors(student_weights(tmp_path / "again"), student_weights(finished))
    after = {path: path.stat().st_mtime_ns for path in before}
    changed = [path for path in before if after[path] != before[path] and path.is_file()]
    assert [path.name for path in changed if path.name != "lock"] == []


def test_another_seed_gives_another_student(finished: Path, cache: Path, tmp_path: Path) -> None:
    config = small_config(seed=2, offline__evaluations=0, online__agent_steps=0, online__evaluations=0)
    Run.start(config, tmp_path / "other", quiet()).execute()
    assert not same_tensors(student_weights(tmp_path / "other"), student_weights(finished))


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


# ---------------------------------------------------------------- stop and resume


# The first update; in the middle of the offline phase; the first and a middle step of the online phase.
@pytest.mark.parametrize("point", [1, 77, 121, 200])
def test_a_stopped_run_goes_on_where_it_was(finished: Path, cache: Path, tmp_path: Path, point: int) -> None:
    folder = tmp_path / "run"
    with stopping(point), pytest.raises(Stopped):
        Run.start(small_config(), folder, quiet()).execute()
    assert read(folder, "result.json")["status"] == "stopped"
    stopped = read(folder, "checkpoint/state.json")["state"]
    log = io.StringIO()
    result = Run.resume(folder, Progress(stream=log)).execute()
    assert result["status"] == "done"
    [estimated] = [line for line in log.getvalue().splitlines() if line.startswith("about ")]
    assert " left on this machine (" in estimated
    assert ("offline" in estimated, "online" in estimated) == (point <= 120, True)
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
    assert same_tensors(old["network"], new["network"])
    assert same_tensors(old["target"], new["target"])
    for key, values in old["optimizer"]["state"].items():
        assert same_tensors(values, new["optimizer"]["state"][key])


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


def test_a_run_that_lost_its_teacher_record_is_not_resumed_with_whatever_is_there(
    finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    (folder / "teacher.json").unlink()
    with pytest.raises(UserError, match=r"teacher\.json is missing; put it back or start a new run"):
        Run.resume(folder, quiet())
