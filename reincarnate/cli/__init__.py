"""The command line: thin, one file per group of commands; the work is in the library."""

from reincarnate.cli import bench, compare, export, push, run, students, teachers, watch
from reincarnate.cli.group import main

__all__ = ["bench", "compare", "export", "main", "push", "run", "students", "teachers", "watch"]
