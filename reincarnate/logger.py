"""TensorBoard: scalars, hyper-parameters, and event files that can be taken back to a checkpoint.

Step axes: ``offline/*`` is drawn over updates, ``online/*`` over agent steps; the caller passes the step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

#: Columns of TensorBoard's HParams table; ``hparams`` fills those that a run has.
FINAL_METRICS = (
    "final_return",
    "teacher_normalized_final",
    "offline_return",
    "teacher_normalized_offline",
    "teacher_return",
    "random_return",
)
_EVENTS = "events.out.tfevents.*"
_LONGEST_WAIT_SECONDS = 5.0


class RunLogger:
    """Writes the events of one run; one event file per process that worked on it.

    ``purge``: on resume, the sizes of the checkpoint that the run continues from (see :meth:`rewind`).
    """

    def __init__(self, directory: Path, purge: Mapping[str, int] | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports tensorboard: slow

        if purge is not None:
            self.rewind(directory, purge)
        _wait_for_a_later_name(directory)
        self._directory = Path(directory)
        self._writer: SummaryWriter = SummaryWriter(str(directory), max_queue=1_000, flush_secs=10)
        self._session_started = False

    def scalars(self, phase: str, values: Mapping[str, float], step: int) -> None:
        """One point of each ``phase/name``."""
        for name, value in values.items():
            self._writer.add_scalar(f"{phase}/{name}", float(value), step)

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Markdown under TensorBoard's Text tab."""
        self._writer.add_text(tag, text, step)

    def hparams(self, settings: Mapping[str, Any], metrics: Mapping[str, float | None] | None = None) -> None:
        """Show ``settings`` (nested, or with dotted names) under TensorBoard's HParams.

        Call it when the run starts, without metrics, so that a run in progress or stopped is listed; and
        again at the end with the final metrics, which become ``result/NAME`` (columns: FINAL_METRICS).
        Everything goes into this run's own event file. None is written as a word, so that all runs have the
        same columns (TensorBoard takes the columns from the first run it finds).
        """
        from torch.utils.tensorboard.summary import hparams

        tags = {f"result/{name}": 0.0 for name in FINAL_METRICS}
        experiment, start, end = hparams(_flat(settings), tags)  # type: ignore[no-untyped-call]
        files = self._writer._get_file_writer()  # type: ignore[no-untyped-call]
        if not self._session_started:
            files.add_summary(experiment)
            files.add_summary(start)
            self._session_started = True
        if metrics is not None:
            self.scalars("result", {name: value for name, value in metrics.items() if value is not None}, 0)
            files.add_summary(end)
        self._writer.flush()

    def sizes(self) -> dict[str, int]:
        """Flush, then the bytes of every event file of this run, by name; a checkpoint stores it."""
        self._writer.flush()
        return {path.name: path.stat().st_size for path in _event_files(self._directory)}

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        self._writer.close()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def rewind(directory: Path, sizes: Mapping[str, int]) -> None:
        """Take the event files back to a checkpoint: what is newer disappears.

        Each listed file is cut to its size (``sizes`` ends on a whole event); files that are not listed were
        opened after the checkpoint and are deleted. So no curve in TensorBoard ever steps backwards.
        """
        for path in _event_files(Path(directory)):
            if path.name not in sizes:
                path.unlink()
            elif path.stat().st_size > sizes[path.name]:
                os.truncate(path, sizes[path.name])


class SilentLogger(RunLogger):
    """Writes nothing: of a rank whose run another one logs."""

    def __init__(self) -> None:
        """No file is opened."""

    def scalars(self, phase: str, values: Mapping[str, float], step: int) -> None:
        """Nothing."""

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Nothing."""

    def hparams(self, settings: Mapping[str, Any], metrics: Mapping[str, float | None] | None = None) -> None:
        """Nothing."""

    def sizes(self) -> dict[str, int]:
        """No files."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


def _event_files(directory: Path) -> Sequence[Path]:
    return sorted(directory.glob(_EVENTS))


def _wait_for_a_later_name(directory: Path) -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second of creation.

    A resume within the same second could therefore be read before the file it continues.
    """
    names = [path.name for path in _event_files(Path(directory))]
    newest = max((int(name.split(".")[3]) for name in names if name.split(".")[3].isdigit()), default=0)
    give_up = time.monotonic() + _LONGEST_WAIT_SECONDS  # the clock of another machine may be far ahead
    while int(time.time()) <= newest and time.monotonic() < give_up:
        time.sleep(0.05)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float]:
    """Dotted names; truth values and None as words (true would be shown as 1.0), lists as text."""
    flat: dict[str, str | int | float] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool) or value is None:
            flat[prefix + name] = str(value).lower()
        else:
            flat[prefix + name] = value if isinstance(value, str | int | float) else str(value)
    return flat
