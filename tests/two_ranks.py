"""Two processes that train one student, started as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent
#: Of a whole launch, on a machine with other work.
LIMIT_SECONDS = 600


def environment(cache: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return os.environ | {"REINCARNATE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_program(scenario: str, folder: Path) -> list[tuple[int, str]]:
    """Exit code and output of each rank of ``rank_program.py SCENARIO FOLDER``."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(2):
        ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        command = [sys.executable, str(TESTS / "rank_program.py"), scenario, str(folder)]
        processes.append(
            subprocess.Popen(
                command,
                env=environment(folder / "cache") | master | ours,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [each.communicate(timeout=LIMIT_SECONDS)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
    return [(each.returncode, output) for each, output in zip(processes, outputs, strict=True)]


class Launch:
    """``torchrun --nproc-per-node=2 -m reincarnate run ...`` that is going on."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self._log = folder / f"torchrun-{time.monotonic_ns()}.log"
        master = ["--nproc-per-node=2", "--master-port", str(free_port())]
        command = [sys.executable, "-m", "torch.distributed.run", *master, "-m", "reincarnate", "run"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *arguments], env=environment(folder / "cache"), stdout=log, stderr=log
            )
        self._pids: list[int] = []

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        """Until the output holds ``text``."""
        until = time.monotonic() + LIMIT_SECONDS
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < until, self.output
            time.sleep(0.05)

    def pid(self, rank: int) -> int:
        """Of the process of a rank."""
        for each in self.pids():
            if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{each}/environ").read_text():
                return each
        raise AssertionError(self.output)

    def pids(self) -> list[int]:
        """Of all ranks that were ever seen."""
        own = self.process.pid
        found = Path(f"/proc/{own}/task/{own}/children").read_text().split()  # while torchrun is there
        self._pids += [int(each) for each in found if int(each) not in self._pids]
        return self._pids

    def end(self) -> int:
        """Wait; the exit code of torchrun."""
        return self.process.wait(LIMIT_SECONDS)


@contextmanager
def torchrun(arguments: Sequence[str], folder: Path) -> Iterator[Launch]:
    launch = Launch(arguments, folder)
    try:
        yield launch
    finally:
        if launch.process.poll() is None:
            launch.process.terminate()
            launch.process.wait(60)


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
