"""Claims of cards and results files, in the forms seen on the Hub and in hostile ones; Welch's test."""

import json
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from reincarnate.errors import UserError
from reincarnate.teachers.claims import agrees, card_claim, claimed_return, p_value, parse_claim
from reincarnate.teachers.formats import Companions
from reincarnate.teachers.teacher import Reported
from reincarnate.types import Returns

ENV = "BreakoutNoFrameskip-v4"


def claimed(text: str | None, env_id: str = "Breakout-v5") -> Reported | None:
    return card_claim(text, env_id, "q_values")


# Model cards


def card(value: str, kind: str = "mean_reward", env: str = ENV, library: str = "cleanrl") -> str:
    """What CleanRL's ``push_to_hub`` writes."""
    return textwrap.dedent(f"""\
        ---
        tags:
        - BreakoutNoFrameskip-v4
        - deep-reinforcement-learning
        library_name: {library}
        model-index:
        - name: DQN
          results:
          - task:
              type: reinforcement-learning
              name: reinforcement-learning
            dataset:
              name: {env}
              type: {env}
            metrics:
            - type: {kind}
              value: {value}
              name: mean_reward
              verified: false
        ---

        # (CleanRL) **DQN** Agent Playing **BreakoutNoFrameskip-v4**
        """)


@pytest.mark.parametrize(
    ("value", "mean", "std"),
    [
        ("295.55 +/- 12.30", 295.55, 12.30),
        ("-107.30 +/- 17.60", -107.3, 17.6),
        ("20.0 ± 1.2", 20.0, 1.2),
        ("500", 500.0, None),
        ("1.5e3", 1500.0, None),
    ],
)
def test_claimed(value: str, mean: float, std: float | None) -> None:
    reported = claimed(card(value))
    assert reported is not None
    assert (reported.mean, reported.std, reported.n, reported.source) == (mean, std, None, "model card")


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "# no metadata",
        "---\nmodel-index: 3\n---\n",
        "---\n: [\n---\n",
        "---\nmodel-index:\n- name: x\n---\n",
        card("good"),
        card("1.2.3 +/- 4"),
        card("0.9", kind="accuracy"),
    ],
)
def test_card_that_claims_nothing_usable(text: str | None) -> None:
    assert claimed(text) is None


def test_of_several_results_the_environments_own_counts() -> None:
    one, other = card("1.0 +/- 0.1", env="PongNoFrameskip-v4"), card("2.0 +/- 0.2")
    results = other[other.index("  - task") : other.index("---\n\n#")]
    both = one.replace("---\n\n#", results + "---\n\n#")
    assert claimed(both) == Reported(2.0, "model card", 0.2)
    assert claimed(both, "Pong-v5") == Reported(1.0, "model card", 0.1)
    assert claimed(both, "Qbert-v5") is None


@pytest.mark.parametrize(
    ("env", "plays", "counts"),
    [
        ("ALE/Breakout-v5", "Breakout-v5", True),
        ("LunarLander-v2", "LunarLander-v3", True),  # another version of it, where there is no better
        ("My-Breakout", "Breakout-v5", True),  # no environment at all: whatever it was called
        ("PongNoFrameskip-v4", "Breakout-v5", False),
        ("x" * 1000, "Breakout-v5", True),
    ],
)
def test_a_single_result_counts_unless_it_is_another_environments(env: str, plays: str, counts: bool) -> None:
    assert (claimed(card("3.0 +/- 1.0", env=env), plays) is not None) is counts


def test_cleanrls_card_states_its_epsilon_and_its_policies_sample() -> None:
    text = (
        card("3.0 +/- 1.0")
        + "# Hyperparameters\n```python\n{'batch_size': 32,\n 'end_e': 0.01,\n 'seed': 1}\n"
    )
    assert card_claim(text, "Breakout-v5", "q_values") == Reported(
        3.0, "model card", 1.0, None, "epsilon=0.01"
    )
    assert card_claim(text, "Breakout-v5", "policy_logits") == Reported(
        3.0, "model card", 1.0, None, "sample"
    )
    other = text.replace("library_name: cleanrl", "library_name: stable-baselines3")
    assert card_claim(other, "Breakout-v5", "q_values") == Reported(3.0, "model card", 1.0)


