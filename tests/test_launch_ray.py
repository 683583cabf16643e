"""Cells on a real Ray cluster of this machine: worker processes that die, a node that is lost, Ctrl-C.

Ray is 240 MB, so `make test` does not install it: `pip install -c constraints.txt ray` to run these.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reincarnate.errors import UserError
from reincarnate.launching.cell import cell_folder, state_of
from reincarnate.launching.on_ray import RayLauncher
from reincarnate.phases import Stopped

from cell_programs import (
    cells,
    check_compare_command,
    comparison_folder,
    starts,
    wait_for,
    write_cell_program,
)

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

#: Ray gives its own processes a quarter of a minute to start, which a busy machine may not.
PATIENT = {
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
}
#: What Ray starts beside a node that these tests have no use for.
LIGHT = ["--object-store-memory=80000000", "--include-log-monitor=false", "--no-monitor"]
#: Of the node's agents: a node that is told them does not give up waiting for the agents to choose.
PORTS = (
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
    "runtime-env-agent-port",
)
START_SECONDS = 900.0


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, all different."""
    with contextlib.ExitStack() as open_sockets:
        bound = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in bound]


class Node:
    """`ray start`, in a process that ends its node when it is ended."""

    def __init__(self, temporary: Path, *options: str) -> None:
        program = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats"]
        ports = [f"--{name}={port}" for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)]
        self._command, self._temporary = [*program, *LIGHT, *ports, *options], temporary
        for _ in range(5):  # the program itself gives its node half a minute, which nothing changes
            self._start()
            if self.process.poll() is None:
                return
        raise AssertionError(self.log.read_text())

    def _start(self) -> None:
        self.log = self._temporary / f"node-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=os.environ | PATIENT)
        try:
            wait_for(self._started, START_SECONDS)
        except BaseException:
            self.end()  # nothing is left behind by a node that did not come up
            raise

    def _started(self) -> bool:
        return "runtime started" in self.log.read_text() or self.process.poll() is not None

    def lose(self) -> None:
        """Kill the node's daemon, as if the machine were gone."""
        os.kill(self.daemon, signal.SIGKILL)

    @property
    def daemon(self) -> int:
        """Process number of the raylet, whose children are the workers."""
        command = ["ps", "-o", "pid=,comm=", "--ppid", str(self.process.pid)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return next(int(line.split()[0]) for line in listed.splitlines() if "raylet" in line)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(120)


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A short path, as sockets must have."""
    folder = Path(tempfile.mkdtemp(prefix="r"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def address(temporary: Path) -> Iterator[str]:
    """A cluster of one node with two CPUs, hence two worker processes."""
    (port,) = free_ports(1)
    here = ["--head", f"--port={port}", f"--temp-dir={temporary}"]
    head = Node(temporary, *here, "--num-cpus=2", "--include-dashboard=false")
    yield f"{ray.util.get_node_ip_address()}:{port}"
    head.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return comparison_folder(tmp_path)


def test_a_lost_worker_is_made_good_and_a_failed_cell_stops_nobody(
    address: str, folder: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    grid, options = cells(7, 1, 2, 3), {"environment": {"REINCARNATE_CACHE": "/shared/cache"}}
    launcher = RayLauncher(
        folder, said.append, address=address, command=write_cell_program(tmp_path), **options
    )
    run = cell_folder(folder, grid[0])

    def kill_the_worker() -> None:
        wait_for(lambda: (run / "ready").exists() and state_of(cell_folder(folder, grid[3])) == "done")
        os.kill(starts(folder, grid[0])[0]["parent"], signal.SIGKILL)

    threading.Thread(target=kill_the_worker, daemon=True).start()
    assert launcher.run(grid) == {"a--s2": "no room on the disk"}
    assert (run / "stopped").exists()  # the cell did not work on alone
    first, second = starts(folder, grid[0])
    assert (first["resumed"], second["resumed"]) == (False, True)
    others = {starts(folder, cell)[0]["parent"] for cell in grid[1:]}
    assert first["parent"] not in others  # two worker processes
    env = first["env"]
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    assert env["REINCARNATE_CACHE"] == "/shared/cache"
    assert any(line.startswith("a--s7: done on") and "resumed" in line for line in said)
    assert "a--s2: failed: no room on the disk" in said
    # Once more: what is finished is left alone.
    again = RayLauncher(folder, said.append, address=address, command=write_cell_program(tmp_path))
    assert again.run(grid) == {}
    assert len(starts(folder, grid[1])) == 1
    assert len(starts(folder, grid[2])) == 2


def test_a_lost_node_is_made_good_on_another(
    address: str, temporary: Path, folder: Path, tmp_path: Path
) -> None:
    """Two nodes have a GPU (they say so): the cell is on one of them, and then on the other."""
    (cell,), lost = cells(7), []
    options = [f"--address={address}", "--num-cpus=1", "--num-gpus=1"]
    nodes = [Node(temporary, *options) for _ in range(2)]

    def lose_one() -> None:
        wait_for((cell_folder(folder, cell) / "ready").exists)
        daemon = parent_of(starts(folder, cell)[0]["parent"])
        lost.append(next(node for node in nodes if node.daemon == daemon))
        lost[0].lose()

    threading.Thread(target=lose_one, daemon=True).start()
    launcher = RayLauncher(
        folder, lambda line: None, address=address, gpus=1, command=write_cell_program(tmp_path)
    )
    try:
        assert launcher.run([cell]) == {}
        assert len(lost) == 1
    finally:
        for node in nodes:
            node.end()
        forget_lost_nodes(address)
    first, second = starts(folder, cell)
    assert (first["resumed"], second["resumed"]) == (False, True)
    assert first["env"]["CUDA_VISIBLE_DEVICES"] == "0"


def forget_lost_nodes(address: str) -> None:
    """Wait until the cluster knows: it counts the GPUs of a node that was killed for a while."""
    ray.init(address=address, log_to_driver=False)
    try:
        wait_for(lambda: "GPU" not in ray.cluster_resources())
    finally:
        ray.shutdown()


def test_that_no_node_can_take_a_cell_is_told_and_ctrl_c_ends_the_waiting(
    address: str, folder: Path, tmp_path: Path
) -> None:
    said: list[str] = []

    def interrupt() -> None:
        wait_for(lambda: any("no node" in line for line in said))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    command = write_cell_program(tmp_path)
    with pytest.raises(Stopped):
        RayLauncher(folder, said.append, address=address, gpus=3, command=command).run(cells(1))
    assert [line.partition(";")[0] for line in said if "no node" in line] == [
        "no node of the cluster has 1 CPUs and 3 GPUs now"
    ]
    assert not cell_folder(folder, cells(1)[0]).exists()


def parent_of(pid: int) -> int | None:
    """Of a process; None when it is gone."""
    listed = subprocess.run(
        ["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return int(listed.stdout) if listed.stdout.strip() else None


def test_ctrl_c_stops_the_cells_where_they_can_be_resumed(address: str, folder: Path, tmp_path: Path) -> None:
    (cell,) = cells(7)
    run = cell_folder(folder, cell)

    def interrupt() -> None:
        wait_for((run / "ready").exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    launcher = RayLauncher(folder, lambda line: None, address=address, command=write_cell_program(tmp_path))
    with pytest.raises(Stopped):
        launcher.run([cell])
    wait_for((run / "stopped").exists)


def test_a_folder_that_the_nodes_do_not_see_is_told(address: str, tmp_path: Path) -> None:
    out = tmp_path / "unshared"
    out.mkdir()  # no grid.json there: as on a node with another disk
    failed = RayLauncher(out, lambda line: None, address=address).run(cells(1))
    assert "put --out on a shared path" in failed["a--s1"]


def test_no_cluster_is_one_line(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no Ray cluster can be reached .*ray start --head"):
        RayLauncher(folder, lambda line: None, address="127.0.0.1:1").run(cells(1))


def test_the_command_gives_finished_cells(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))
    check_compare_command(tmp_path / "out", "--launcher", "ray", "--ray-address", address)
