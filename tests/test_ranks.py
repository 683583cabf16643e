"""Several ranks train one student: two processes on the CPU, with gloo."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from reincarnate.errors import UserError
from reincarnate.ranks import ALONE, Ranks, average_gradients
from reincarnate.runner import Run
from reincarnate.team import connect

from small_runs import SMALL, TEACHER, cli_options, quiet, read, scalar_steps
from two_ranks import alive, run_program, torchrun

ROOT = Path(__file__).parents[1]


def results(folder: Path, name: str) -> list[Any]:
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)]


def done(outcomes: list[tuple[int, str]]) -> None:
    assert [code for code, _ in outcomes] == [0, 0], "\n".join(output for _, output in outcomes)


# ---------------------------------------------------------------- updates and meetings


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("met")
    done(run_program("updates,meetings", folder))
    return folder


@pytest.mark.parametrize("kind", ["vector", "atari"])
def test_two_ranks_make_the_updates_of_one_with_a_batch_twice_as_large(met: Path, kind: str) -> None:
    one, other = (each[kind] for each in results(met, "updates"))
    assert one["digest"] == other["digest"]
    moved = False
    for name, expected in one["whole"].items():
        torch.testing.assert_close(one["shared"][name], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(one["shared"][name], other["shared"][name])
        moved |= bool(((expected - one["start"][name]).abs() > 1e-3).any())
    assert moved  # far more than the tolerance


def test_ranks_agree(met: Path) -> None:
    for found in results(met, "meetings"):
        assert found["stops"] == 1  # what one rank asks for between two rounds is not forgotten
        assert found["saves"] == 1
        assert found["saves of others"] == 0  # the clock of rank 0 counts
        assert found["all"] == [True, False, False]


def test_ranks_exchange_numbers_and_values(met: Path) -> None:
    for found in results(met, "meetings"):
        assert found["rows"] == [[[0.0], [1.0, 0.1]], [[0.1 + 0.2], [0.1 + 0.2]]]
        assert found["gather"] == [{"rank": 0}, {"rank": 1}]
        assert found["lead"] == "from 0"
        assert found["first"] == 0.0


def test_a_student_that_shares_nothing_is_refused(met: Path) -> None:
    for found in results(met, "meetings"):
        assert "does not share its gradients" in found["refused"]


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ran")
    done(run_program("whole_run", folder))
    return folder


def test_the_result_counts_what_all_ranks_did(ran: Path) -> None:
    result = read(ran / "whole", "result.json")
    assert result["status"] == "done"
    assert result["phases"]["offline"]["updates"] == 120
    online = result["phases"]["online"]
    assert 600 <= online["agent_steps"] < 604  # 2 ranks of 2 environments
    assert online["updates"] == (online["agent_steps"] - 100) // 4
    assert 400 <= result["buffers"]["student"]["agent_steps"] < 440  # the capacity, and what lanes reach over
    for returns in (result["teacher"]["return"], result["random"], result["student"]["final_return"]):
        assert len(returns["returns"]) == returns["n"] == 4
    curves = read(ran / "whole", "curves.json")
    assert len(curves["evaluations"]) == 4
    assert read(ran / "whole", "config.json")["ranks"] == 2
    steps = scalar_steps(ran / "whole")
    assert steps["online/game_return"]
    assert len(list((ran / "whole").glob("events.out.tfevents.*"))) == 1  # rank 0's


def test_stopping_one_rank_in_the_offline_phase_changes_nothing(ran: Path) -> None:
    name = "snapshots/offline-120.safetensors"
    assert (ran / "offline" / name).read_bytes() == (ran / "whole" / name).read_bytes()
    for tag, steps in scalar_steps(ran / "offline").items():
        assert steps == sorted(steps), tag


def test_every_rank_resumes_its_share_of_the_buffer_and_its_random_numbers(ran: Path) -> None:
    one, other = results(ran, "online")
    for each in (one, other):
        assert all(each["equal"].values()), each["equal"]
        assert each["held"] > 0
    assert one["seed"] != other["seed"]
    assert not torch.equal(one["frames"], other["frames"])
    assert one["stopped at"] == other["stopped at"] >= 250
    assert one["m"] == other["m"]  # from the games of both
    result = read(ran / "online", "result.json")
    online = result["phases"]["online"]
    assert result["status"] == "done"
    assert 600 <= online["agent_steps"] < 604
    assert online["updates"] == (online["agent_steps"] - 100) // 4


def test_another_number_of_ranks_is_refused(ran: Path) -> None:
    with pytest.raises(UserError, match=r"started with 2 ranks and cannot go on with 1; .* `torchrun"):
        Run.resume(ran / "whole", quiet())


def test_a_shared_buffer_is_damaged_without_a_ranks_part(ran: Path) -> None:
    from reincarnate.checkpoint import CheckpointFolder

    third = Ranks()
    third.rank, third.size = 2, 3
    with pytest.raises(UserError, match="nothing of rank 2"):
        CheckpointFolder(ran / "whole", third).load(torch.device("cpu"))


def test_one_rank_that_is_asked_to_stop_stops_all_in_an_evaluation(tmp_path: Path) -> None:
    done(run_program("stopped_evaluation", tmp_path))
    assert results(tmp_path, "evaluation") == [None, None]  # half an evaluation does not count
    assert results(tmp_path, "finished") == [[], []]
    assert read(tmp_path / "run", "result.json")["status"] == "stopped"
    assert (tmp_path / "run" / "checkpoint" / "state.json").exists()


def test_a_failure_of_one_rank_ends_the_other_that_waits_for_it(tmp_path: Path) -> None:
    began = time.monotonic()
    (first, _), (second, output) = run_program("failing", tmp_path)
    assert first != 0
    assert second != 0
    assert "a fault of rank 1 alone" in output
    assert "another rank did" in (tmp_path / "told").read_text()
    assert read(tmp_path / "run", "result.json")["status"] == "failed"
    assert time.monotonic() - began < 100


# ---------------------------------------------------------------- by torchrun


OPTIONS = ["--teacher", TEACHER, *cli_options(SMALL | {"env.num_envs": 2, "offline.updates": 40})]


def test_torchrun_stops_with_one_rank_and_resumes(tmp_path: Path) -> None:
    folder, long = tmp_path / "run", ["--online-steps", "4000", "--set", "online.agent_steps_per_update=8"]
    with torchrun([*OPTIONS, *long, "--out", str(folder)], tmp_path) as launch:
        launch.wait_for("online: 4,000 agent steps")
        time.sleep(1)
        os.kill(launch.pid(1), signal.SIGTERM)
        assert launch.end() != 0
        output = launch.output
    assert not re.search(r'File "\S*reincarnate/\w+.py"', output)  # torchrun's own traceback alone
    assert output.count("run directory:") == 1  # only rank 0 prints
    assert read(folder, "result.json")["status"] == "stopped"
    state = read(folder, "checkpoint/state.json")
    assert 0 < state["state"]["online"]["agent_steps"] < 4000
    assert len(state["other_ranks"]) == 1
    assert state["other_ranks"][0]
    with torchrun(["--resume", str(folder)], tmp_path) as launch:
        assert launch.end() == 0, launch.output
    result = read(folder, "result.json")
    online = result["phases"]["online"]
    assert result["status"] == "done"
    assert 4000 <= online["agent_steps"] < 4004
    assert online["updates"] == (online["agent_steps"] - 100) // 8
    assert (folder / "report.html").exists()


def test_torchrun_ends_when_one_rank_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with torchrun([*OPTIONS, "--offline-updates", "100000", "--out", str(folder)], tmp_path) as launch:
        launch.wait_for("offline: 100,000 updates")
        time.sleep(1)
        pids = list(launch.pids())
        assert len(pids) == 2
        os.kill(launch.pid(1), signal.SIGKILL)
        killed = time.monotonic()
        assert launch.end() != 0
        assert time.monotonic() - killed < 60
        assert re.search("reincarnate: another rank of this run is gone; resume the run", launch.output)
    assert not any(alive(each) for each in pids)
    assert read(folder, "result.json")["status"] == "failed"


def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    with torchrun(["--student", "dqn", "--env", "CartPole-v1", "--set", "td.n_steps=1"], tmp_path) as launch:
        assert launch.end() != 0
    assert launch.output.count("no setting 'td.n_steps'") == 1


# ---------------------------------------------------------------- one process


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with connect() as alone:  # torchrun --nproc-per-node=1
        assert alone is ALONE
        assert not torch.distributed.is_initialized()
    assert (alone.rank, alone.size, alone.first) == (0, 1, True)
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.full((3,), 2.0)
    with alone.averaging():
        average_gradients([weight])
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert alone.agree(True, False) == (True, False)
    assert alone.gather("mine") == ["mine"]
    assert alone.gather_rows([1.0, 2.0], 7) == [[1.0, 2.0]]


def test_only_one_file_knows_torch_distributed() -> None:
    code = [path for each in ("reincarnate", "teachers", "students") for path in (ROOT / each).rglob("*.py")]
    named = re.compile(r"(import|from) torch\.distributed|torch\.distributed\.\w|import distributed")
    assert [path.name for path in code if named.search(path.read_text())] == ["team.py"]
