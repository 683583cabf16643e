"""What the page of a run says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reincarnate.report import model_card, plot_run, read_run
from reincarnate.report import page as page_module

from html_page import Page
from reported_runs import EVIL, KINDS, games, make_run


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("full"))


def page_of(folder: Path) -> tuple[str, Page]:
    text = page_module.page(read_run(folder), b"", None)
    return text, Page(text)


def test_the_page_has_returns_phases_settings_and_versions(full_run: Path) -> None:
    text, page = page_of(full_run)
    rows = {row[0]: row[1:] for row in page.rows}
    low, high = games(62.0).ci95
    assert rows["qdagger-dqn after 10,000 online agent steps"] == [
        "62.0",
        f"[{low:.1f}, {high:.1f}]",
        "2.6",
        "4",
        "epsilon=0.01",
        f"{60 / 68:.3f}",
        f"{(62 - 1.7) / (30.5 - 1.7):.3f}",
    ]
    assert rows["qdagger-dqn after 2,500 offline updates"][-2] == f"{40 / 68:.3f}"
    assert rows["teacher (G_T)"][-2] == "1.000"
    assert rows["random policy (G_random)"][-3:-1] == ["uniform", "0.000"]
    assert rows["offline"] == ["2,500 updates", "125.0", "20.0 updates/s"]
    assert rows["online"] == ["10,000 agent steps", "200.0", "50.0 agent steps/s"]
    assert rows["collect"] == ["40,000 agent steps (reused)", "11.5", ""]
    assert rows["teacher data D_T"] == ["40,000", "1.0"]
    assert rows["reported return"] == ["69.8 ± 25.7 (model card)"]
    assert rows["assumed noop_max"] == ["CleanRL's wrappers"]
    assert rows["optimizer.batch_size"] == ["32"]
    assert rows["distill.teacher_temperature"] == ["–"]
    assert rows["torch"] == ["2.13.0"]
    assert "versions.torch" not in rows
    assert "After 10,000 online agent steps the student&#x27;s mean return is 62.0, 88 % of" in text
    assert "From agent step 5,000 on it learnt without the teacher." in text


@pytest.mark.parametrize(
    ("student", "shown", "left_out"),
    [
        ("qdagger-dqn", {"td.", "distill.", "collect."}, {"muesli."}),
        ("qdagger-muesli", {"muesli.", "distill.", "collect."}, {"td.", "online.epsilon_"}),
        ("dqn", {"td.", "online.epsilon_"}, {"muesli.", "distill.coefficient", "collect.", "offline."}),
        ("somebody-elses", {"td.", "muesli.", "collect."}, set()),
    ],
)
def test_page_and_card_list_the_settings_that_the_student_reads(
    student: str, shown: set[str], left_out: set[str], tmp_path: Path
) -> None:
    folder = make_run(tmp_path, student=student)
    _, page = page_of(folder)
    on_the_page = [row[0] for row in page.rows]
    in_the_card = [line.removeprefix("- ") for line in model_card(folder).splitlines()]
    for names in (on_the_page, in_the_card):
        assert all(any(name.startswith(start) for name in names) for start in shown)
        assert not any(name.startswith(start) for name in names for start in left_out)


def test_names_from_elsewhere_cannot_write_html(tmp_path: Path) -> None:
    text, page = page_of(make_run(tmp_path, ref=EVIL, student=EVIL))
    assert "<script" not in text
    assert ["ref", EVIL] in page.rows


def test_a_scratch_page_speaks_of_no_teacher(tmp_path: Path) -> None:
    text, page = page_of(make_run(tmp_path, **KINDS["scratch"]))
    assert "Teacher" not in text
    assert [row[0] for row in page.rows if row[0].startswith("teacher ")] == []
    assert "the student&#x27;s mean return is 62.0." in text


def test_a_stopped_run_says_so(tmp_path: Path) -> None:
    text, _ = page_of(make_run(tmp_path, **KINDS["stopped before training"]))
    assert "This run is stopped" in text


def test_no_share_of_a_teacher_that_is_no_better_than_random(tmp_path: Path) -> None:
    text, _ = page_of(make_run(tmp_path, **KINDS["teacher below random"]))
    assert "The teacher&#x27;s mean return is not above random play&#x27;s." in text
    assert "% of the teacher" not in text


def test_a_stopped_online_phase_is_dated_by_its_last_evaluation(tmp_path: Path) -> None:
    folder = make_run(tmp_path, status="stopped")
    result = json.loads((folder / "result.json").read_text())
    result["phases"]["online"]["agent_steps"] = 10_800
    (folder / "result.json").write_text(json.dumps(result))
    assert read_run(folder).moment("final") == "10,000 online agent steps"
    assert plot_run(folder).axes[1].get_xlim()[1] == pytest.approx(10_800 * 1.015)
