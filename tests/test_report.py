"""Pictures, page and model card of fabricated runs of every kind, and of damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from reincarnate.errors import UserError
from reincarnate.report import model_card, plot_run, plots, read_run, write_report
from reincarnate.report import page as page_module

from cli_calls import invoke, refused
from html_page import Page
from reported_runs import KINDS, make_run


@pytest.fixture(scope="module", params=KINDS, ids=lambda name: name.replace(" ", "-"))
def any_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), **KINDS[request.param])


# ---------------------------------------------------------------- all kinds of runs


@pytest.mark.parametrize("kind", ["full", "scratch", "stopped before training", "hostile names"])
def test_a_report_is_pictures_and_one_self_contained_page(kind: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path, **KINDS[kind])
    written = write_report(folder)
    names = ["curves.png", "curves.svg", "losses.png", "losses.svg", "report.html"]
    learnt = kind != "stopped before training"
    assert [path.name for path in written] == [n for n in names if learnt or not n.startswith("losses")]
    for path in written:
        head = path.read_bytes()[:200]
        assert {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doctype html>"}[path.suffix] in head
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert [source[:22] for source in page.sources] == ["data:image/png;base64,"] * (1 + learnt)


def test_every_kind_of_run_gets_a_whole_page(any_run: Path) -> None:
    page = Page(page_module.page(read_run(any_run), b"curves", None))
    assert page.open == []
    assert not {"script", "link", "iframe"} & page.tags


def test_no_two_texts_of_a_picture_overlap_and_none_leaves_it(any_run: Path) -> None:
    run = read_run(any_run)
    for figure in filter(None, (plots.curves_figure(run), plots.losses_figure(run))):
        figure.draw_without_rendering()
        edges = figure.bbox
        boxes = [(text.get_text(), text.get_window_extent()) for text in shown_texts(figure)]
        for index, (first, box) in enumerate(boxes):
            assert edges.x0 <= box.x0, first
            assert edges.y0 <= box.y0, first
            assert box.x1 <= edges.x1, first
            assert box.y1 <= edges.y1, first
            for second, other in boxes[index + 1 :]:
                assert not box.overlaps(other), (first, second)


def shown_texts(figure: Any) -> list[Any]:
    """Every text that is drawn: matplotlib also keeps labels of ticks outside the axes."""
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            if axis.get_tick_params()[f"label{'bottom' if axis is axes.xaxis else 'left'}"]:
                texts += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def test_every_kind_of_run_gets_a_card_that_the_hub_can_read(any_run: Path) -> None:
    card = ModelCard(model_card(any_run), ignore_metadata_errors=False)
    assert card.data.library_name == "reincarnate"
    assert {"Breakout-v5", "reinforcement-learning"} <= set(card.data.tags)
    run = read_run(any_run)
    measured = run.returns("final") or run.returns("offline")
    if measured is None:
        assert card.data.eval_results is None
    else:
        (claim,) = card.data.eval_results
        assert claim.metric_value == f"{measured.mean:.2f} +/- {measured.std:.2f}"
        assert (claim.task_type, claim.dataset_name) == ("reinforcement-learning", "Breakout-v5")
        assert (claim.metric_type, claim.verified) == ("mean_reward", False)


# ---------------------------------------------------------------- bad input


def damage(folder: Path, name: str, text: str | None) -> None:
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("result.json", None, "holds no run with a result yet"),
        ("result.json", "{", "result.json cannot be read as JSON"),
        ("result.json", "[]", "result.json is damaged: it holds no JSON object"),
        ("result.json", '{"format": 2}', "has format 2, known is 1"),
        (
            "result.json",
            '{"format": 1, "env": 3}',
            "student, buffers, phases, distill, versions, env, status",
        ),
        ("config.json", None, "config.json does not exist"),
        ("teacher.json", "nonsense", "teacher.json cannot be read as JSON"),
        ("curves.json", None, "curves.json does not exist"),
        ("curves.json", "{}", "does not hold the curves of a run"),
        ("student.safetensors", "<html>", "student.safetensors is damaged"),
    ],
)
def test_damaged_runs_are_one_clear_line(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    folder = make_run(tmp_path, saved=True)
    damage(folder, name, text)
    for use in (write_report, model_card, plot_run):
        with pytest.raises(UserError, match=message) as caught:
            use(folder)
        assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run with a result yet"):
        write_report(tmp_path)


def test_a_path_that_does_not_exist_is_said_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/demo"))
    for given, told in (
        ("runs/demmo", "'runs/demmo' does not exist (did you mean 'runs/demo'?); give the folder of a run"),
        ("NOTHERE", "'NOTHERE' does not exist; give the folder of a run"),
    ):
        assert refused(invoke("report", given)) == f"reincarnate: {told}"
        assert refused(invoke("report", "runs/demo", given, "--out", "both")) == f"reincarnate: {told}"
    assert not Path("both").exists()
