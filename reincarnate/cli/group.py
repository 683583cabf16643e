"""The group of all commands: errors in one line, exit codes, and what every command prints with."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from reincarnate.errors import UserError

EXIT_USER_ERROR = 2
EXIT_STOPPED = 130


class _Group(click.Group):
    """Turns what a user caused into one line and exit code 2, and a stop into exit code 130."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        threading.excepthook = thread_failed
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.Exit as exit_:
            sys.exit(exit_.exit_code)
        except (KeyboardInterrupt, click.Abort):
            sys.exit(EXIT_STOPPED)
        except Exception as error:
            if _is_stop(error):
                sys.exit(EXIT_STOPPED)
            if type(error).__name__ == "NoArgsIsHelpError":  # of click 8.2; no mistake, and more than a line
                click.echo(str(error), err=True)
                sys.exit(EXIT_USER_ERROR)
            message = _message(error)
            if message is None:
                raise
            _fail(message)


def thread_failed(failure: threading.ExceptHookArgs) -> None:
    """What TensorBoard's thread cannot write it raises again where the run writes next: there it is told."""
    ours = type(failure.thread).__module__.startswith("tensorboard.")
    if not (ours and issubclass(failure.exc_type, OSError)):
        threading.__excepthook__(failure)


def _message(error: Exception) -> str | None:
    """What to tell the user; None of an error that is nobody's but ours."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):  # full or unwritable disks; whatever else it is, it is said
        place = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some room, or write elsewhere" if full else "check that it exists and can be written"
        return f"{place}{error.strerror or error}; {remedy}"
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return "there is not enough memory for this; free some, or ask for less"
    return None


def _is_stop(error: Exception) -> bool:
    """Whether a run was asked to stop; importing what says so would load torch for every ``--help``."""
    phases = sys.modules.get("reincarnate.phases.stage")
    return phases is not None and isinstance(error, phases.Stopped)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether PyTorch has found no memory; on the CPU it says so in words alone."""
    words = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return words or type(error).__name__ == "OutOfMemoryError"


def _fail(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody to tell it to
        click.echo(f"reincarnate: {' '.join(_printable(message).split())}", err=True)
    sys.exit(EXIT_USER_ERROR)


class FilledPath(click.Path):
    """A path; an empty one (an unset variable of a shell) would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, unless it is empty."""
        if value == "":
            self.fail("it is empty; give a path, or . for the current folder", param, ctx)
        return super().convert(value, param, ctx)


#: Of options and arguments that name a file or a folder.
PATH = FilledPath(path_type=Path)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="reincarnate")
@click.pass_context
def main(context: click.Context) -> None:
    """Reincarnating reinforcement learning: reuse a policy that somebody already trained."""
    if context.invoked_subcommand != "run" and "WORLD_SIZE" in os.environ:
        from reincarnate.ranks import refuse_several

        refuse_several(f"`reincarnate {context.invoked_subcommand}`")


def print_result(value: Any, as_json: bool, lines: Callable[[], list[str]]) -> None:
    """One JSON document, or lines for people, on standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False) if as_json else _printable("\n".join(lines())))


def say(line: str) -> None:
    """A line beside the result, on standard error."""
    click.echo(_printable(line), err=True)


def _printable(text: str) -> str:
    """Names out of files and repositories are among it: no control characters of somebody's making."""
    from reincarnate.wording import printable

    return printable(text)
