"""TensorBoard events, read back with TensorBoard's own readers."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter

from reincarnate import logger as logger_module
from reincarnate.cli.group import thread_failed
from reincarnate.config import preset
from reincarnate.logger import FINAL_METRICS, RunLogger


def read(directory: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) in the order in which TensorBoard reads the run."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    if tag not in events.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.fixture(autouse=True)
def quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes in the tests' clock with every look, so that nothing waits for the real one."""
    seconds = iter(range(2_000_000_000, 2_100_000_000))
    monkeypatch.setattr(logger_module.time, "time", lambda: float(next(seconds)))


def test_scalars_come_back_under_phase_and_name(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as log:
        log.scalars("offline", {"td_loss": 0.5, "kl": 1.25}, step=100)
        log.scalars("online", {"m": 0.75}, step=40)
    assert read(tmp_path, "offline/td_loss") == [(100, 0.5)]
    assert read(tmp_path, "offline/kl") == [(100, 1.25)]
    assert read(tmp_path, "online/m") == [(40, 0.75)]


def test_text_comes_back(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as log:
        log.text("command", "reincarnate run", step=0)
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("command/text_summary")
    assert event.tensor_proto.string_val == [b"reincarnate run"]


def test_sizes_are_what_lies_on_the_disk_after_a_flush(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as log:
        before = log.sizes()
        log.scalars("offline", {"td_loss": 0.5}, step=1)
        after = log.sizes()
        (name,) = after
        assert after[name] == (tmp_path / name).stat().st_size > before[name]


def test_a_resumed_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    log = RunLogger(tmp_path)
    for step in (1, 2, 3):
        log.scalars("online", {"m": float(step)}, step)
    checkpoint = log.sizes()
    for step in (4, 5):  # after the checkpoint; the process dies without closing
        log.scalars("online", {"m": -1.0}, step)
    log.sizes()
    log.close()

    resumed = RunLogger(tmp_path, purge=checkpoint)
    for step in (4, 5, 6):
        resumed.scalars("online", {"m": float(step)}, step)
    second_checkpoint = resumed.sizes()
    resumed.scalars("online", {"m": -1.0}, 7)
    resumed.close()
    third = RunLogger(tmp_path, purge=second_checkpoint)
    third.scalars("online", {"m": 7.0}, 7)
    third.close()

    assert read(tmp_path, "online/m") == [(step, float(step)) for step in range(1, 8)]
    assert len(list(tmp_path.iterdir())) == 3


def test_two_resumes_from_one_checkpoint_leave_nothing_of_the_first(tmp_path: Path) -> None:
    log = RunLogger(tmp_path)
    log.scalars("online", {"m": 1.0}, 1)
    checkpoint = log.sizes()
    log.close()
    for value in (-1.0, 2.0):
        with RunLogger(tmp_path, purge=checkpoint) as resumed:
            resumed.scalars("online", {"m": value}, 2)
    assert read(tmp_path, "online/m") == [(1, 1.0), (2, 2.0)]


def test_rewind_drops_a_half_written_event(tmp_path: Path) -> None:
    log = RunLogger(tmp_path)
    log.scalars("online", {"m": 1.0}, 1)
    checkpoint = log.sizes()
    log.close()
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(b"\x18\x00\x00\x00\x00\x00")  # a record's length, cut off
    RunLogger.rewind(tmp_path, checkpoint)
    assert path.stat().st_size == checkpoint[path.name]
    assert [event.step for event in EventFileLoader(str(path)).Load()] == [0, 1]


def test_rewind_never_lengthens_a_file_and_ignores_missing_ones(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1.host.1.0"
    path.write_bytes(b"12345")
    (tmp_path / "result.json").write_text("{}")
    RunLogger.rewind(tmp_path, {path.name: 100, "events.out.tfevents.2.host.1.0": 7})
    assert path.read_bytes() == b"12345"
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, "result.json"]


def test_a_new_run_deletes_nothing(tmp_path: Path) -> None:
    RunLogger(tmp_path).close()
    RunLogger(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_opened_in_the_same_second_is_named_after_the_ones_before(tmp_path: Path, monkeypatch) -> None:
    started = 1_700_000_000.0
    monkeypatch.setattr(logger_module.time, "time", lambda: now[0])
    monkeypatch.setattr(logger_module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    now = [started]
    names = []
    for _ in range(3):
        with RunLogger(tmp_path) as log:
            names.append((set(log.sizes()) - set(names)).pop())
    assert names == sorted(names)
    assert [int(name.split(".")[3]) - int(started) for name in names] == [0, 1, 2]


def hparams_table(logdir: Path) -> list[tuple[dict[str, object], dict[str, float], int]]:
    """Per run what TensorBoard's HParams page lists: settings, metrics, status; asked of its backend."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    events = EventMultiplexer().AddRunsFromDirectory(str(logdir))
    events.Reload()
    provider = MultiplexerDataProvider(events, str(logdir))
    context = backend_context.Context(TBContext(logdir=str(logdir), data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        aggregation_type=api_pb2.AGGREGATION_AVG,
        allowed_statuses=[api_pb2.STATUS_SUCCESS, api_pb2.STATUS_RUNNING, api_pb2.STATUS_UNKNOWN],
        include_metrics=True,
    )
    response = list_session_groups.Handler(RequestContext(), context, "", request).run()
    rows = []
    for group in response.session_groups:
        settings = {name: getattr(v, v.WhichOneof("kind")) for name, v in group.hparams.items()}
        metrics = {value.name.tag: value.value for value in group.metric_values}
        rows.append((settings, metrics, group.sessions[0].status))
    return rows


def test_hparams_are_listed_from_the_start_and_get_their_metrics_at_the_end(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import api_pb2

    config = preset("quick").to_dict()
    with RunLogger(tmp_path / "run") as log:
        log.hparams(config)
        ((settings, metrics, status),) = hparams_table(tmp_path)
        assert metrics == {}
        assert status == api_pb2.STATUS_UNKNOWN  # TensorBoard for: not ended
        log.hparams(config, {"final_return": 62.5, "teacher_return": None})
    ((settings, metrics, status),) = hparams_table(tmp_path)
    assert settings["optimizer.batch_size"] == 32
    assert settings["td.double_q"] == "false"
    assert settings["td.loss"] == "huber"
    assert settings["distill.teacher_temperature"] == "none"
    assert metrics == {"result/final_return": 62.5}
    assert status == api_pb2.STATUS_SUCCESS
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [path.is_file() for path in (tmp_path / "run").iterdir()] == [True]  # no sub-run


def test_hparams_survive_a_resume(tmp_path: Path) -> None:
    log = RunLogger(tmp_path / "run")
    log.hparams({"seed": 1})
    checkpoint = log.sizes()
    log.close()
    with RunLogger(tmp_path / "run", purge=checkpoint) as resumed:
        resumed.hparams({"seed": 1}, dict.fromkeys(FINAL_METRICS, 1.0))
    ((settings, metrics, _),) = hparams_table(tmp_path)
    assert settings == {"seed": 1}
    assert metrics == {f"result/{name}": 1.0 for name in FINAL_METRICS}


def test_importing_the_logger_does_not_import_tensorboard() -> None:
    code = "import sys, reincarnate.logger; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_writing_is_cheap(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as log:
        start = time.perf_counter()
        for step in range(500):
            log.scalars("online", {"a": 1.0, "b": 2.0}, step)
        assert (time.perf_counter() - start) / 1_000 < 1e-3  # seconds per scalar


def test_a_full_disk_ends_in_one_error_and_not_in_a_trace_of_tensorboards_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", thread_failed)
    logger = RunLogger(tmp_path)
    monkeypatch.setattr(RecordWriter, "write", full)

    def log() -> None:
        for step in range(100):
            logger.scalars("online", {"m": 1.0}, step)
            logger.sizes()

    with pytest.raises(OSError, match="No space left"):
        log()
    assert capsys.readouterr().err == ""
    other = threading.Thread(target=full)  # of anybody else it is shown
    other.start()
    other.join()
    assert "No space left" in capsys.readouterr().err
