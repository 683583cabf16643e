"""What the model card of a run says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reincarnate.report import model_card, read_run
from reincarnate.report.card import code

from reported_runs import EVIL, KINDS, games, make_run


def test_the_card_tells_what_it_is_and_how_to_use_it(tmp_path: Path) -> None:
    text = model_card(make_run(tmp_path, saved=True))
    for words in (
        "# qdagger-dqn on Breakout-v5",
        "reincarnated from the teacher `bundled/Breakout-dqn`",
        f"| its teacher | 70.0 | {games(70.0).ci95[0]:.1f} to {games(70.0).ci95[1]:.1f} | 2.6 | 4 | 1.000 |",
        "The student acts by `epsilon=0.01`, the teacher by `epsilon=0.01`.",
        "- obs_shape: `[4, 84, 84]`",
        f"- sha256: `{'ab' * 32}`",
        "- network: `impala`",
        "reincarnate teachers eval FOLDER",
        'agent = reincarnate.load_teacher("FOLDER")',
        "observations [B, 4, 84, 84] -> Q-values [B, actions]",
        "<https://arxiv.org/abs/2206.01626>",
    ):
        assert words in text


def test_a_local_teacher_is_named_without_its_owner_s_folders(tmp_path: Path) -> None:
    folder = make_run(tmp_path, ref="/home/somebody/models/Breakout/dqn.cleanrl_model")
    text = model_card(folder)
    assert "somebody" not in text
    assert "- ref: `…/Breakout/dqn.cleanrl_model`" in text
    assert read_run(folder).title == "Breakout-v5: …/Breakout/dqn.cleanrl_model → qdagger-dqn"


def test_a_scratch_card_has_no_teacher(tmp_path: Path) -> None:
    text = model_card(make_run(tmp_path, **KINDS["scratch"]))
    assert "trained without a teacher" in text
    assert "## Teacher" not in text
    assert "QDagger" not in text


def test_a_scratch_student_beside_a_teacher_is_not_called_reincarnated(tmp_path: Path) -> None:
    folder = make_run(tmp_path, student="dqn", offline=0)
    result = json.loads((folder / "result.json").read_text())
    result["teacher"]["learnt_from"] = False
    (folder / "result.json").write_text(json.dumps(result))
    teacher = json.loads((folder / "teacher.json").read_text())
    (folder / "teacher.json").write_text(json.dumps(teacher | {"revision": "ab" * 20, "resolved": "a/b"}))
    text = model_card(folder)
    for words in (
        "eincarnated from",
        "reincarnating-rl",
        "base_model",
        "its teacher",
        "## Teacher\n",
        "QDagger",
    ):
        assert words not in text
    for words in (
        "trained from scratch and measured beside the teacher `bundled/Breakout-dqn`",
        "The student learnt from scratch; the teacher was only measured beside it.",
        "| the teacher beside it | 70.0 |",
        "## Teacher, not learnt from",
    ):
        assert words in text
    result["teacher"]["learnt_from"] = True
    (folder / "result.json").write_text(json.dumps(result))
    assert "base_model: a/b" in model_card(folder)
    assert "- reincarnating-rl" in model_card(folder)


def test_names_from_elsewhere_cannot_write_markdown(tmp_path: Path) -> None:
    text = model_card(make_run(tmp_path, ref=EVIL, student=EVIL))
    assert "\n# \\alpha" not in text
    body = text.split("\n---\n", 1)[1]
    assert [row for row in body.splitlines() if row.startswith("# ")] == [
        "# \\<script\\>alert('x')\\</script\\> \\& \\`$x_1$\\` \\| \\# \\\\alpha on Breakout-v5"
    ]


@pytest.mark.parametrize(
    ("value", "markdown"),
    [
        ("plain", "`plain`"),
        ("a`b", "`` a`b ``"),
        ("``", "``` `` ```"),
        ("two\nlines", "`two lines`"),
        (3, "`3`"),
    ],
)
def test_code_cannot_be_broken_out_of(value: object, markdown: str) -> None:
    assert code(value) == markdown
