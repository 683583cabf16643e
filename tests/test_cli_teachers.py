"""``reincarnate teachers``: filters, tables, claims, diagnosis, JSON."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from reincarnate.cli import main
from reincarnate.cli.teachers import table
from reincarnate.teachers.formats import save_native
from reincarnate.teachers.reference import BUNDLED
from reincarnate.teachers.teacher import Reported, TeacherCard, TeacherSpec
from reincarnate.teachers.zoo import load_teacher

from cli_calls import refused
from small_runs import TEACHER

TRIAL = {"cause", "setting", "return", "p", "agrees", "p_change", "share", "problem"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["teachers", *arguments])


def test_list_filters_and_says_that_nothing_fits() -> None:
    rows = json.loads(invoke("list", "--env", "breakout", "--algorithm", "dqn", "--json").stdout)
    assert {row["env"] for row in rows} == {"Breakout-v5"}
    assert {"bundled/Breakout-dqn", "sb3/dqn-BreakoutNoFrameskip-v4"} <= {row["ref"] for row in rows}
    assert invoke("list", "--source", "bundled").stdout.splitlines()[0].split() == [
        "reference",
        "env",
        "algorithm",
        "source",
        "cached",
    ]
    nothing = invoke("list", "--env", "Chess")
    assert nothing.exit_code == 0
    assert "no teacher that is listed fits" in nothing.stderr
    assert json.loads(invoke("list", "--env", "Chess", "--json").stdout) == []


def test_eval_is_remembered_by_show_and_a_remark_names_the_claims_rule() -> None:
    done = invoke("eval", TEACHER, "--episodes", "4", "--act", "epsilon=0.9")
    assert done.exit_code == 0, done.output
    assert "the claim was made with --act epsilon=0.01, this measurement with epsilon=0.9" in done.stdout
    measured = json.loads(invoke("show", TEACHER, "--json").stdout)["measured"]
    assert [(each["act"], each["backend"], each["return"]["n"]) for each in measured] == [
        ("epsilon=0.9", "envpool", 4)
    ]
    text = invoke("show", TEACHER).stdout
    assert "405.6 ± 65.6" in text
    assert "(4 games, epsilon=0.9, envpool, CartPole-v1, 20" in text
    assert "10,934" in text


def test_eval_names_the_file_that_the_user_named(tmp_path: Path) -> None:
    """Of a snapshot that was downloaded, say, whose folder is called after its commit."""
    file = tmp_path / "snapshots" / ("ab" * 20) / "agent.safetensors"
    file.parent.mkdir(parents=True)
    shutil.copyfile(BUNDLED / "CartPole-dqn" / "teacher.safetensors", file)
    done = invoke("eval", str(file), "--episodes", "2")
    assert done.stdout.splitlines()[0].startswith(f"{file} (epsilon=0.01): ")
    assert invoke("eval", TEACHER, "--episodes", "2").stdout.startswith(f"{TEACHER} (epsilon=0.01): ")


def test_a_hub_teacher_is_called_by_what_it_resolved_to() -> None:
    card = TeacherCard("cleanrl/short", "cleanrl/short-seed1", "ab" * 20, "f", "0" * 64, "native")
    assert card.name == "cleanrl/short-seed1"
    assert dataclasses.replace(card, ref="./f", resolved="/somewhere", revision=None).name == "./f"


def test_diagnosis_is_asked_for_and_its_table_ends_with_the_setting() -> None:
    options = ["eval", TEACHER, "--episodes", "8", "--act", "epsilon=1", "--diagnose"]
    measured = json.loads(invoke(*options, "--json").stdout)
    assert set(measured) == {"ref", "resolved", "act", "return", "reported", "agrees", "diagnosis"}
    diagnosis = measured["diagnosis"]
    assert (diagnosis["restored_by"], diagnosis["sure"]) == ("acting rule", True)
    assert diagnosis["setting"] in {"epsilon=0.01", "greedy", "sample", "epsilon=0.05"}
    assert all(set(trial) == TRIAL for trial in diagnosis["trials"])
    text = invoke(*options).stdout.splitlines()
    assert text[1].startswith("differs from the reported 405.6")
    assert text[4].split()[:2] == ["cause", "setting"]
    assert "restores the claimed return" in text[-1]


def test_nothing_is_diagnosed_where_the_claim_holds_or_where_there_is_none(tmp_path: Path) -> None:
    fine = invoke("eval", TEACHER, "--episodes", "4", "--claim", "300 +/- 400", "--diagnose")
    assert "nothing to diagnose" in fine.stdout
    bad = invoke("eval", TEACHER, "--claim", "many")
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert "no claim 'many'" in bad.stderr


@pytest.mark.parametrize("option", ["--diagnose", "--diagnose-always"])
def test_an_agent_with_a_memory_is_not_diagnosed_and_nothing_is_played(option: str, tmp_path: Path) -> None:
    env = load_teacher(TEACHER).spec.env
    spec = TeacherSpec(env, "policy_logits", "mlp", {"hidden": [8], "core": 8}, "muesli")
    file = tmp_path / "student.safetensors"
    save_native(file, spec.build(), spec, reported=Reported(500.0, "the run that trained it", 1.0, 16))
    line = refused(invoke("eval", str(file), option))
    assert line == (
        f"reincarnate: {file} has an LSTM, and a diagnosis plays single observations without a memory: "
        "leave out --diagnose"
    )
    assert invoke("eval", str(file), "--episodes", "2").exit_code == 0


def test_collect_has_a_json_document(tmp_path: Path) -> None:
    out = tmp_path / "data"
    done = invoke("collect", TEACHER, "--out", str(out), "--steps", "100", "--num-envs", "2", "--json")
    document = json.loads(done.stdout)
    assert (document["path"], document["agent_steps"], document["reused"]) == (str(out), 100, False)


def test_cells_are_printed_as_they_are_but_for_control_characters() -> None:
    lines = table(["a", "b"], [["[red]x[/red]", "y\x1b[2J\nz"], ["", "w" * 300]])
    assert lines[1].split() == ["[red]x[/red]", "y[2J", "z"]
    assert "".join(line.strip() for line in lines[2:]) == "w" * 300
    assert all(len(line) <= 160 for line in lines)