@pytest.mark.parametrize(
    "metadata",
    [
        "a: " + "[" * 20_000,
        "a: &a [x, x, x]\n"
        + "".join(
            f"{c}: &{c} [*{p}, *{p}, *{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "a: &a {x: 1}\n"
        + "".join(
            f"{c}: &{c}\n  <<: [{', '.join([f'*{p}'] * 20)}]\n"
            for p, c in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "model-index:\n- name: x\n  results:\n  - metrics:\n    - {type: mean_reward, value: "
        + "9" * 40_000
        + "}",
        "model-index: !!python/object/apply:os.system ['touch planted']",
        "model-index:\n- results: [{metrics: [{type: mean_reward, value: [1, 2]}]}]",
        "model-index:\n- results: [{metrics: [{type: mean_reward, value: true}]}]",
        "model-index:\n- results: [{metrics: [{type: mean_reward, value: .nan}]}]",
        "model-index:\n- results: [{dataset: [1], metrics: {type: mean_reward}}, 3, null]",
        "x: 1\n" * 100_000,
        "when: 9999-99-99",
    ],
)
def test_odd_and_hostile_cards_claim_nothing_and_take_no_time(
    metadata: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.perf_counter()
    assert claimed(f"---\n{metadata}\n---\n") is None
    assert time.perf_counter() - started < 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value", ["nan +/- nan", "inf", "1e999", True, None, [1.0], {}, "1 +/- 2 +/- 3", "9" * 200]
)
def test_values_that_are_no_claim(value: Any) -> None:
    assert parse_claim(value, "here") is None


@pytest.mark.parametrize(
    ("value", "mean", "std"),
    [(500, 500.0, None), (-1.5, -1.5, None), (" -3.20 +/- .5 ", -3.2, 0.5), ("7 +/- -1", 7.0, None)],
)
def test_values_that_are_a_claim(value: Any, mean: float, std: float | None) -> None:
    assert parse_claim(value, "here") == Reported(mean, "here", std)


# results.json


def beside(folder: Path, files: dict[str, Any]) -> Companions:
    """Companions with these texts (or JSON values)."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return Companions(tuple(files), folder.joinpath)


ZOO = {
    "mean_reward": 344.4,
    "std_reward": 82.41,
    "is_deterministic": False,
    "n_eval_episodes": 10,
    "eval_datetime": "2022-05-20T12:00:00",
}
CONFIG = """!!python/object/apply:collections.OrderedDict
- - - exploration_final_eps
    - 0.04
  - - gamma
    - 0.99
"""


def stored(
    folder: Path, files: dict[str, Any], card_text: str | None = None, **changes: Any
) -> Reported | None:
    values = {"env_id": "Breakout-v5", "outputs": "q_values", "file": "dqn.zip"} | changes
    return claimed_return(card_text=card_text, companions=beside(folder, files), **values)


def test_rl_zoos_results_with_their_games_and_rule(tmp_path: Path) -> None:
    files = {"results.json": ZOO, "config.yml": CONFIG}
    assert stored(tmp_path, files) == Reported(344.4, "results.json", 82.41, 10, "epsilon=0.04")
    assert stored(tmp_path, files, outputs="policy_logits") == Reported(
        344.4, "results.json", 82.41, 10, "sample"
    )
    greedy = {"results.json": ZOO | {"is_deterministic": True}}
    assert stored(tmp_path / "greedy", greedy) == Reported(344.4, "results.json", 82.41, 10, "greedy")
    unknown = stored(tmp_path / "bare", {"results.json": ZOO})
    assert unknown == Reported(344.4, "results.json", 82.41, 10, None)


def test_the_courses_results_take_the_deviation_from_the_card(tmp_path: Path) -> None:
    course = {"env_id": "Breakout-v5", "mean_reward": 12.345, "n_evaluation_episodes": 20}
    files = {"results.json": course}
    assert stored(tmp_path, files) == Reported(12.345, "results.json", None, 20)
    both = stored(tmp_path, files, card("12.35 +/- 4.00", library="course"))
    assert both == Reported(12.345, "results.json and model card", 4.0, 20)
    other = stored(tmp_path, files, card("99.00 +/- 4.00", library="course"))
    assert other == Reported(12.345, "results.json", None, 20)


def test_results_come_before_the_card_and_the_nearest_first(tmp_path: Path) -> None:
    files = {"results.json": ZOO, "nested/results.json": ZOO | {"mean_reward": 1.0}}
    found = stored(tmp_path, files, card("3.0 +/- 1.0"), file="nested/dqn.zip")
    assert found is not None
    assert (found.mean, found.source) == (1.0, "results.json")
    top = stored(tmp_path, files, card("3.0 +/- 1.0"), file="other/dqn.zip")
    assert top is not None
    assert top.mean == 344.4


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{" * 100_000,
        "[" * 90_000,
        '{"mean_reward": NaN}',
        '{"mean_reward": Infinity}',
        '{"mean_reward": "many"}',
        '{"mean_reward": true}',
        '{"mean_reward": [1]}',
        '{"mean_reward": ' + "9" * 50_000 + "}",
        '{"std_reward": 1}',
        '{"mean_reward": 1, "env_id": "Pong-v5"}',
        '{"mean_reward": 1, "x": "' + "x" * 200_000 + '"}',
        "\udcff",
    ],
)
def test_odd_results_leave_the_claim_to_the_card(content: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    companions = Companions(("results.json",), tmp_path.joinpath)
    text = card("3.0 +/- 1.0")
    found = claimed_return("Breakout-v5", "q_values", text, companions, "dqn.zip")
    assert found == Reported(3.0, "model card", 1.0)
    assert claimed_return("Breakout-v5", "q_values", None, companions, "dqn.zip") is None


@pytest.mark.parametrize(
    ("games", "n"), [(0, None), (-3, None), (True, None), ("10", None), (10**30, None), (7, 7)]
)
def test_odd_numbers_of_games_are_left_out(games: Any, n: int | None, tmp_path: Path) -> None:
    found = stored(tmp_path, {"results.json": ZOO | {"n_eval_episodes": games, "std_reward": -1}})
    assert found == Reported(344.4, "results.json", None, n)


def test_a_file_that_cannot_be_had_is_no_claim(tmp_path: Path) -> None:
    def refuse(name: str) -> Path:
        raise UserError("the Hub does not serve it")

    companions = Companions(("results.json",), refuse)
    assert claimed_return("Breakout-v5", "q_values", None, companions, "dqn.zip") is None
    gone = Companions(("results.json",), tmp_path.joinpath)
    assert claimed_return("Breakout-v5", "q_values", None, gone, "dqn.zip") is None


# Agreement


def test_agreement_is_welchs_test_on_the_games_themselves() -> None:
    rng = np.random.default_rng(0)
    for shift in (0.0, 5.0, 12.0, 40.0):
        ours, theirs = rng.normal(100, 20, 30), rng.normal(100 + shift, 9, 12)
        claim = Reported(theirs.mean(), "x", theirs.std(ddof=1), 12)
        expected = scipy.stats.ttest_ind(ours, theirs, equal_var=False).pvalue
        measured = Returns.from_games(ours.tolist())
        assert p_value(measured, claim) == pytest.approx(expected)
        assert agrees(measured, claim) is bool(expected > 0.05)


def test_agreement_without_games_or_deviation() -> None:
    sure = Returns.from_games([500.0] * 30)
    spread = Returns.from_games([480.0, 490.0, 500.0, 510.0, 520.0])
    assert agrees(sure, Reported(500.0, "x", 0.0, 10)) is True
    assert agrees(sure, Reported(499.0, "x", 0.0, 10)) is False
    assert p_value(spread, Reported(505.0, "x", 10.0)) == p_value(spread, Reported(505.0, "x", 10.0, 10))
    assert agrees(spread, Reported(500.0, "x")) is None
    assert p_value(spread, Reported(500.0, "x")) == 1.0
    assert p_value(spread, Reported(900.0, "x")) < 1e-6
    assert agrees(Returns.from_games([500.0]), Reported(500.0, "x", 1.0)) is None
    assert agrees(spread, None) is None
