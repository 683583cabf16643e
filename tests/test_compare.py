"""The grid, the processes that run it, and what is left of it after kill -9."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from filelock import FileLock

from reincarnate import export_teacher
from reincarnate.cli import main
from reincarnate.comparison import compare
from reincarnate.comparison import grid as grids
from reincarnate.comparison.grid import Grid, plan
from reincarnate.device import visible_gpus
from reincarnate.errors import UserError
from reincarnate.launching.cell import cell_folder, state_of
from reincarnate.launching.local import GpuShares, LocalLauncher, thread_limits
from reincarnate.launching.work import Work
from reincarnate.phases import Stopped

from cell_programs import cells, starts, wait_for, write_cell_program
from compared_runs import make_run
from small_runs import SMALL, TEACHER, cli_options, read

BREAKOUT = "bundled/Breakout-dqn"
#: Stands in for `reincarnate run`: the seed says what it does.
FAKE = """
import json, pathlib, sys, time
args = sys.argv[1:]
value = lambda name: args[args.index(name) + 1]
resumed = "--resume" in args
run = pathlib.Path(value("--resume" if resumed else "--out"))
run.mkdir(parents=True, exist_ok=True)
with (run.parent.parent / "order.txt").open("a") as order:
    order.write(f"{'resume' if resumed else 'start'} {run.name}\\n")
(run / "config.json").write_text("{}")
seed = run.name.rpartition("s")[2]
if seed == "2" and not resumed:
    print("reincarnate: no room on the disk", file=sys.stderr)
    sys.exit(2)
if seed == "9":
    (run / "ready").touch()
    time.sleep(600)
(run / "result.json").write_text(json.dumps({"status": "done"}))
"""

#: A worker of Ray's, as far as a cell is concerned: it cancels its task when the cell is ready.
WORKER = """
import _thread, pathlib, pickle, sys, threading, time
from reincarnate.launching.work import run_cell
work, ready = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()), pathlib.Path(sys.argv[2])

def cancel():
    while not ready.exists():
        time.sleep(0.05)
    _thread.interrupt_main()

threading.Thread(target=cancel, daemon=True).start()
try:
    run_cell(work)
except KeyboardInterrupt:
    print("interrupted")
