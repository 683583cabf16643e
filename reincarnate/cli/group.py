"""The group of all commands: errors in one line, exit codes, and what every command prints with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import click

from reincarnate.errors import UserError

EXIT_USER_ERROR = 2
EXIT_STOPPED = 130


class _Group(click.Group):
    """Turns what a user caused into one line and exit code 2, and a stop into exit code 130."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        from reincarnate.phases import Stopped

        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.Exit as exit_:
            sys.exit(exit_.exit_code)
        except click.ClickException as error:
            _fail(error.format_message())
        except UserError as error:
            _fail(str(error))
        except OSError as error:  # full or unwritable disks; whatever else it is, it is said
            place = f"{error.filename}: " if error.filename else ""
            _fail(f"{place}{error.strerror or error}; check that it exists and can be written")
        except MemoryError:
            _fail("there is not enough memory for this; free some, or ask for less")
        except (Stopped, KeyboardInterrupt, click.Abort):
            sys.exit(EXIT_STOPPED)


def _fail(message: str) -> None:
    click.echo(f"reincarnate: {' '.join(_printable(message).split())}", err=True)
    sys.exit(EXIT_USER_ERROR)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="reincarnate")
def main() -> None:
    """Reincarnating reinforcement learning: reuse a policy that somebody already trained."""


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
