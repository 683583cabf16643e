"""What a user can get wrong: one line, exit code 2, nothing written."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reincarnate.comparison import compare, resume
from reincarnate.errors import UserError
from reincarnate.runfiles import GRID_FILE
from reincarnate.teachers import zoo

from cli_calls import command, invoke, refused, refused_last_line
from loopback_hub import LoopbackHub
from paths import SHARED_CHECKPOINTS, needs_checkpoints
from small_runs import TEACHER

BREAKOUT_FLAX = SHARED_CHECKPOINTS / "own" / "Breakout-dqn" / "dqn_atari_jax.cleanrl_model"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path_factory.getbasetemp() / "cli-cache"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--teacher", "./nowhere.cleanrl_model"], "no such file or folder: './nowhere.cleanrl_model'"),
        (["--teacher", "bundled/Brakeout-dqn"], "did you mean bundled/Breakout-dqn?"),
        (["--teacher", TEACHER, "--student", "qdagger-dqm"], "did you mean 'qdagger-dqn'?"),
        (["--teacher", TEACHER, "--preset", "quik"], "did you mean 'quick'?"),
        (["--teacher", TEACHER, "--env", "CartPole-v9"], "CartPole"),
        (["--student", "dqn", "--env", "Brekout-v5"], "no environment 'Brekout-v5'"),
        (["--student", "dqn"], "pass --env ID"),
        (["--student", "qdagger-dqn", "--env", "CartPole-v1"], "needs a teacher: pass --teacher REF"),
        (["--teacher", TEACHER, "--set", "td.nstep=3"], "did you mean 'td.n_step'?"),
        (["--teacher", TEACHER, "--set", "td.n_step"], "--set takes key=value"),
        (["--teacher", TEACHER, "--batch-size", "many"], "optimizer.batch_size takes a value of type int"),
        (["--teacher", TEACHER, "--num-envs", "0"], "env.num_envs must be greater than 0"),
        (["--teacher", TEACHER, "--act", "epsilon=2"], "no acting rule 'epsilon=2'"),
        (["--teacher", TEACHER, "--device", "tpu"], "system.device must be one of auto, cpu, cuda"),
        (["--teacher", TEACHER, "--backend", "gym"], "env.backend must be one of envpool, gymnasium"),
        (["--teacher", TEACHER, "--set", "network=impala"], "impala"),
        (["--teacher", TEACHER, "--eval-episodes", "0"], "evaluate.games must be greater than 0"),
        (["--teacher", TEACHER, "--collect-steps", "1e15"], "GB"),
        (["--resume", "nothing-here"], "there is no folder 'nothing-here'; --resume takes a run's folder"),
        (["--nonsense"], "No such option"),
        (["--teacher", TEACHER, "--env", "Breakout-v5"], "Breakout-v5"),
    ],
)
def test_bad_input_is_one_clear_line_and_writes_nothing(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    out = [] if "--resume" in arguments else ["--out", str(tmp_path / "run"), "--preset", "quick"]
    if "--preset" in arguments:
        out = out[:2]
    assert message in refused(invoke("run", *arguments, *out))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 6748709\n", "Git LFS"),
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "HTML"),
        (b"", "empty"),
        (b"\x82\xa6params", "is not a complete"),
        (b"PK\x03\x04 not really a zip", "damaged"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_said_to_be_so(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "dqn.cleanrl_model"
    file.write_bytes(content)
    line = refused(
        invoke("run", "--teacher", str(file), "--env", "CartPole-v1", "--out", str(tmp_path / "run"))
    )
    assert message.lower() in line.lower()
    assert [path.name for path in tmp_path.iterdir()] == ["dqn.cleanrl_model"]


def test_an_output_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    line = refused(invoke("run", "--teacher", TEACHER, "--out", str(tmp_path)))
    assert "already holds a run" in line
    assert "--resume" in line
    assert (tmp_path / "config.json").read_text() == "{}"


@needs_checkpoints
def test_a_wrong_action_count_names_both_numbers(tmp_path: Path) -> None:
    line = refused(
        invoke("run", "--teacher", str(BREAKOUT_FLAX), "--env", "Pong-v5", "--out", str(tmp_path / "r"))
    )
    assert "4" in line
    assert "6" in line
    assert "action" in line


def test_what_is_no_run_to_resume_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/demo", "runs/empty", "compared"):
        Path(name).mkdir(parents=True)
    Path("runs/demo/config.json").write_text("{}")
    Path("compared", GRID_FILE).write_text("{}")
    Path("runs/lost").mkdir()
    Path("runs/lost/result.json").write_text("{}")
    for folder, message in (
        ("runs/demmo", "there is no folder 'runs/demmo' (did you mean 'runs/demo'?)"),
        ("runs", "runs is no run, it holds some: runs/demo; --resume one of them"),
        ("runs/demo/config.json", "runs/demo/config.json is a file; --resume takes the folder of a run"),
        ("compared", "go on with it by `reincarnate compare --resume compared`"),
        ("runs/lost", "runs/lost has lost its config.json; put it back"),
        ("runs/empty", "runs/empty holds no run to resume (no config.json)"),
    ):
        assert message in refused(invoke("run", "--resume", folder))


def test_without_a_command_the_help_is_shown() -> None:
    for arguments, word in (([], "teachers"), (["teachers"], "collect")):
        shown = invoke(*arguments)
        assert shown.exit_code == 2
        assert shown.stderr.startswith("Usage: ")
        assert f"\n  {word} " in shown.stderr


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys\n"
        "from reincarnate.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/a/x"),
            "/a/x: No space left on device; free",
        ),
        (OSError(errno.EACCES, "Permission denied", "/a/x"), "/a/x: Permission denied; check that"),
        (MemoryError(), "there is not enough memory for this; free some, or ask for less"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "not enough memory"),
    ],
)
def test_what_the_machine_lacks_is_one_line(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(zoo, "list_teachers", fail)
    assert told in refused(invoke("teachers", "list"))


def test_what_is_our_own_mistake_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(zoo, "list_teachers", fail)
    assert isinstance(invoke("teachers", "list").exception, RuntimeError)


def test_an_empty_path_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["run", "--teacher", TEACHER, "--out", ""],
        ["run", "--resume", ""],
        ["teachers", "collect", TEACHER, "--out", ""],
        ["report", ""],
    ):
        assert "it is empty; give a path" in refused(invoke(*arguments))
    assert list(tmp_path.iterdir()) == []


def test_a_list_is_cut_short_in_silence() -> None:
    """``| head -1``: whoever read the output has seen enough."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command("students", "list"), stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert done.stderr == ""


