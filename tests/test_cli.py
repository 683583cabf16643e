"""The commands, called as a user calls them."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from reincarnate.config import field_names

from cli_calls import command, invoke, refused_last_line
from loopback_hub import LoopbackHub
from loopback_repository import Repository
from paths import SHARED_CHECKPOINTS, needs_checkpoints
from small_runs import TEACHER, cli_options, read, scalar_steps

BREAKOUT_FLAX = SHARED_CHECKPOINTS / "own" / "Breakout-dqn" / "dqn_atari_jax.cleanrl_model"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path_factory.getbasetemp() / "cli-cache"))


def test_the_help_of_run_lists_every_setting() -> None:
    text = invoke("run", "--help").output
    listed = text[text.index("Settings for --set") :]
    parts = {line.split(":")[0].strip(): line for line in listed.splitlines() if ": " in line}
    for name in field_names():
        part, _, leaf = name.rpartition(".")
        if part:
            assert part in parts
            assert re.search(rf"\b{leaf}\b", listed), name


def test_students_list() -> None:
    rows = json.loads(invoke("students", "list", "--json").stdout)
    assert {row["name"] for row in rows} >= {"dqn", "qdagger-dqn"}
    assert all(set(row) == {"name", "summary", "paper"} for row in rows)
    assert "qdagger-dqn" in invoke("students", "list").stdout


def test_teachers_list_and_show() -> None:
    rows = json.loads(invoke("teachers", "list", "--json").stdout)
    assert {"bundled/Breakout-dqn", TEACHER} <= {row["ref"] for row in rows}
    assert all({"ref", "env", "algorithm", "source", "cached"} <= set(row) for row in rows)
    assert TEACHER in invoke("teachers", "list").stdout
    shown = json.loads(invoke("teachers", "show", TEACHER, "--json").stdout)
    assert shown["env"]["env_id"] == "CartPole-v1"
    contract = {"ref", "resolved", "revision", "sha256", "format", "algorithm", "architecture", "parameters"}
    assert contract | {"env", "reported", "assumed"} <= set(shown)
    assert "CartPole-v1" in invoke("teachers", "show", TEACHER).stdout


def test_teachers_eval_says_whether_the_claim_holds() -> None:
    result = invoke("teachers", "eval", TEACHER, "--episodes", "32", "--act", "greedy", "--json")
    measured = json.loads(result.stdout)
    assert set(measured) == {"ref", "resolved", "act", "return", "reported", "agrees"}
    assert measured["act"] == "greedy"
    assert measured["return"]["n"] == 32
    assert measured["reported"]["mean"] > 300
    assert measured["agrees"] is True
    text = invoke("teachers", "eval", TEACHER, "--episodes", "8", "--act", "epsilon=1").stdout
    assert "differs from the reported" in text


def test_teachers_collect_makes_data_that_a_run_uses(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    made = invoke("teachers", "collect", TEACHER, "--out", str(data), "--steps", "400", "--num-envs", "4")
    assert made.exit_code == 0, made.output
    again = ["teachers", "collect", TEACHER, "--out", str(data), "--num-envs", "4", "--steps"]
    assert invoke(*again, "400").stdout.endswith(f" agent steps in {data}, collected before\n")
    assert "something else (agent_steps=400 (asked: 401))" in refused_last_line(invoke(*again, "401"))
    options = [*cli_options(), "--teacher-data", str(data), "--online-steps", "0", "--out", str(out)]
    done = invoke("run", "--teacher", TEACHER, "--preset", "quick", *options)
    assert done.exit_code == 0, done.output
    result = read(out, "result.json")
    assert result["phases"]["collect"]["reused"]
    assert (out / result["buffers"]["teacher"]["path"]).resolve() == data.resolve()
    other = ["--teacher-data", str(data), "--out", str(tmp_path / "other"), "--preset", "quick"]
    if BREAKOUT_FLAX.exists():
        sb = str(SHARED_CHECKPOINTS / "own" / "CartPole-v1-dqn_jax-seed1")
        assert "collected with another teacher" in refused_last_line(invoke("run", "--teacher", sb, *other))


def test_python_m_and_plain_lines_when_the_output_is_no_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        command(
            "run", "--teacher", TEACHER, "--preset", "quick", *cli_options(), "--out", str(tmp_path / "run")
        ),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    student = read(tmp_path / "run", "result.json")["student"]
    told = done.stderr.splitlines()[-1]
    assert told.startswith(f"student {student['final_return']['mean']:.1f} ± ")
    assert f"; {student['teacher_normalized']['final']:.2f} on the way from random play (0)" in told
    assert told.endswith(f"; see {tmp_path / 'run' / 'report.html'}")
    for words in (
        "evaluate teacher (epsilon=0.01)",
        "collect: 600 agent steps",
        "offline: 120 updates",
        ", m ",
        "G_T",
        "agent steps/s",
    ):
        assert words in done.stderr, words


def start_and_signal(folder: Path, number: int) -> int:
    """Start a run that would take long, signal it in its offline phase, and wait for it."""
    options = [*cli_options(), "--offline-updates", "1000000", "--checkpoint-every", "0.5"]
    process = subprocess.Popen(
        command("run", "--teacher", TEACHER, "--preset", "quick", *options, "--out", str(folder)),
        stderr=subprocess.DEVNULL,
        cwd=folder.parent,
    )
    deadline = time.monotonic() + 200
    state = folder / "checkpoint" / "state.json"
    while not (state.exists() and json.loads(state.read_text())["state"]["offline"]["updates"] > 50):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    return process.wait(timeout=60)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_or_killed_run_goes_on(number: int, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert start_and_signal(folder, number) == code
    status = read(folder, "result.json")["status"]
    assert status == ("stopped" if number == signal.SIGINT else "running")
    done = read(folder, "checkpoint/state.json")["state"]["offline"]["updates"]
    config = read(folder, "config.json")  # so that the test ends: a shorter offline phase from here on
    config["offline"]["updates"] = done + 30
    (folder / "config.json").write_text(json.dumps(config))
    result = invoke("run", "--resume", str(folder))
    assert result.exit_code == 0, result.output
    assert read(folder, "result.json")["status"] == "done"
    assert read(folder, "result.json")["phases"]["offline"]["updates"] == done + 30
    for tag, steps in scalar_steps(folder).items():
        assert steps == sorted(steps), tag


def test_two_processes_do_not_share_a_run_directory(tmp_path: Path) -> None:
    from filelock import FileLock

    folder = tmp_path / "run"
    done = invoke("run", "--teacher", TEACHER, "--preset", "quick", *cli_options(), "--out", str(folder))
    assert done.exit_code == 0, done.output
    with FileLock(folder / "run.lock"):
        assert "in use by another reincarnate process" in refused_last_line(
            invoke("run", "--resume", str(folder))
        )


@needs_checkpoints
def test_the_mission_command_from_a_hub(tmp_path: Path) -> None:
    """Issue 2, point 2: the real client, the real checkpoint, a loopback Hub, the short form."""
    repo = "cleanrl/BreakoutNoFrameskip-v4-dqn_atari_jax-seed1"
    files = {
        "dqn_atari_jax.cleanrl_model": BREAKOUT_FLAX.read_bytes(),
        "README.md": b"---\nlibrary_name: cleanrl\n---\n# A card\n",
    }
    shorten = [
        "--preset",
        "quick",
        "--collect-steps",
        "300",
        "--offline-updates",
        "3",
        "--online-steps",
        "160",
    ]
    shorten += [
        "--eval-episodes",
        "1",
        "--act",
        "epsilon=0.3",
        "--set",
        "online.learning_starts_agent_steps=100",
    ]
    mission = ["run", "--teacher", "cleanrl/Breakout-v5-dqn_atari_jax", "--student", "qdagger-dqn"]
    with LoopbackHub({repo: Repository(files)}) as hub:
        done = subprocess.run(
            command(*mission, *shorten, "--out", str(tmp_path / "run")),
            env=os.environ | hub.env(tmp_path / "home"),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert repo in done.stderr  # the resolved name is printed
    result = read(tmp_path / "run", "result.json")
    assert (result["status"], result["env"]) == ("done", "Breakout-v5")
    teacher = result["teacher"]
    assert (teacher["ref"], teacher["resolved"]) == ("cleanrl/Breakout-v5-dqn_atari_jax", repo)
    assert len(teacher["revision"]) == 40
    assert teacher["format"] == "cleanrl_flax"


def test_resume_works_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = [*cli_options(), "--online-steps", "60", "--set", "online.evaluations=0"]
    first = invoke("run", "--teacher", TEACHER, "--preset", "quick", *options, "--out", "first")
    assert first.exit_code == 0, first.output
    second = invoke("run", "--teacher", "first", "--preset", "quick", *options, "--out", "second")
    assert second.exit_code == 0, second.output
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = invoke("run", "--resume", str(tmp_path / "second"))
    assert again.exit_code == 0, again.output
    assert read(tmp_path / "second", "result.json")["teacher"]["ref"] == "first"
