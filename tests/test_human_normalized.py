"""Human-normalised returns of one run where its user looks; not a word of them outside Atari.

Those of ``result.json`` are in ``test_run.py``; those of comparisons, and the scores, in
``test_comparison.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from reincarnate import api
from reincarnate.config import preset
from reincarnate.phases import evaluate_student, evaluation
from reincarnate.report import model_card, read_run
from reincarnate.report.page import page

from cli_calls import invoke
from compared_runs import games
from html_page import Page
from reported_runs import KINDS, make_run

BREAKOUT, CARTPOLE = "Breakout-v5", "CartPole-v1"
RANDOM, HUMAN = 1.7, 30.5  # of Breakout, as published


def share(score: float) -> float:
    return (score - RANDOM) / (HUMAN - RANDOM)


def returns_table(folder: Path) -> dict[str, list[str]]:
    """The page's table of returns, by the first word of each row."""
    rows = Page(page(read_run(folder), b"", None)).rows
    first = next(number for number, row in enumerate(rows) if "mean return" in row)
    return {(row[0].split() or [""])[0]: row for row in rows[first : first + 5]}


def test_the_page_has_every_return_beside_a_humans(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    rows = returns_table(folder)
    assert rows[""][-2:] == ["teacher-normalised", "human-normalised"]
    assert rows["teacher"][-1] == f"{share(70):.3f}"
    assert rows["random"][-1] == f"{share(2):.3f}"  # as measured here, which is not what was published
    assert rows["qdagger-dqn"][-1] == f"{share(62):.3f}"
    text = page(read_run(folder), b"", None)
    assert "with the published scores of this game, random 1.7 and human 30.5 (Mnih" in text


def test_the_card_has_every_return_beside_a_humans(tmp_path: Path) -> None:
    text = model_card(make_run(tmp_path))
    lines = text.splitlines()
    head = lines.index(
        "| | mean return | 95 % interval | std | games | teacher-normalised | human-normalised |"
    )
    assert lines[head + 1] == "|---|---|---|---|---|---|---|"
    last = [line.split(" | ")[-2:] for line in lines[head + 2 : head + 6]]
    expected = [(60 / 68, 62), (40 / 68, 42), (1, 70), (0, 2)]  # final, offline, teacher, random
    assert last == [[f"{own:.3f}", f"{share(score):.3f} |"] for own, score in expected]
    assert "random 1.7 and human 30.5 (Mnih et al. 2015, Wang et al. 2016)." in text


def test_a_student_from_scratch_has_a_place_among_humans_alone(tmp_path: Path) -> None:
    folder = make_run(tmp_path, **KINDS["scratch"])
    assert returns_table(folder)["dqn"][-2:] == ["–", f"{share(62):.3f}"]
    assert "Teacher-normalised" not in page(read_run(folder), b"", None)


def test_outside_atari_page_and_card_do_not_speak_of_humans(tmp_path: Path) -> None:
    folder = make_run(tmp_path, env=CARTPOLE)
    assert returns_table(folder)[""][-1] == "teacher-normalised"
    for text in (page(read_run(folder), b"", None), model_card(folder)):
        assert "Teacher-normalised is" in text
        assert "human" not in text.lower()


@pytest.mark.parametrize("final", [share(62), None])
def test_the_last_line_of_a_run_says_it(
    final: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads((make_run(tmp_path) / "result.json").read_text())
    document["student"]["human_normalized"] = {"offline": None, "final": final}
    monkeypatch.setattr(api, "run", lambda *_, **__: api.RunResult(tmp_path, document))
    told = invoke("run", "--teacher", "bundled/Breakout-dqn").stderr.splitlines()[-1]
    human = "" if final is None else "; 2.09 human-normalised (published scores)"
    teacher = "0.88 on the way from random play (0) to the teacher (1)"
    assert told.endswith(f"; {teacher}{human}; see {tmp_path / 'report.html'}")


@pytest.mark.parametrize(("env", "human"), [(BREAKOUT, share(62)), (CARTPOLE, None)])
@pytest.mark.parametrize(("phase", "step"), [("offline", 7), ("online", 9)])
def test_tensorboard_has_it_beside_the_teachers(
    env: str, human: float | None, phase: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_evaluate", lambda *_: games(62.0))
    stage = mock.Mock(config=preset("quick"), teacher_return=games(70.0), random_return=games(2.0))
    stage.student.outputs, stage.spec = "q_values", SimpleNamespace(env_id=env)
    evaluate_student(stage, phase, updates=7, agent_steps=9, seconds=1.0)
    (where, values, at), _ = stage.logger.scalars.call_args
    assert (where, at) == (f"{phase}/evaluation", step)
    assert values["teacher_normalized"] == pytest.approx(60 / 68)
    assert values.get("human_normalized") == (None if human is None else pytest.approx(human))
