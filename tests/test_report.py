"""Pictures, page and model card of fabricated runs of every kind."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import save_file

from reincarnate.config import override, preset
from reincarnate.curves import Curves
from reincarnate.errors import UserError
from reincarnate.report import model_card, plot_run, plots, read_run, write_report
from reincarnate.report import page as page_module
from reincarnate.report.card import code
from reincarnate.types import EnvSpec, Returns

EVIL = "<script>alert('x')</script> & `$x_1$` | \n# \\alpha"
VERSIONS = {"python": "3.11.9", "reincarnate": "0.1.0", "torch": "2.13.0"}
ENV = EnvSpec("Breakout-v5", "atari", 4, (4, 84, 84))


def games(mean: float) -> Returns:
    """Four games around ``mean``: std 2.58."""
    return Returns.from_games([mean - 3, mean - 1, mean + 1, mean + 3])


def make_curves(
    teacher: Returns | None, random: Returns, offline: int, online: int, evaluations: int
) -> Curves:
    """Student return rises from random + 20 to random + 60; m falls to 0 at half of the online phase."""
    curves = Curves(teacher=teacher, random=random)
    shares = [(index + 1) / evaluations for index in range(evaluations)]
    for step in range(0, offline, max(1, offline // 50)):
        curves.add_losses("offline", step, {"td_loss": 1 / (1 + step), "distill_loss": 0.5})
    for share in shares if offline else []:
        value = games(random.mean + 20 + 20 * share)
        curves.add_evaluation("offline", round(share * offline), 0, "epsilon=0.01", value)
    for step in range(online // 50, online, max(1, online // 50)):
        curves.add_game(step, random.mean + 30 + step / online * 10)
        curves.add_losses("online", step, {"td_loss": 0.02, **({"distill_loss": 0.4} if teacher else {})})
        if teacher:
            curves.add_coefficient(step, max(0.0, 1 - 2 * step / online), None)
    for share in shares if online else []:
        value = games(random.mean + 40 + 20 * share)
        curves.add_evaluation("online", online // 4, round(share * online), "epsilon=0.01", value)
    return curves


def make_run(
    folder: Path,
    *,
    teacher: float | None = 70.0,
    random: float = 2.0,
    offline: int = 2_500,
    online: int = 10_000,
    evaluations: int = 2,
    status: str = "done",
    ref: str = "bundled/Breakout-dqn",
    student: str = "qdagger-dqn",
    saved: bool = False,
) -> Path:
    """A run directory as the runner writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    g_t, g_random = games(teacher) if teacher is not None else None, games(random)
    curves = make_curves(g_t, g_random, offline, online, evaluations)
    curves.save(folder / "curves.json")

    def document(returns: Returns | None) -> dict[str, Any] | None:
        return returns.to_dict() if returns else None

    def normalized(returns: Returns | None) -> float | None:
        return (returns.mean - random) / (teacher - random) if returns and teacher is not None else None

    described = {
        "ref": ref,
        "resolved": ref,
        "revision": None,
        "sha256": "ab" * 32,
        "format": "native",
        "reported": {"mean": 69.8, "std": 25.7, "source": "model card", "n": None, "act": None},
    }
    after, final = curves.last_return("offline"), curves.last_return("online")
    result = {
        "format": 1,
        "status": status,
        "env": "Breakout-v5",
        "teacher": described | {"act": "epsilon=0.01", "return": document(g_t)} if g_t else None,
        "random": document(g_random),
        "student": {
            "name": student,
            "act": "epsilon=0.01",
            "offline_return": document(after),
            "final_return": document(final),
            "teacher_normalized": {"offline": normalized(after), "final": normalized(final)},
        },
        "buffers": {
            "teacher": {"agent_steps": 40_000 if g_t else 0, "bytes": 2**20 if g_t else None, "path": None},
            "student": {"agent_steps": online, "bytes": 3 * 2**20},
        },
        "phases": {
            "evaluate": {"seconds": 20.0},
            "collect": {
                "seconds": 11.5 if g_t else None,
                "agent_steps": 40_000 if g_t else 0,
                "agent_steps_per_s": None,
                "reused": True,
            },
            "offline": {
                "seconds": 125.0 if offline else None,
                "updates": offline,
                "updates_per_s": 20.0 if offline else None,
            },
            "online": {
                "seconds": 200.0 if online else None,
                "agent_steps": online,
                "updates": online // 4,
                "agent_steps_per_s": 50.0 if online else None,
            },
        },
        "distill": {"online_first": 1.0, "online_last": 0.0, "latched_at_agent_step": 5_000}
        if g_t and online
        else {"online_first": None, "online_last": None, "latched_at_agent_step": None},
        "device": "cpu",
        "precision": "fp32",
        "seed": 1,
        "versions": VERSIONS,
    }
    (folder / "result.json").write_text(json.dumps(result))
    config = override(preset("quick"), {"teacher": ref if g_t else None, "student": student})
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"versions": VERSIONS}))
    if g_t:
        more = {"file": "student.safetensors", "algorithm": "dqn", "architecture": "nature", "parameters": 10}
        card = described | more | {"env": ENV.to_dict(), "assumed": {"noop_max": "CleanRL's wrappers"}}
        (folder / "teacher.json").write_text(json.dumps(card))
    if saved:
        spec = {"env": ENV.to_dict(), "outputs": "q_values", "network": "impala"}
        header = json.dumps({"format": 1, "spec": spec, "reported": None, "metadata": {}})
        save_file({"w": np.zeros(1, np.float32)}, folder / "student.safetensors", {"reincarnate": header})
    return folder


