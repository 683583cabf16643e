"""Cells as a job array: submitit's real script and pickles, run by programs that stand in for Slurm's."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from reincarnate.comparison import Launch
from reincarnate.errors import UserError
from reincarnate.launching.cell import cell_folder, state_of
from reincarnate.launching.on_slurm import SlurmLauncher, _minutes

from cell_programs import (
    cells,
    check_compare_command,
    comparison_folder,
    starts,
    wait_for,
    write_cell_program,
    write_slurm,
)

submitit = pytest.importorskip("submitit")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster; its state."""
    home = tmp_path / "cluster"
    home.mkdir()
    monkeypatch.setenv("PATH", f"{write_slurm(home)}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(home))
    monkeypatch.setattr(submitit.SlurmJob, "watcher", submitit.slurm.slurm.SlurmInfoWatcher(delay_s=1))
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return comparison_folder(tmp_path)


def test_an_array_runs_every_cell_and_tells_the_failed_ones(
    slurm: Path, folder: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    options = {"partition": "gpu", "time": "2:30:00", "exclusive": ""}
    launcher = SlurmLauncher(
        folder, said.append, jobs=2, cpus=3, gpus=1, options=options,
        environment={"REINCARNATE_CACHE": "/shared/cache"}, command=write_cell_program(tmp_path),
    )  # fmt: skip
    three = cells(1, 2, 3)
    assert launcher.run(three) == {"a--s2": "no room on the disk"}
    script = (slurm / "job-1000" / "script.sh").read_text().splitlines()
    expected = {
        "array=0-2%2",
        "partition=gpu",
        "time=150",
        "cpus-per-task=3",
        "gpus-per-node=1",
        "job-name=out",
    }
    assert {f"#SBATCH --{each}" for each in expected} <= set(script)
    assert "#SBATCH --exclusive" in script
    assert any(line.startswith("srun ") and "submitit.core._submit" in line for line in script)
    assert [state_of(cell_folder(folder, cell)) for cell in three] == ["done", "begun", "done"]
    env = starts(folder, three[0])[0]["env"]
    assert (env["OMP_NUM_THREADS"], env["REINCARNATE_CORES"]) == ("3", "3")
    assert env["REINCARNATE_CACHE"] == "/shared/cache"
    assert "job 1000 submitted: 3 of 3 cells" in said[0]
    # Once more: the finished ones are left alone, the failed one is a job of its own and is resumed.
    again = SlurmLauncher(folder, said.append, command=write_cell_program(tmp_path))
    assert again.run(three) == {}
    assert [start["resumed"] for start in starts(folder, three[1])] == [False, True]
    assert len(starts(folder, three[0])) == 1
    assert "--array" not in (slurm / "job-1001" / "script.sh").read_text()


def test_a_cell_at_its_time_limit_is_stopped_and_queued_again(
    slurm: Path, folder: Path, tmp_path: Path
) -> None:
    """Slurm warns with SIGUSR2 before it ends a job: the run stops where it can be resumed."""
    launcher = SlurmLauncher(folder, lambda line: None, command=write_cell_program(tmp_path))
    (cell,) = cells(7)
    run = cell_folder(folder, cell)

    def warn() -> None:
        wait_for((run / "ready").exists)
        os.kill(int((slurm / "pid-1000").read_text()), signal.SIGUSR2)

    threading.Thread(target=warn, daemon=True).start()
    assert launcher.run([cell]) == {}
    assert (run / "stopped").exists()
    assert [start["resumed"] for start in starts(folder, cell)] == [False, True]


def test_jobs_that_are_in_the_queue_are_not_submitted_again(
    slurm: Path, folder: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    command, (cell,) = write_cell_program(tmp_path), cells(7)
    run = cell_folder(folder, cell)
    assert SlurmLauncher(folder, said.append, wait=False, command=command).run([cell]) == {}
    wait_for((run / "ready").exists)
    pid = starts(folder, cell)[0]["pid"]

    def finish() -> None:
        (run / "result.json").write_text('{"status": "done"}')
        os.kill(pid, signal.SIGKILL)

    threading.Timer(1.0, finish).start()
    assert SlurmLauncher(folder, said.append, command=command).run([cell]) == {}
    assert "1 cells are in Slurm's queue already; waiting for them" in said
    assert len(list(slurm.glob("job-*"))) == 1


def test_a_job_that_slurm_ends_is_told(slurm: Path, folder: Path, tmp_path: Path) -> None:
    launcher = SlurmLauncher(folder, lambda line: None, command=write_cell_program(tmp_path))
    (cell,) = cells(7)

    def kill() -> None:
        wait_for((cell_folder(folder, cell) / "ready").exists)
        os.kill(int((slurm / "pid-1000").read_text()), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    assert "job 1000 ended as FAILED" in launcher.run([cell])["a--s7"]
    wait_for((cell_folder(folder, cell) / "stopped").exists)  # the cell does not work on alone


def test_what_slurm_refuses_is_one_line(slurm: Path, folder: Path) -> None:
    launcher = SlurmLauncher(folder, lambda line: None, options={"partition": "refuse"})
    with pytest.raises(UserError, match=r"Slurm refused the job: .*invalid partition"):
        launcher.run(cells(1))


def test_without_slurm_or_with_options_of_another_launcher(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="needs sbatch"):
        SlurmLauncher(folder, lambda line: None).run(cells(1))
    with pytest.raises(UserError, match="whole GPUs"):
        SlurmLauncher(folder, lambda line: None, gpus=0.5)
    with pytest.raises(UserError, match="--slurm goes with --launcher slurm"):
        Launch(slurm={"time": "5"})
    with pytest.raises(UserError, match="no launcher 'moon'"):
        Launch("moon")  # type: ignore[arg-type]


def test_time_limits_in_every_form_of_slurms() -> None:
    texts = {"90": 90, "90:30": 90, "2:30:00": 150, "1-12": 2160, "1-0:30": 1470, "0:0:20": 1}
    assert {text: _minutes(text) for text in texts} == texts
    with pytest.raises(UserError, match="no time of Slurm's"):
        _minutes("soon")


def test_the_command_gives_finished_cells(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing but for Slurm: two cells, each `reincarnate run` in a task of the array."""
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))
    where = ["--launcher", "slurm", "--jobs", "1", "--cpus-per-cell", "1"]
    check_compare_command(tmp_path / "out", *where)
    assert "#SBATCH --array=0-1%1" in (slurm / "job-1000" / "script.sh").read_text()