"""


def small_plan(**changes: object) -> Grid:
    options = {"preset": "quick", "env": None, "settings": SMALL, "announce": lambda line: None} | changes
    students = options.pop("students", ["qdagger-dqn"])
    return plan(options.pop("teachers", [TEACHER]), students, options.pop("seeds", [1, 2, 3]), **options)


@pytest.fixture
def fake(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "fake.py").write_text(FAKE)
    return (sys.executable, str(tmp_path / "fake.py"))


def order(folder: Path) -> list[str]:
    return (folder / "order.txt").read_text().split("\n")[:-1]


# ---------------------------------------------------------------- grid


def test_scratch_students_count_once_per_seed_and_teachers_share_their_part() -> None:
    grid = small_plan(students=["qdagger-dqn", "dqn"], seeds=[1, 2])
    names = [cell.name for cell in grid.cells]
    assert names == [
        "bundled-CartPole-dqn--qdagger-dqn--s1",
        "scratch--CartPole-v1--dqn--s1",
        "bundled-CartPole-dqn--qdagger-dqn--s2",
        "scratch--CartPole-v1--dqn--s2",
    ]
    for cell in grid.cells:
        assert "teacher_seed=1" in cell.arguments
        assert cell.arguments[cell.arguments.index("--seed") + 1] == str(cell.seed)
    assert [cell.teacher for cell in grid.cells[:2]] == [TEACHER, None]
    assert "--teacher" not in grid.cells[1].arguments
    assert "env.max_agent_steps=500" in grid.cells[1].arguments  # as its teacher's


def test_a_grid_comes_back_from_its_file(tmp_path: Path) -> None:
    grid = small_plan()
    grid.save(tmp_path)
    assert Grid.load(tmp_path) == grid
    (tmp_path / "grid.json").write_text('{"format": 1}')
    with pytest.raises(UserError, match="damaged"):
        Grid.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teachers": []}, "'qdagger-dqn' needs a teacher: pass --teacher REF"),
        ({"teachers": [TEACHER, TEACHER]}, "is given twice"),
        ({"students": ["dqn"]}, "no student in it learns from a teacher"),
        (
            {"students": ["dqn"], "teachers": [], "settings": {}},
            "the environment must be named: pass --env ID",
        ),
        ({"students": ["qdagger-dqm"]}, "did you mean 'qdagger-dqn'?"),
        ({"settings": {"td.nstep": 3}}, "did you mean 'td.n_step'?"),
        ({"settings": {"seed": 3}}, "pass it as --seeds"),
        ({"preset": "quik"}, "did you mean 'quick'?"),
        ({"seeds": [-1]}, "seed must be 0 or more, got -1"),
        ({"seeds": [1.5]}, "seed takes a value of type int, got 1.5"),
        ({"teachers": ["bundled/Nothing"]}, "no bundled teacher .Nothing."),
    ],
)
def test_what_no_run_would_accept_is_refused_before_any_starts(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        small_plan(**changes)


@pytest.mark.parametrize(
    ("teacher", "settings", "message"),
    [
        (
            TEACHER,
            {"network": "nature"},
            "qdagger-dqn from bundled/CartPole-dqn: the nature network takes obs",
        ),
        (TEACHER, {"env.preset": "machado"}, "env.preset is for runs without a teacher"),
        (TEACHER, {"env.sticky_probability": 0.25}, "env.sticky_probability does not apply to CartPole-v1"),
        (BREAKOUT, {"env.full_action_set": True}, "whose network has 4 actions"),
        (BREAKOUT, {"env.image_size": 96}, "env.image_size is for runs without a teacher"),
        (TEACHER, {"evaluate.student_act": "foo"}, "no acting rule 'foo'"),
        (TEACHER, {"evaluate.teacher_act": "foo"}, "no acting rule 'foo'"),
        (TEACHER, {"collect.teacher_data": "./nowhere"}, "no folder with teacher data"),
        (TEACHER, {"student": "dqn"}, "pass it as --student"),
        (TEACHER, {"preset": "paper"}, "pass it as --preset"),
        (TEACHER, {"muesli.unroll_steps": 3}, "student qdagger-dqn does not read it"),
        (TEACHER, {"system.device": "tpu"}, "system.device"),
        (TEACHER, {"system.device": "cpu", "system.buffer": "cuda"}, "--buffer cuda needs a CUDA learner"),
        (TEACHER, {"system.compress": "zlib", "system.buffer": "disk"}, "is for buffers in memory"),
    ],
)
def test_every_cell_is_checked_as_its_run_would_be(teacher: str, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        plan([teacher], ["qdagger-dqn"], [1], preset="quick", env=None, settings=settings, announce=print)
    assert "\n" not in str(raised.value)


def test_a_setting_of_none_is_none() -> None:
    grid = small_plan(settings=SMALL | {"collect.teacher_data": None, "muesli.cmpo_clip": None}, students=[
        "qdagger-dqn", "qdagger-muesli"], seeds=[1])  # fmt: skip
    assert [" ".join(cell.arguments).count("collect.teacher_data=none") for cell in grid.cells] == [1, 1]


def test_a_scratch_cell_is_checked_too() -> None:
    with pytest.raises(UserError, match="dqn from scratch: the nature network takes observations"):
        small_plan(students=["dqn"], teachers=[], env="CartPole-v1", settings={"network": "nature"})


def test_each_cell_gets_the_settings_that_its_student_reads() -> None:
    settings = SMALL | {"muesli.unroll_steps": 3, "td.n_step": 1}
    grid = small_plan(students=["qdagger-dqn", "qdagger-muesli", "dqn"], seeds=[1], settings=settings)
    given = [" ".join(cell.arguments) for cell in grid.cells]
    told = {
        name: [name in each for each in given] for name in ("muesli.", "td.n_step", "collect.", "online.")
    }
    assert told == {
        "muesli.": [False, True, False],
        "td.n_step": [True, False, True],
        "collect.": [True, True, False],
        "online.": [True, True, True],
    }


def test_a_device_that_only_this_machine_lacks_is_left_to_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reincarnate.device.has_cuda", lambda: False)
    settings = SMALL | {"system.device": "cuda"}
    with pytest.raises(UserError, match="no CUDA device"):
        small_plan(settings=settings)
    assert small_plan(settings=settings, here=False).cells


def test_combinations_are_checked_once_for_all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(grids, "refuse_unfit", lambda config, *rest: checked.append(config.student))
    small_plan(students=["qdagger-dqn", "dqn"], seeds=range(1, 20))
    assert checked == ["qdagger-dqn", "dqn"]


def test_one_policy_in_two_files_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    export_teacher(TEACHER, "native", copy)
    with pytest.raises(UserError, match=r"CartPole-dqn and .*copy\.safetensors are the same policy"):
        small_plan(teachers=[TEACHER, str(copy)])


def test_the_command_refuses_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["compare", *arguments])

    for arguments in (
        ["--teacher", "./nowhere.pt", "--out", str(tmp_path / "x")],
        ["--teacher", TEACHER, "--seeds", "0", "--out", str(tmp_path / "x")],
        ["--teacher", TEACHER, "--resume", str(tmp_path)],
        ["--resume", str(tmp_path)],
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, result.output
        assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "grid.json").write_text("{}")
    assert "already holds a comparison" in invoke("--teacher", TEACHER, "--out", str(tmp_path)).stderr


# ---------------------------------------------------------------- processes


def test_finished_cells_are_never_run_again_and_failed_ones_stop_nobody(
    tmp_path: Path, fake: tuple[str, ...]
) -> None:
    grid, said = small_plan(), []
    failed = LocalLauncher(tmp_path, 2, said.append, fake).run(grid.cells)
    one, two, three = (cell.name for cell in grid.cells)
    assert failed == {two: "no room on the disk"}
    assert [state_of(cell_folder(tmp_path, cell)) for cell in grid.cells] == ["done", "begun", "done"]
    assert f"{two}: failed: no room on the disk" in said
    assert LocalLauncher(tmp_path, 2, said.append, fake).run(grid.cells) == {}
    assert sorted(order(tmp_path)) == sorted(
        [f"start {name}" for name in (one, two, three)] + [f"resume {two}"]
    )


def test_the_command_ends_with_a_line_for_each_failed_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails.py").write_text("import sys; sys.exit('reincarnate: no room for ' + sys.argv[-1])")
    command = (sys.executable, str(tmp_path / "fails.py"))
    launcher = functools.partial(LocalLauncher, command=command)
    monkeypatch.setattr("reincarnate.launching.choice.LocalLauncher", launcher)
    out = tmp_path / "out"
    grid = small_plan()
    one, two, three = (cell_folder(out, cell) for cell in grid.cells)
    sha256 = grid.teachers[0]["sha256"]  # the first is finished already
    make_run(one, 480.0, teacher=500.0, random=20.0, ref=TEACHER, env="CartPole-v1", sha256=sha256)
    before = digests(one)
    options = ["--teacher", TEACHER, "--seeds", "3", "--preset", "quick", *cli_options(), "--out", str(out)]
    for arguments in (options, ["--resume", str(out)]):  # the failed ones are tried again
        result = CliRunner().invoke(main, ["compare", *arguments])
        assert result.exit_code == 2, result.output
        *failed, last = result.stderr.strip().splitlines()[-3:]
        assert [line.partition(": ")[0] for line in failed] == [two.name, three.name]
        assert all("no room for" in line for line in failed)
        assert last == f"reincarnate: 2 of 3 cells failed; try again with --resume {out}"
    assert digests(one) == before
    assert [cell["status"] for cell in read(out, "compare.json")["cells"]] == ["done", "failed", "failed"]


def test_a_cell_that_another_process_still_runs_is_waited_for(tmp_path: Path, fake: tuple[str, ...]) -> None:
    grid, said = small_plan(seeds=[1]), []
    run = cell_folder(tmp_path, grid.cells[0])
    run.mkdir(parents=True)
    lock = FileLock(run / "run.lock", thread_local=False)
    lock.acquire()

    def finish() -> None:
        (run / "config.json").write_text("{}")
        (run / "result.json").write_text('{"status": "done"}')
        lock.release()

    threading.Timer(1.0, finish).start()
    assert LocalLauncher(tmp_path, 1, said.append, fake).run(grid.cells) == {}
    assert not (tmp_path / "order.txt").exists()
    assert any("going on in another process" in line for line in said)


def test_a_killed_cell_is_told_stops_nobody_and_is_resumed(tmp_path: Path) -> None:
    """kill -9 of the process of a cell, while the comparison lives."""
    command, out, said = write_cell_program(tmp_path), tmp_path / "out", []
    out.mkdir()
    killed, other = grid = cells(7, 1)
    run = cell_folder(out, killed)

    def kill() -> None:
        wait_for((run / "ready").exists)
        os.kill(starts(out, killed)[0]["pid"], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    failed = LocalLauncher(out, 1, said.append, command).run(grid)
    assert failed == {killed.name: f"killed by signal 9, see {out / 'logs' / killed.name}.log"}
    assert [state_of(cell_folder(out, cell)) for cell in grid] == ["begun", "done"]
    before = digests(cell_folder(out, other))
    assert LocalLauncher(out, 1, said.append, command).run(grid) == {}
    assert [start["resumed"] for start in starts(out, killed)] == [False, True]
    assert digests(cell_folder(out, other)) == before


def test_a_cell_is_interrupted_where_its_process_was_born_deaf_to_ctrl_c(tmp_path: Path) -> None:
    """As workers of a cluster are that was started in the background; Ray cancels with interrupt_main()."""
    (cell,), out = cells(7), tmp_path / "out"
    for name in ("cells", "logs"):
        (out / name).mkdir(parents=True)
    (out / "grid.json").write_text("{}")
    work = Work(cell, str(out), {}, write_cell_program(tmp_path))
    (tmp_path / "work.pickle").write_bytes(pickle.dumps(work))
    worker = [
        sys.executable,
        "-c",
        WORKER,
        str(tmp_path / "work.pickle"),
        str(cell_folder(out, cell) / "ready"),
    ]
    process = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *worker],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert process.stdout.strip() == "interrupted"
    assert (cell_folder(out, cell) / "stopped").exists()  # asked to, at a safe point


def test_cells_of_one_teacher_wait_until_its_part_is_made(tmp_path: Path, fake: tuple[str, ...]) -> None:
    grid = small_plan(students=["qdagger-dqn", "dqn"], seeds=[9, 1])  # seed 9 collects for ever
    launcher = LocalLauncher(tmp_path, 3, lambda line: None, fake)
    ready = cell_folder(tmp_path, grid.cells[0]) / "ready"

    def stop() -> None:
        for _ in range(600):
            if ready.exists() and len(order(tmp_path)) == 3:
                break
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop).start()
    with pytest.raises(Stopped):
        launcher.run(grid.cells)
    started = {line.removeprefix("start ") for line in order(tmp_path)}
    assert started == {cell.name for cell in grid.cells} - {grid.cells[2].name}
    assert state_of(cell_folder(tmp_path, grid.cells[3])) == "done"  # from scratch, it waits for nobody


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert thread_limits(1) == {}
    assert thread_limits(2)["OMP_NUM_THREADS"] == thread_limits(2)["REINCARNATE_CORES"] == "4"
    assert thread_limits(50)["MKL_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert thread_limits(2)["OMP_NUM_THREADS"] == "2"
    assert thread_limits(1, cpus=3)["REINCARNATE_CORES"] == "3"


def test_cells_see_a_gpu_each_those_that_the_fewest_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed: what a cell sees is a variable of its process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    command, grid = write_cell_program(tmp_path), small_plan(seeds=[1, 3, 4, 5])
    out = tmp_path / "out"
    out.mkdir()
    free = [dataclasses.replace(cell, teacher=None) for cell in grid.cells]  # nobody waits for a D_T
    assert LocalLauncher(out, 4, lambda line: None, command).run(free) == {}
    seen = []
    for cell in free:
        lines = (cell_folder(out, cell) / "starts.jsonl").read_text().splitlines()
        seen.append(json.loads(lines[0])["env"]["CUDA_VISIBLE_DEVICES"])
    assert seen == ["GPU-a", "GPU-b", "GPU-a", "GPU-b"]


def test_shares_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    three = GpuShares(["0", "1", "2"], None)
    assert three.take([]) == ("0",)
    assert three.take([("0",), ("1",), ("2",), ("0",), ("2",)]) == ("1",)  # the one whose cells ended first
    assert GpuShares(["0", "1", "2"], 2).take([("0", "1")]) == ("2", "0")
    assert GpuShares(["0", "1"], 0.5).take([("0",)]) == ("1",)
    assert GpuShares(["0", "1"], 0).environment(()) == {"CUDA_VISIBLE_DEVICES": ""}
    assert GpuShares([], None).environment(GpuShares([], None).take([])) == {}
    with pytest.raises(UserError, match="--gpus-per-cell 2: this machine has 1 GPU; ask for fewer"):
        GpuShares(["0"], 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", " 3, 5 ,-1")
    assert visible_gpus() == ("3", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


# ---------------------------------------------------------------- the real thing


def test_killed_in_the_middle_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of the comparison and of the cell it runs: what was finished stays as it is, to the byte."""
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "reincarnate", "compare"]
    small = SMALL | {"online.agent_steps": 300, "evaluate.games": 4, "system.checkpoint_every_seconds": 0.2}
    options = ["--teacher", TEACHER, "--seeds", "2", "--preset", "quick", *cli_options(small)]
    process = subprocess.Popen([*command, *options, "--out", str(out)], stderr=subprocess.DEVNULL)
    first, second = (out / "cells" / f"bundled-CartPole-dqn--qdagger-dqn--s{seed}" for seed in (1, 2))
    wait_for(lambda: (second / "checkpoint" / "state.json").exists(), 600.0)
    for victim in (process.pid, *children(process.pid)):  # listed before the first dies
        os.kill(victim, signal.SIGKILL)
    process.wait()
    assert read(first, "result.json")["status"] == "done"
    assert read(second, "result.json")["status"] == "running"
    before = digests(first)
    resumed = subprocess.run(
        [*command, "--resume", str(out), "--json"], capture_output=True, text=True, timeout=600, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert digests(first) == before
    assert "resuming" in (out / "logs" / f"{second.name}.log").read_text()
    document = json.loads(resumed.stdout)
    assert [(cell["seed"], cell["status"]) for cell in document["cells"]] == [(1, "done"), (2, "done")]
    one, two = (read(run, "result.json") for run in (first, second))
    assert one["teacher"]["return"] == two["teacher"]["return"]
    assert two["phases"]["collect"]["reused"]
    assert document["teachers"][0]["return"] == one["teacher"]["return"]
    assert document["summary"][0]["n"] == 2
    assert (out / "compare.html").is_file()


def children(parent: int) -> list[int]:
    """Its child processes; only processes that this test started are ever looked at."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_library_gives_what_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLauncher, "run", lambda self, cells: {cells[0].name: "no room"})
    found = compare([TEACHER], seeds=[5], preset="quick", settings=SMALL, out=tmp_path / "out")
    assert found.document["cells"][0]["status"] == "failed"
    assert found.document == read(tmp_path / "out", "compare.json")
    assert found.failed == {found.document["cells"][0]["run"].removeprefix("cells/"): "no room"}