KINDS: dict[str, dict[str, Any]] = {
    "full": {"saved": True},
    "one evaluation per phase": {"evaluations": 1},
    "scratch": {"teacher": None, "offline": 0, "student": "dqn"},
    "stopped before online": {"online": 0, "status": "stopped"},
    "stopped before training": {"offline": 0, "online": 0, "evaluations": 0, "status": "stopped"},
    "no evaluations": {"evaluations": 0, "status": "failed"},
    "negative returns": {"teacher": -100.0, "random": -190.0},
    "teacher below random": {"teacher": 1.0, "random": 2.0},
    "long": {"offline": 1_000_000, "online": 10_000_000, "ref": "x" * 120, "evaluations": 10},
    "hostile names": {"ref": EVIL, "student": EVIL + "漢字"},
}


@pytest.fixture(scope="module", params=KINDS, ids=lambda name: name.replace(" ", "-"))
def any_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), **KINDS[request.param])


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def full_figure(full_run: Path) -> Any:
    return plot_run(full_run)


class Page(HTMLParser):
    """Checks that tags close in order; keeps tables, pictures and what points elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.sources: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


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


# ---------------------------------------------------------------- the picture


def line(axes: Any, color: str, index: int = 0) -> list[tuple[float, float]]:
    lines = [artist for artist in axes.lines if artist.get_color() == color and artist.get_linestyle() == "-"]
    return [tuple(map(float, point)) for point in lines[index].get_xydata()]


def test_the_picture_shows_evaluations_over_updates_then_agent_steps(full_figure: Any) -> None:
    offline, online, m_offline, m_online = full_figure.axes
    assert line(offline, plots.BLUE) == [(1250.0, 32.0), (2500.0, 42.0)]
    assert line(online, plots.BLUE) == [(0.0, 42.0), (5000.0, 52.0), (10_000.0, 62.0)]  # goes on where it was
    assert offline.get_xlim() == (0, 2500)
    assert online.get_xlim()[0] == 0
    assert m_offline.get_xlabel() == "updates (offline)"
    assert m_online.get_xlabel() == "agent steps (online)"
    assert offline.get_ylabel() == "return per game (raw score)"
    boundary = online.spines["left"]
    assert boundary.get_visible()
    assert boundary.get_linestyle() not in ("-", "solid")
    assert offline.get_position().x1 == pytest.approx(online.get_position().x0)


def test_the_picture_shows_m(full_figure: Any) -> None:
    _, _, m_offline, m_online = full_figure.axes
    assert line(m_offline, plots.GREEN) == [(0, 1), (2500, 1)]
    steps, values = zip(*line(m_online, plots.GREEN), strict=True)
    assert (steps[0], values[0]) == (0, 1.0)  # recorded from step 200 on; distill.online_first says the rest
    assert values[-1] == 0.0
    assert values[steps.index(2400)] == pytest.approx(1 - 2 * 0.24)


def test_levels_carry_their_numbers(full_figure: Any) -> None:
    (legend,) = full_figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[0].startswith("teacher  70.0 [")
    assert texts[1].startswith("random policy  2.0 [")
    assert texts[2:] == [
        "student, evaluated (95 % interval)",
        "student, training games (dots; line: mean of 20)",
    ]


def test_intervals_are_those_of_the_evaluations(full_run: Path, full_figure: Any) -> None:
    run = read_run(full_run)
    _, online, *_ = full_figure.axes
    (bars,) = [container for container in online.containers if container.has_yerr]
    ends = [(float(low[1]), float(high[1])) for low, high in bars[2][0].get_segments()]
    expected = [e.returns.ci95 for e in run.curves.evaluations if e.phase == "online"]
    assert ends == [pytest.approx(interval) for interval in expected]


def test_a_scratch_run_has_one_part_and_no_m(tmp_path: Path) -> None:
    figure = plot_run(make_run(tmp_path, **KINDS["scratch"]))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "agent steps (online)"
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert not any(text.startswith("teacher") for text in texts)


def test_a_run_without_online_phase_has_one_part_with_m(tmp_path: Path) -> None:
    returns, m = plot_run(make_run(tmp_path, **KINDS["stopped before online"])).axes
    assert m.get_xlabel() == "updates (offline)"
    assert line(m, plots.GREEN) == [(0, 1), (2500, 1)]
    assert len(line(returns, plots.BLUE)) == 2


def test_training_games_are_a_mean_over_the_window(full_figure: Any) -> None:
    _, online, *_ = full_figure.axes
    points = line(online, plots.SKY)
    # games at 200, 400, ... with return 32 + step / 1000; the last 20 end at 9800 and begin at 6000
    assert points[-1] == (9800.0, pytest.approx(32 + 7.9))
    assert points[0][0] == 200 * 13  # the first few games to finish are the short ones: not drawn


def test_thinned_games_are_drawn_as_a_line_only(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    curves = Curves.load(folder / "curves.json")
    for step in range(10_000, 14_000, 2):
        curves.add_game(step, 50.0)
    curves.save(folder / "curves.json")
    figure = plot_run(folder)
    assert figure.legends[0].get_texts()[3].get_text() == "student, training games (mean of 20)"


def test_names_from_elsewhere_are_not_read_as_formulas(tmp_path: Path) -> None:
    (title,) = plot_run(make_run(tmp_path, ref="$x_1$")).texts
    assert title.get_text() == "Breakout-v5: $x_1$ → qdagger-dqn"
    assert not title.get_parse_math()


def test_short_counts() -> None:
    values = (0, 250, 2_500, 40_000, 2_500_000)
    assert [plots.short_count(value) for value in values] == ["0", "250", "2.5k", "40k", "2.5M"]


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    program = (
        "import sys, reincarnate.report as report\n"
        "assert 'matplotlib' not in sys.modules and 'huggingface_hub' not in sys.modules\n"
        "import matplotlib\n"
        "before = matplotlib.rcParams.copy()\n"
        "report.write_report(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.rcParams.copy() == before\n"
    )
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- the page


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
    ]
    assert rows["qdagger-dqn after 2,500 offline updates"][-1] == f"{40 / 68:.3f}"
    assert rows["teacher (G_T)"][-1] == "1.000"
    assert rows["random policy (G_random)"][-2:] == ["uniform", "0.000"]
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


# ---------------------------------------------------------------- the card


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
        write_report(tmp_path / "nowhere")
