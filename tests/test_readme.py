"""The README's promises: its Python runs, its commands parse, its files are there."""

import re
import shlex

import pytest
from click import Context, Group

from reincarnate.cli import main
from reincarnate.cli.run import RUN_OPTIONS, key_value, run
from reincarnate.students.student import get_student, refuse_unread

from paths import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
DOCS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("**/*.md"))]
COMMANDS = [
    line.split("#")[0].strip()
    for path in DOCS
    for line in path.read_text().replace("\\\n", " ").splitlines()  # a backslash continues a line
    if line.startswith("    reincarnate ") and "[" not in line
]


def parse(group: Group, arguments: list[str]) -> None:
    """Resolve and parse a command line without running it; click raises on anything it does not know."""
    context = Context(group)
    name, command, rest = group.resolve_command(context, arguments)
    assert command is not None, name
    if isinstance(command, Group):
        parse(command, rest)
    else:
        command.make_context(name, rest)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_documented_command_parses(line: str) -> None:
    parse(main, shlex.split(line)[1:])


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("reincarnate run ")])
def test_every_documented_run_is_given_what_its_student_reads(line: str) -> None:
    given = run.make_context("run", shlex.split(line)[2:]).params
    settings = {
        setting: given[option] for option, setting in RUN_OPTIONS.items() if given[option] is not None
    }
    settings |= dict(key_value(text) for text in given["settings"])
    refuse_unread([get_student(given["student"] or "qdagger-dqn")], settings)


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 10


def test_the_python_example_runs_as_it_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "32 games" in printed
    assert "'final':" in printed
    assert (tmp_path / "runs" / "cartpole" / "student.safetensors").exists()
    assert (tmp_path / "data" / "cartpole" / "manifest.json").exists()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
