"""TensorBoard logs of other programs as reference curves, and the grid under TensorBoard's HParams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from reincarnate.cli import main
from reincarnate.comparison import pictures, report_runs
from reincarnate.comparison.baselines import Baselines
from reincarnate.comparison.cells import of_runs
from reincarnate.comparison.references import Log, Reference, read_references
from reincarnate.errors import UserError

from compared_runs import make_run


def write_log(home: Path, points: Mapping[str, list[tuple[int, float]]]) -> Path:
    """An event file as torch's writer makes it, which both programs use."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(home)) as writer:
        for tag, values in points.items():
            for step, value in values:
                writer.add_scalar(tag, value, step)
    return home


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / "runs" / f"r{n}", 50.0 + n, seed=n, online=(30.0,)) for n in (1, 2)]


@pytest.fixture
def cleanrl(tmp_path: Path) -> Path:
    """Two seeds, named as CleanRL names them: 10 and 20 per game at first, 30 and 50 beyond 500 steps."""
    for seed, (early, late) in ((1, (10.0, 30.0)), (2, (20.0, 50.0))):
        games = [(step, early if step <= 500 else late) for step in range(0, 4_000, 10)]
        home = tmp_path / "cleanrl" / f"BreakoutNoFrameskip-v4__dqn_atari__{seed}__1700000{seed}"
        write_log(home, {"charts/episodic_return": games, "losses/td_loss": [(5, 1.0)]})
    return tmp_path / "cleanrl"


def test_cleanrl_seeds_and_sb3_logs_are_read(tmp_path: Path, cleanrl: Path) -> None:
    sb3 = write_log(
        tmp_path / "sb3" / "DQN_1", {"rollout/ep_rew_mean": [(100, 1.0), (200, 3.0)], "time/fps": []}
    )
    first, second = read_references([cleanrl, sb3], ["Breakout-v5"])
    assert (first.name, first.env, first.tag) == ("dqn_atari", "Breakout-v5", "charts/episodic_return")
    assert len(first.logs) == 2
    assert (second.name, second.tag) == ("DQN_1", "rollout/ep_rew_mean")
    assert second.logs[0].steps.tolist() == [100, 200]
    assert second.logs[0].returns.tolist() == [1, 3]
    assert "training returns, 2 runs" in first.label
    told = first.to_dict(1_000)
    assert told["return_at"] == {"agent_steps": 1_000, "mean": 40.0}
    assert (told["agent_steps"], told["last_return"], told["kind"]) == (3_990, 40.0, "training returns")


def test_a_curve_is_the_mean_of_runs_in_each_part_of_the_way(cleanrl: Path) -> None:
    (reference,) = read_references([cleanrl], ["Breakout-v5"])
    x, value, low, high = reference.curve(1_000)
    assert x[0] == pytest.approx(1_000 / 120)
    assert x[-1] < 1_000
    np.testing.assert_allclose(value[x < 480], 15.0)
    np.testing.assert_allclose(value[x > 520], 40.0)
    assert (low[-1], high[-1]) == (30.0, 50.0)
    sparse = Reference("x", "e", "t", (Log(np.array([10.0, 990.0]), np.array([1.0, 2.0])),))
    assert sparse.curve(1_000)[1].tolist() == [1.0, 2.0]  # no points where there is nothing
    assert sparse.curve(500)[1].tolist() == [1.0]