def test_only_run_is_for_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    line = refused(invoke("compare", "--teacher", TEACHER, "--out", str(tmp_path / "x")))
    assert "`reincarnate compare` cannot run as 2 processes (WORLD_SIZE=2)" in line
    assert "without torchrun" in line
    refused(invoke("teachers", "list"))
    for verb in (lambda: compare([TEACHER], out=tmp_path / "x"), lambda: resume(tmp_path)):
        with pytest.raises(UserError, match=r"^a comparison cannot run as 2 processes"):
            verb()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_variables_of_torchrun_that_are_no_numbers_are_told(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for each, value in (right | {name: "abc"}).items():
        monkeypatch.setenv(each, value)
    line = refused(invoke("run", "--teacher", TEACHER, "--out", str(tmp_path / "run")))
    assert f"{name}='abc' is no number; start with torchrun, or unset WORLD_SIZE" in line
    assert list(tmp_path.iterdir()) == []


def test_a_hub_repository_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with LoopbackHub({}) as hub:
        done = subprocess.run(
            command("run", "--teacher", "nobody/Nothing-v5-dqn", "--out", str(tmp_path / "run")),
            env=os.environ | hub.env(tmp_path / "home"),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
        )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("reincarnate: ")
    assert "nobody/Nothing-v5-dqn" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--teacher", TEACHER, "--set", "system.checkpoint_every_seconds=inf"],
            "takes a value of type float",
        ),
        (["--teacher", TEACHER, "--collect-steps", "0"], "collect.agent_steps must be greater than 0"),
        (["--teacher", TEACHER, "--set", "preset=quick"], "preset is not a setting"),
        (["--teacher", TEACHER, "--set", "env.sticky_probability=0.25"], "does not apply to CartPole-v1"),
        (["--teacher", TEACHER, "--buffer", "cuda", "--device", "cpu"], "use --buffer auto"),
        (
            ["--teacher", TEACHER, "--buffer", "disk", "--set", "system.compress=zlib"],
            "leave one of them out",
        ),
        (["--teacher", TEACHER, "--teacher-data", "no/such/data"], "no folder with teacher data: "),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_written(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    assert message in refused(invoke("run", *arguments, "--preset", "quick", "--out", str(tmp_path / "run")))
    assert list(tmp_path.iterdir()) == []


def test_teacher_data_of_another_environment_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = invoke("teachers", "collect", TEACHER, "--out", str(data), "--steps", "100", "--num-envs", "2")
    assert made.exit_code == 0, made.output
    options = ["--teacher-data", str(data), "--set", "env.max_agent_steps=50", "--out", str(tmp_path / "run")]
    line = refused(invoke("run", "--teacher", TEACHER, "--preset", "quick", *options))
    assert "max_agent_steps" in line
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refused_last_line(invoke("run", "--teacher", TEACHER, "--out", str(tmp_path / "file" / "run")))
    assert str(tmp_path / "file") in line
