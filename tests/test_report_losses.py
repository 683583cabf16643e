"""The picture of losses: a row for each term that a learner has."""

from __future__ import annotations

from pathlib import Path

from reincarnate.report import plots, read_run

from reported_runs import make_run

MUESLI = ("policy_gradient_loss", "cmpo_loss", "model_policy_loss", "value_loss", "reward_loss")


def test_terms_other_than_those_of_dqn_are_drawn(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    labels = [axes.get_ylabel() for axes in plots.losses_figure(run).axes]
    assert [label for label in labels if label] == ["TD loss", "distillation loss"]
    for step in range(10):
        run.curves.add_losses("online", 10_000 + step, dict.fromkeys(MUESLI, 1.0 + step))
    figure = plots.losses_figure(run)
    labels = [label for axes in figure.axes if (label := axes.get_ylabel())]
    terms = ["policy gradient loss", "CMPO loss", "model policy loss", "value loss", "reward loss"]
    assert labels[2:] == terms
    online = [axes.get_lines()[0].get_ydata() for axes in figure.axes if axes.get_lines()][-1]
    assert list(online)[-1] == 10.0
