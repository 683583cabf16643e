"""What stands in for `reincarnate run` and for Slurm's programs in tests of launchers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from reincarnate.cli import main
from reincarnate.launching.cell import Cell, cell_folder
from reincarnate.runfiles import GRID_FILE

from small_runs import SMALL, TEACHER, cli_options, read

#: `reincarnate run`: the seed says what it does. 2 fails at first; 7 works until it is stopped, and ends when
#: it is resumed; all others are finished at once.
CELL = """
import json, os, pathlib, signal, sys, time
args = sys.argv[1:]
value = lambda name: args[args.index(name) + 1]
resumed = "--resume" in args
run = pathlib.Path(value("--resume" if resumed else "--out"))
run.mkdir(parents=True, exist_ok=True)
kept = ("OMP_NUM_THREADS", "REINCARNATE_CORES", "REINCARNATE_CACHE", "CUDA_VISIBLE_DEVICES")
env = {name: os.environ.get(name) for name in kept}
began = {"resumed": resumed, "pid": os.getpid(), "parent": os.getppid(), "env": env}
with (run / "starts.jsonl").open("a") as starts:
    starts.write(json.dumps(began) + "\\n")
(run / "config.json").write_text("{}")
seed = run.name.rpartition("s")[2]
if seed == "2" and not resumed:
    print("reincarnate: no room on the disk", file=sys.stderr)
    sys.exit(2)
if seed == "7" and not resumed:
    signal.signal(signal.SIGTERM, lambda *_: ((run / "stopped").touch(), sys.exit(130)))
    (run / "ready").touch()
    time.sleep(600)
(run / "result.json").write_text(json.dumps({"status": "done"}))
"""

_SBATCH = """
import os, pathlib, re, shutil, subprocess, sys
home = pathlib.Path(os.environ["FAKE_SLURM"])
number = 1000 + len(list(home.glob("job-*")))
job = home / f"job-{number}"
job.mkdir()
shutil.copy(sys.argv[1], job / "script.sh")
if "refuse" in (job / "script.sh").read_text():
    print("sbatch: error: invalid partition specified", file=sys.stderr)
    sys.exit(1)
subprocess.Popen([sys.executable, home / "slurmd.py", job], start_new_session=True,
                 stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(f"Submitted batch job {number}")
"""
_SLURMD = """
import os, pathlib, re, subprocess, sys
job = pathlib.Path(sys.argv[1])
number = job.name.partition("-")[2]
script = (job / "script.sh").read_text()
array = re.search(r"--array=0-(\\d+)%", script)
for task in range(int(array[1]) + 1) if array else [None]:
    name = f"{number}_{task}" if array else number
    env = os.environ | {"SLURM_JOB_ID": name.replace("_", "9"), "SLURM_NTASKS": "1", "SLURM_PROCID": "0",
                        "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1", "FAKE_NAME": name}
    if array:
        env |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(task)}
    state = job / f"state-{name}"
    while True:
        state.write_text("RUNNING")
        code = subprocess.call(["bash", job / "script.sh"], env=env)
        again = job / f"requeue-{name}"
        if not again.exists():
            break
        again.unlink()
    state.write_text("COMPLETED" if code == 0 else "FAILED")
"""
_SRUN = """
import os, sys
arguments = sys.argv[1:]
def option(name):
    at = arguments.index(name)
    path = arguments[at + 1]
    del arguments[at:at + 2]
    name = os.environ["FAKE_NAME"]
    return path.replace("%A_%a", name).replace("%j", name).replace("%t", "0")
for handle, name in ((1, "--output"), (2, "--error")):
    os.dup2(os.open(option(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), handle)
arguments.remove("--unbuffered")
home = os.environ["FAKE_SLURM"]
open(f"{home}/pid-{os.environ['FAKE_NAME']}", "w").write(str(os.getpid()))
os.execvp(arguments[0], arguments)
"""
_SACCT = """
import os, pathlib, sys
print("JobID|State|NodeList")
for state in pathlib.Path(os.environ["FAKE_SLURM"]).glob("job-*/state-*"):
    print(f"{state.name.partition('-')[2]}|{state.read_text()}|node1")
"""
_SCONTROL = """
import os, pathlib, sys
assert sys.argv[1] == "requeue"
number = sys.argv[2].partition("_")[0]
(pathlib.Path(os.environ["FAKE_SLURM"]) / f"job-{number}" / f"requeue-{sys.argv[2]}").touch()
"""
_PROGRAMS = {"sbatch": _SBATCH, "srun": _SRUN, "sacct": _SACCT, "scontrol": _SCONTROL}


def cells(*seeds: int) -> list[Cell]:
    """Cells of these seeds that wait for no teacher."""
    return [
        Cell(f"a--s{seed}", None, "dqn", "CartPole-v1", seed, False, ("--seed", str(seed))) for seed in seeds
    ]


def starts(folder: Path, cell: Cell) -> list[dict[str, Any]]:
    """What the stand-in noted each time it was started for the cell."""
    return [
        json.loads(line) for line in (cell_folder(folder, cell) / "starts.jsonl").read_text().splitlines()
    ]


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def comparison_folder(root: Path) -> Path:
    """The folder of a comparison that has no cell yet."""
    folder = root / "out"
    folder.mkdir()
    (folder / GRID_FILE).write_text("{}")
    return folder


def check_compare_command(out: Path, *launcher: str) -> None:
    """``compare`` itself: two cells, each a real run, are done and share the part of their teacher."""
    small = SMALL | {"online.agent_steps": 300}
    options = ["--teacher", TEACHER, "--seeds", "2", "--preset", "quick", *cli_options(small)]
    result = CliRunner().invoke(main, ["compare", *options, *launcher, "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [cell["status"] for cell in document["cells"]] == ["done", "done"]
    one, two = (read(out / cell["run"], "result.json") for cell in document["cells"])
    assert one["teacher"]["return"] == two["teacher"]["return"]
    assert two["phases"]["collect"]["reused"]


def write_cell_program(folder: Path) -> tuple[str, ...]:
    """The command that stands in for `reincarnate run`."""
    (folder / "cell.py").write_text(CELL)
    return (sys.executable, str(folder / "cell.py"))


def write_slurm(folder: Path) -> Path:
    """A folder for PATH; its programs keep the state of a cluster of one node under $FAKE_SLURM."""
    (folder / "slurmd.py").write_text(_SLURMD)
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, source in _PROGRAMS.items():
        (programs / name).write_text(f"#!{sys.executable}\n{source}")
        (programs / name).chmod(0o755)
    return programs