def test_the_report_labels_them_and_counts_them_nowhere(
    runs: list[Path], cleanrl: Path, tmp_path: Path
) -> None:
    alone = report_runs(runs, tmp_path / "alone").document
    arguments = ["report", *map(str, runs), str(cleanrl), "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (reference,) = document.pop("references")
    assert reference["return_at"]["agent_steps"] == 1_000  # as far as the runs themselves went
    assert alone.pop("references") == []
    for found in (document, alone):
        for cell in found["cells"]:
            del cell["run"]
    assert document == alone
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "Reference curves" in page
    assert "training returns (charts/episodic_return)" in page


def test_the_picture_names_training_returns_and_keeps_its_axis(runs: list[Path], cleanrl: Path) -> None:
    outcomes = of_runs(runs)
    looks = pictures.looks_of([outcomes[0].method])
    references = read_references([cleanrl], ["Breakout-v5"])
    figure = pictures.learning_figure("Breakout-v5", outcomes, looks, Baselines.of(outcomes), references)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "dqn_atari (training returns, 2 runs)" in labels
    assert figure.axes[1].get_xlim()[1] < 1_200
    assert not any("dqn_atari" in str(line.get_label()) for line in figure.axes[0].lines)


def test_what_is_no_reference_is_one_line(runs: list[Path], cleanrl: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "other", {"train/loss": [(1, 2.0)]})
    for paths, message in (
        ([*runs, other], "holds neither charts/episodic_return .* it has train/loss"),
        ([cleanrl], "give it beside at least one run"),
    ):
        with pytest.raises(UserError, match=message):
            report_runs(paths, tmp_path / "out")
    with pytest.raises(UserError, match="is of Breakout-v5, and the runs are of Pong-v5; leave it out"):
        read_references([cleanrl], ["Pong-v5"])
    plain = write_log(tmp_path / "PPO_1", {"rollout/ep_rew_mean": [(1, 2.0)]})
    with pytest.raises(UserError, match="does not say its environment"):
        read_references([plain], ["Pong-v5", "Breakout-v5"])


# ---------------------------------------------------------------- HParams


def test_tensorboard_lists_a_session_per_cell(runs: list[Path], tmp_path: Path) -> None:
    """Read by the HParams plugin itself, as its page asks for it."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    scratch = make_run(tmp_path / "runs" / "s", 20.0, teacher=None, student="dqn", offline=None)
    late = make_run(tmp_path / "runs" / "late", 20.0, status="stopped")
    out = tmp_path / "out"
    for _ in range(2):  # a second report takes the place of the first
        found = report_runs([*runs, scratch, late], out)
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(out / "tensorboard")).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(out / "tensorboard"))
    context = backend_context.Context(TBContext(data_provider=provider, logdir=str(out / "tensorboard")))
    metadata = context.hparams_metadata(RequestContext(), "")
    experiment = context.experiment_from_metadata(RequestContext(), "", True, metadata, [])
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=100,
        col_params=[api_pb2.ColParams(metric=info.name) for info in experiment.metric_infos],
        allowed_statuses=[api_pb2.STATUS_SUCCESS, api_pb2.STATUS_RUNNING, api_pb2.STATUS_UNKNOWN],
    )
    groups = list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups
    assert {info.name for info in experiment.hparam_infos} == {"teacher", "student", "env", "seed"}
    told = {group.sessions[0].name: group for group in groups}
    assert set(told) == {"r1", "r2", "s"}  # finished ones alone
    cells = {Path(cell["run"]).name: cell for cell in found.document["cells"]}
    for name, group in told.items():
        cell = cells[name]
        assert group.hparams["student"].string_value == cell["student"]
        assert group.hparams["teacher"].string_value == (cell["teacher"] or "none")
        assert group.hparams["seed"].number_value == cell["seed"]
        values = {value.name.tag: value.value for value in group.metric_values}
        assert values["cell/final"] == pytest.approx(cell["final"])
        assert values["cell/score"] == pytest.approx(cell["score"])
        assert ("cell/teacher_normalized" in values) == (cell["teacher"] is not None)
    assert len(list((out / "tensorboard" / "r1").iterdir())) == 1


def test_settings_that_differ_between_runs_are_columns(runs: list[Path], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for number, run in enumerate(runs):
        config = json.loads((run / "config.json").read_text())
        config |= {"collect": {"agent_steps": 5_000 * (number + 1)}, "td": {"n_step": 3}}
        (run / "config.json").write_text(json.dumps(config))
    report_runs(runs, tmp_path / "out")
    (path,) = (tmp_path / "out" / "tensorboard" / "r2").iterdir()
    starts = [
        HParamsPluginData.FromString(value.metadata.plugin_data.content).session_start_info
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag.startswith("_hparams_/session_start")
    ]
    hparams = starts[0].hparams
    assert hparams["collect.agent_steps"].string_value == "10000"
    assert "td.n_step" not in hparams
