"""Calls of the command line, and the one line of an error."""

from __future__ import annotations

import sys

from click.testing import CliRunner, Result

from reincarnate.cli import main


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "reincarnate", *arguments]


def refused(result: Result) -> str:
    """The one line of an error that the user caused."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("reincarnate: ")
    return lines[0]


def refused_last_line(result: Result) -> str:
    assert result.exit_code == 2, result.output
    return result.stderr.strip().splitlines()[-1]
