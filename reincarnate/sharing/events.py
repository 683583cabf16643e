"""TensorBoard's event files without this machine's names: the host's in theirs, paths in settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PATTERN = "events.out.tfevents.*"
Text = Callable[[str], str]


def rewrite(folder: Path, target: Path, clean: Text) -> list[Path]:
    """Copy a run's event files, every text in them through ``clean``; a damaged tail is left out.

    The names keep the second of creation, by which TensorBoard orders them, and drop host and process.
    """
    written = []
    for index, path in enumerate(sorted(folder.glob(PATTERN))):
        second = path.name.split(".")[3]
        copy = target / f"events.out.tfevents.{second if second.isdigit() else 0}.run.{index}"
        _copy(path, copy, clean)
        written.append(copy)
    return written


def _copy(path: Path, copy: Path, clean: Text) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    with copy.open("wb") as file:
        writer = RecordWriter(file)
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "hparams":
                    value.metadata.plugin_data.content = _hparams(value.metadata.plugin_data.content, clean)
                for index, text in enumerate(value.tensor.string_val):
                    value.tensor.string_val[index] = clean(text.decode("utf-8", "replace")).encode()
            writer.write(event.SerializeToString())


def _hparams(content: bytes, clean: Text) -> bytes:
    """The hyper-parameters of a run: their values, and the values that an experiment lists."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = HParamsPluginData.FromString(content)
    values = list(data.session_start_info.hparams.values())
    for info in data.experiment.hparam_infos:
        values += info.domain_discrete.values
    for value in values:
        if value.HasField("string_value"):
            value.string_value = clean(value.string_value)
    return bytes(data.SerializeToString())
