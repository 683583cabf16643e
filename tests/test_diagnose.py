"""Claims made under another setting, and the setting that is found."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

import reincarnate
from reincarnate.acting import ActRule
from reincarnate.diagnose import Diagnosis, Setting, _Counted, _Plan, causes, diagnose, holm, measure
from reincarnate.envs import env_spec
from reincarnate.teachers.teacher import Reported, Teacher, TeacherCard, TeacherSpec
from reincarnate.teachers.zoo import load_teacher
from reincarnate.types import EnvSpec, EnvStep, Returns

from paths import SHARED_CHECKPOINTS, needs_checkpoints
from small_runs import TEACHER, quiet

GREEDY = ActRule("greedy")
CARD = TeacherCard("x", "x", None, "x", "0" * 64, "native")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path))


def plan(games: int, seed: int = 5) -> _Plan:
    return _Plan(games, 8, seed, lambda done, mean: None)


def claim_of(returns: Returns, act: str | None = None) -> Reported:
    return Reported(returns.mean, "somebody", returns.std, returns.n, act)


def diagnosed(teacher: Teacher, base: Setting, claim: Reported, games: int) -> Diagnosis:
    measured = measure(teacher, base, plan(games, seed=6))
    return diagnose(teacher, base, measured, claim, games=games, progress=quiet())


def restored(diagnosis: Diagnosis) -> set[tuple[str, str]]:
    return {(trial.cause.name, trial.cause.words) for trial in diagnosis.explanations}


def test_a_claim_under_another_epsilon_is_found() -> None:
    teacher = load_teacher(TEACHER)
    base = Setting(teacher.spec.env, GREEDY)
    claimed = measure(teacher, dataclasses.replace(base, rule=ActRule("epsilon", 0.6)), plan(32))
    diagnosis = diagnosed(teacher, base, claim_of(claimed, "epsilon=0.6"), games=16)
    assert restored(diagnosis) == {("acting rule", "epsilon=0.6")}
    assert diagnosis.explanations[0].sure
    assert diagnosis.explanations[0].share > 0.9
    assert "acting rule (epsilon=0.6) restores the claimed return" in diagnosis.verdict
    assert [trial.cause.name for trial in diagnosis.trials] == ["acting rule"] * 4 + ["implementation"]
    far = next(trial for trial in diagnosis.trials if trial.cause.words == "epsilon=0.01")
    assert far.returns is not None
    assert far.returns.n == 8  # clearly another return: not played on


def test_statistics_that_were_not_meant_are_found() -> None:
    """The bundled CartPole agent behind statistics that make every observation look the same."""
    plain = load_teacher(TEACHER)
    options = plain.spec.network_options | {"normalise": {"epsilon": 1e-8, "clip": 10.0}}
    spec = dataclasses.replace(plain.spec, network_options=options)
    statistics = {"normaliser.mean": torch.full((4,), 50.0), "normaliser.variance": torch.ones(4)}
    teacher = Teacher(spec, CARD, dict(plain.network.state_dict()) | statistics)
    assert plain.card.reported is not None
    diagnosis = diagnosed(teacher, Setting(spec.env, ActRule("epsilon", 0.01)), plain.card.reported, games=16)
    assert restored(diagnosis) == {("observation normalisation", "without statistics")}


def skier() -> Teacher:
    """An untrained network in a game that takes points for every frame; short, and cheap to play."""
    env = env_spec("Skiing-v5", max_agent_steps=40)
    spec = TeacherSpec(env, "q_values", "nature", {"hidden": 8}, "dqn")
    return Teacher(spec, CARD, spec.build().state_dict())


def test_every_cause_of_an_atari_game_is_played_and_a_clipped_score_is_found() -> None:
    teacher = skier()
    base = Setting(teacher.spec.env, GREEDY)
    claimed = measure(teacher, dataclasses.replace(base, clipped=True), plan(4))
    assert claimed.mean >= -41  # a point for every agent step
    diagnosis = diagnosed(teacher, base, claim_of(claimed), games=4)
    assert restored(diagnosis) == {("clipped rewards", "signs of rewards claimed")}
    assert all(trial.returns is not None for trial in diagnosis.trials)
    assert {trial.cause.name for trial in diagnosis.trials} == {
        "acting rule",
        "sticky actions",
        "action set",
        "no-op reset",
        "life-loss episodes",
        "clipped rewards",
        "resize and resets",
    }


def test_causes_of_breakout_from_both_backends() -> None:
    teacher = load_teacher("bundled/Breakout-dqn")
    base = Setting(teacher.spec.env, ActRule("epsilon", 0.01))
    found = causes(teacher, base, Reported(1.0, "x", act="epsilon=0.001"))
    assert [(cause.name, cause.words) for cause in found] == [
        ("acting rule", "epsilon=0.001"),
        ("acting rule", "greedy"),
        ("acting rule", "sample"),
        ("acting rule", "epsilon=0.05"),
        ("sticky actions", "sticky_probability=0.25"),
        ("action set", "full_action_set=True"),
        ("FIRE reset", "fire_reset=False"),
        ("no-op reset", "noop_max=1"),
        ("life-loss episodes", "episodic_life=False"),
        ("life-loss episodes", "a life's score claimed"),
        ("clipped rewards", "signs of rewards claimed"),
        ("resize and resets", "backend=gymnasium, wrappers=sb3"),
        ("resize and resets", "backend=gymnasium, wrappers=cleanrl"),
    ]
    assert all(cause.setting != base for cause in found)
    there = dataclasses.replace(base, backend="gymnasium", wrappers="cleanrl")
    words = [cause.words for cause in causes(teacher, there, Reported(1.0, "x", act="nonsense"))]
    assert words[-2:] == ["backend=envpool", "backend=gymnasium, wrappers=sb3"]
    assert "nonsense" not in words


def test_frames_of_another_common_size_are_tried_where_the_weights_fit() -> None:
    env = env_spec("Breakout-v5", obs_shape=(4, 85, 85))  # as many features as of 84 x 84
    spec = TeacherSpec(env, "q_values", "nature", {"hidden": 8}, "dqn")
    teacher = Teacher(spec, CARD, spec.build().state_dict())
    found = causes(teacher, Setting(env, GREEDY), Reported(1.0, "x"))
    shapes = [cause.setting.env.obs_shape for cause in found if cause.name == "frame size"]
    assert shapes == [(4, 84, 84)]


class Scripted:
    """One environment, one row."""

    spec, num_envs = EnvSpec("Breakout-v5", "atari", 4, (1, 1, 1)), 1

    def __init__(self, raw: float, terminal: bool = False, reset: bool = False) -> None:
        flags = [np.array([flag]) for flag in (terminal, False, False, reset, False)]
        points = np.array([raw], np.float32)
        self._step = EnvStep(np.array([0]), np.zeros((1, 1, 1, 1), np.uint8), points, points, *flags)

    def recv(self) -> EnvStep:
        return self._step


def test_a_life_counts_as_a_game_and_a_reward_as_its_sign() -> None:
    lost = _Counted(Scripted(7.0, terminal=True), per_life=True, clipped=True).recv()  # type: ignore[arg-type]
    assert (lost.game_over[0], lost.raw_reward[0]) == (True, 1.0)
    opens = _Counted(Scripted(0.0, reset=True), per_life=True, clipped=False).recv()  # type: ignore[arg-type]
    assert (opens.game_over[0], opens.game_start[0]) == (False, True)
    plain = _Counted(Scripted(-7.0, terminal=True), per_life=False, clipped=False).recv()  # type: ignore[arg-type]
    assert (plain.game_over[0], plain.raw_reward[0]) == (False, -7.0)


def test_holms_correction() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_a_setting_that_makes_no_difference_is_no_sure_explanation() -> None:
    teacher = load_teacher(TEACHER)
    base = Setting(teacher.spec.env, GREEDY)
    measured = measure(teacher, base, plan(16))
    diagnosis = diagnose(teacher, base, measured, claim_of(measured), games=8, progress=quiet())
    assert not diagnosis.explanations[-1].sure
    others = [trial.returns.returns for trial in diagnosis.trials if trial.returns is not None]
    raw = [scipy.stats.ttest_ind(each, measured.returns, equal_var=False).pvalue for each in others]
    assert [trial.p_change for trial in diagnosis.trials] == pytest.approx(holm(raw))


def test_nothing_that_was_tried_may_explain_a_claim() -> None:
    teacher = load_teacher(TEACHER)
    claim = Reported(-3.0, "somebody", 0.1, 100)
    diagnosis = diagnosed(teacher, Setting(teacher.spec.env, GREEDY), claim, games=4)
    assert diagnosis.explanations == []
    assert "none of 4 settings" in diagnosis.verdict
    assert diagnosis.to_dict()["restored_by"] is None


def test_the_library_call_diagnoses_only_what_differs() -> None:
    def evaluated(claim: str, act_rule: str) -> reincarnate.TeacherReturn:
        return reincarnate.evaluate_teacher(
            TEACHER,
            explain="if it differs",
            claim=claim,
            act_rule=act_rule,
            episodes=8,
            seed=3,
            progress=quiet(),
        )

    fine = evaluated("400 +/- 300", "greedy")
    assert (fine.agrees, fine.diagnosis, fine.asked) == (True, None, True)
    assert fine.to_dict()["diagnosis"] is None
    off = evaluated("430 +/- 60", "epsilon=1")
    assert off.agrees is False
    assert off.diagnosis is not None
    assert "acting rule" in {name for name, _ in restored(off.diagnosis)}


@needs_checkpoints
@pytest.mark.slow
def test_a_breakout_claim_of_one_life_is_found() -> None:
    path = SHARED_CHECKPOINTS / "own" / "Breakout-ppo-weak" / "ppo_atari_envpool.cleanrl_model"
    teacher = load_teacher(str(path))
    base = Setting(teacher.spec.env, ActRule("sample"))
    claimed = measure(teacher, dataclasses.replace(base, per_life=True), plan(32))
    diagnosis = diagnosed(teacher, base, claim_of(claimed), games=16)
    print(diagnosis.verdict)
    best = diagnosis.explanations[0]
    assert (best.cause.words, best.sure) == ("a life's score claimed", True)
