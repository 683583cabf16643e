import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from reincarnate.envs import env_spec
from reincarnate.errors import UserError
from reincarnate.networks import Network
from reincarnate.teachers import reference, zoo
from reincarnate.teachers.formats import save_native
from reincarnate.teachers.measured import recall, remember
from reincarnate.teachers.reference import RUN_STUDENT
from reincarnate.teachers.teacher import Reported, Teacher, TeacherCard, TeacherSpec
from reincarnate.teachers.zoo import list_teachers, load_teacher, show_teacher
from reincarnate.types import EnvSpec, Returns

from loopback_hub import LoopbackHub
from loopback_repository import Repository
from paths import SHARED_CHECKPOINTS, needs_checkpoints

OWN = SHARED_CHECKPOINTS / "own"
SHORT = "cleanrl/Breakout-v5-dqn_atari_jax"
FULL = "cleanrl/BreakoutNoFrameskip-v4-dqn_atari_jax-seed1"
FILE = "dqn_atari_jax.cleanrl_model"
CARD = b"""---
library_name: cleanrl
model-index:
- name: DQN
  results:
  - task: {type: reinforcement-learning, name: reinforcement-learning}
    dataset: {name: BreakoutNoFrameskip-v4, type: BreakoutNoFrameskip-v4}
    metrics:
    - {type: mean_reward, value: 295.55 +/- 12.30, name: mean_reward, verified: false}
---
"""
SPEC = TeacherSpec(
    env=EnvSpec("CartPole-v1", "vector", num_actions=2, obs_shape=(4,)),
    outputs="q_values",
    network="mlp",
    network_options={"hidden": [8]},
    algorithm="qdagger-dqn",
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub({}) as hub, hub.used(monkeypatch, tmp_path):
        yield hub


def write_native(file: Path, reported: Reported | None = None) -> Network:
    """A tiny random CartPole teacher in this project's own format."""
    file.parent.mkdir(parents=True, exist_ok=True)
    network = SPEC.build()
    save_native(file, network, SPEC, reported=reported)
    return network


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package that ships one teacher."""
    folder = tmp_path / "shipped"
    write_native(folder / "CartPole-dqn" / "model.safetensors", Reported(431.3, "measured", 68.5, 30))
    (folder / "CartPole-dqn" / "README.md").write_bytes(CARD)
    monkeypatch.setattr(reference, "BUNDLED", folder)
    monkeypatch.setattr(zoo, "BUNDLED", folder)
    return folder


# The Hub


@needs_checkpoints
def test_real_breakout_checkpoint_by_its_short_form(hub: LoopbackHub) -> None:
    data = (OWN / "Breakout-dqn" / FILE).read_bytes()
    repository = Repository({FILE: data, "README.md": CARD, "replay.mp4": b"\0", "dqn_atari_jax.py": b"#"})
    hub.repositories[FULL] = repository
    lines: list[str] = []
    teacher = load_teacher(SHORT, announce=lines.append)
    card = teacher.card
    assert (card.ref, card.resolved, card.file) == (SHORT, FULL, FILE)
    assert card.revision == repository.refs["main"]
    assert card.sha256 == hashlib.sha256(data).hexdigest()
    assert card.reported == Reported(295.55, "model card", 12.3)
    assert (teacher.spec.env.env_id, teacher.spec.algorithm) == ("Breakout-v5", "dqn")
    assert FULL.partition("/")[2] in card.assumed["env_id"]
    assert lines[0] == f"{SHORT} is {FULL} on the Hub"
    obs = torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    local = load_teacher(str(OWN / "Breakout-dqn" / "dqn_atari.cleanrl_model"), env_id="Breakout-v5")
    torch.testing.assert_close(teacher.outputs(obs), local.outputs(obs), atol=1e-4, rtol=0)


@needs_checkpoints
def test_second_load_downloads_nothing_and_offline_gives_the_same(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (OWN / "CartPole-v1-dqn-seed1" / "dqn.cleanrl_model").read_bytes()
    hub.repositories["cleanrl/CartPole-v1-dqn-seed1"] = Repository({"dqn.cleanrl_model": data})
    first = load_teacher("cleanrl/CartPole-v1-dqn")
    hub.heal()
    assert load_teacher("cleanrl/CartPole-v1-dqn").card == first.card
    assert not [path for path in hub.paths() if "/resolve/" in path or "/blob/" in path]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lines: list[str] = []
    assert load_teacher("cleanrl/CartPole-v1-dqn", announce=lines.append).card == first.card
    assert "offline mode" in lines[0]


def test_hash_tells_that_upstream_changed(hub: LoopbackHub, tmp_path: Path) -> None:
    versions = []
    for name in ("a", "b"):
        write_native(tmp_path / name / RUN_STUDENT)
        versions.append((tmp_path / name / RUN_STUDENT).read_bytes())
    repository = hub.repositories["me/mine"] = Repository({RUN_STUDENT: versions[0]})
    first = load_teacher("me/mine").card
    repository.push({RUN_STUDENT: versions[1]})
    lines: list[str] = []
    second = load_teacher("me/mine", announce=lines.append).card
    assert first.revision != second.revision
    assert [first.sha256, second.sha256] == [hashlib.sha256(data).hexdigest() for data in versions]
    assert "has changed on the Hub" in lines[0]
    assert load_teacher(f"me/mine@{first.revision}").card.sha256 == first.sha256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "HTML page"),
        (b"", "empty"),
    ],
)
def test_what_a_repository_holds_instead_of_weights(hub: LoopbackHub, content: bytes, message: str) -> None:
    hub.repositories["cleanrl/CartPole-v1-dqn"] = Repository({"dqn.cleanrl_model": content})
    with pytest.raises(UserError, match=message):
        load_teacher("cleanrl/CartPole-v1-dqn")


# This machine


@needs_checkpoints
def test_local_folder_tells_its_environment() -> None:
    teacher = load_teacher(str(OWN / "CartPole-v1-dqn_jax-seed1"))
    assert teacher.spec.env.env_id == "CartPole-v1"
    card = teacher.card
    assert (card.revision, card.file, card.reported) == (None, "dqn_jax.cleanrl_model", None)
    assert card.resolved == str((OWN / "CartPole-v1-dqn_jax-seed1").resolve())


@needs_checkpoints
def test_folder_with_two_checkpoints_lists_them() -> None:
    with pytest.raises(UserError, match=f"several checkpoints: dqn_atari.cleanrl_model, {FILE}; name one"):
        load_teacher(str(OWN / "Breakout-dqn"))


@needs_checkpoints
def test_environment_that_the_name_does_not_tell(tmp_path: Path) -> None:
    file = shutil.copy(OWN / "CartPole-v1-dqn-seed1" / "dqn.cleanrl_model", tmp_path / "x.cleanrl_model")
    with pytest.raises(UserError, match="--env"):
        load_teacher(str(file))
    assert load_teacher(str(file), env_id="CartPole-v1").card.assumed["env_id"] == "--env"


def test_run_directory_is_a_teacher(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    network = write_native(run / RUN_STUDENT, Reported(480.0, "evaluated after the run", 20.0, 30))
    (run / "config.json").write_text("{}")
    teacher = load_teacher(str(run))
    assert (teacher.card.resolved, teacher.card.file, teacher.card.format) == (
        str(run),
        RUN_STUDENT,
        "native",
    )
    assert teacher.card.reported == Reported(480.0, "evaluated after the run", 20.0, 30)
    obs = torch.ones(3, 4)
    torch.testing.assert_close(teacher.outputs(obs), network(obs).detach(), atol=0, rtol=0)


def test_bundled_teacher(shipped: Path) -> None:
    teacher = load_teacher("bundled/CartPole-dqn")
    assert (teacher.card.resolved, teacher.card.file) == ("bundled/CartPole-dqn", "model.safetensors")
    # What was measured and stored with the weights is more than what a card says.
    assert teacher.card.reported == Reported(431.3, "measured", 68.5, 30)


def test_every_teacher_that_ships_loads() -> None:
    for name in reference.bundled_names():
        assert load_teacher(f"bundled/{name}").card.reported is not None


# Lists


def test_show(shipped: Path) -> None:
    shown = json.loads(json.dumps(show_teacher("bundled/CartPole-dqn"), allow_nan=False))
    contract = "ref resolved revision sha256 format algorithm architecture parameters env reported assumed"
    assert set(contract.split()) <= shown.keys()
    assert EnvSpec.from_dict(shown["env"]) == SPEC.env
    assert shown["parameters"] == (4 + 1) * 8 + (8 + 1) * 2
    assert shown["reported"]["mean"] == 431.3


def test_list(hub: LoopbackHub, shipped: Path, tmp_path: Path) -> None:
    hub.repositories["cleanrl/CartPole-v1-dqn-seed1"] = Repository({"dqn.cleanrl_model": b"\0"})
    write_native(tmp_path / RUN_STUDENT)
    hub.repositories["me/mine"] = Repository({RUN_STUDENT: (tmp_path / RUN_STUDENT).read_bytes()})
    hub.repositories["someone/language-model"] = Repository({"model.safetensors": b"\0"})
    before = {row["ref"]: row for row in list_teachers()}
    load_teacher("me/mine")
    for repo in ("cleanrl/CartPole-v1-dqn-seed1", "someone/language-model"):  # cached, though no teachers
        with pytest.raises(UserError):
            load_teacher(repo)
    rows = list_teachers()
    assert rows[0] == {
        "ref": "bundled/CartPole-dqn",
        "env": "CartPole-v1",
        "algorithm": "qdagger-dqn",
        "source": "bundled",
        "cached": True,
    }
    after = {row["ref"]: row for row in rows}
    assert after.keys() - before.keys() == {"me/mine"}
    assert [ref for ref, row in after.items() if row["source"] == "hub" and row["cached"]] == [
        "cleanrl/CartPole-v1-dqn-seed1",
        "me/mine",
    ]
    assert before["cleanrl/CartPole-v1-dqn-seed1"]["cached"] is False
    assert after[FULL] == {
        "ref": FULL,
        "env": "Breakout-v5",
        "algorithm": "dqn",
        "source": "hub",
        "cached": False,
    }
    json.dumps(rows)


def test_listed_references_are_valid(hub: LoopbackHub) -> None:
    rows = [row for row in list_teachers() if row["source"] == "hub"]
    assert len(rows) == len({row["ref"] for row in rows}) == 16 + 42
    for row in rows:
        assert reference.parse_reference(row["ref"]).kind == "hub"
        assert env_spec(row["env"]).num_actions > 1
        assert row["algorithm"] in {"dqn", "ppo", "qrdqn"}
    assert hub.paths() == []  # a list asks no network


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"env": "ALE/Breakout-v5", "algorithm": "QR-DQN"}, {"sb3/qrdqn-BreakoutNoFrameskip-v4"}),
        ({"env": "LunarLander-v3", "algorithm": "ppo"}, {"sb3/ppo-LunarLander-v2"}),
        ({"source": "bundled"}, {"bundled/CartPole-dqn"}),
        ({"env": "cartpole", "source": "cached"}, {"bundled/CartPole-dqn"}),
        ({"env": "Breakout", "source": "cached"}, set()),
        (
            {"env": "Pong", "algorithm": "dqn", "source": "hub"},
            {
                "cleanrl/PongNoFrameskip-v4-dqn_atari-seed1",
                "cleanrl/PongNoFrameskip-v4-dqn_atari_jax-seed1",
                "sb3/dqn-PongNoFrameskip-v4",
            },
        ),
    ],
)
def test_list_filters(hub: LoopbackHub, shipped: Path, filters: dict[str, Any], expected: set[str]) -> None:
    assert {row["ref"] for row in list_teachers(**filters)} == expected


def test_a_cached_repository_of_rl_zoos_kind_is_listed(hub: LoopbackHub, shipped: Path) -> None:
    for repo in ("me/ppo-CartPole-v1", "me/some-archive"):
        hub.repositories[repo] = Repository({"ppo-CartPole-v1.zip": b"no archive"})
        with pytest.raises(UserError):
            load_teacher(repo)
    rows = {row["ref"]: row for row in list_teachers(source="cached")}
    assert rows["me/ppo-CartPole-v1"] == {
        "ref": "me/ppo-CartPole-v1",
        "env": "CartPole-v1",
        "algorithm": "ppo",
        "source": "hub",
        "cached": True,
    }
    assert "me/some-archive" not in rows


def test_results_beside_the_weights_are_the_claim(tmp_path: Path, hub: LoopbackHub) -> None:
    write_native(tmp_path / RUN_STUDENT)
    results = b'{"mean_reward": 412.5, "std_reward": 20.0, "is_deterministic": true, "n_eval_episodes": 10}'
    weights = (tmp_path / RUN_STUDENT).read_bytes()
    hub.repositories["me/mine"] = Repository({RUN_STUDENT: weights, "results.json": results})
    claim = Reported(412.5, "results.json", 20.0, 10, "greedy")
    assert load_teacher("me/mine").card.reported == claim
    (tmp_path / "results.json").write_bytes(results)
    assert load_teacher(str(tmp_path)).card.reported == claim


# Measurements


def test_a_measurement_belongs_to_one_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REINCARNATE_CACHE", str(tmp_path / "cache"))
    write_native(tmp_path / "one" / RUN_STUDENT)
    teacher = load_teacher(str(tmp_path / "one"))
    assert show_teacher(str(tmp_path / "one"))["measured"] == []
    returns = Returns.from_games([10.0, 20.0])
    remember(teacher, teacher.spec.env, "envpool", "common", "greedy", Returns.from_games([1.0]))
    remember(teacher, teacher.spec.env, "envpool", "common", "greedy", returns)  # replaces it
    remember(teacher, teacher.spec.env, "envpool", "common", "epsilon=0.01", returns)
    shown = json.loads(json.dumps(show_teacher(str(tmp_path / "one"))["measured"]))
    assert sorted(each["act"] for each in shown) == ["epsilon=0.01", "greedy"]
    assert all(each["return"] == returns.to_dict() for each in shown)
    assert [each.to_dict() for each in recall(teacher)] == shown
    with monkeypatch.context() as patch:  # no cache is no reason to fail
        patch.setenv("REINCARNATE_CACHE", "~nobody-of-this-name/cache")
        remember(teacher, teacher.spec.env, "envpool", "common", "greedy", returns)
        assert recall(teacher) == []
    damaged = next((tmp_path / "cache" / "teacher-returns").glob("*/*.json"))
    damaged.write_text("{}")
    assert len(recall(teacher)) == 1
    write_native(tmp_path / "one" / RUN_STUDENT)  # upstream changed: other weights under the same name
    assert show_teacher(str(tmp_path / "one"))["measured"] == []


def test_statistics_beside_the_weights_are_part_of_the_policy() -> None:
    spec = dataclasses.replace(SPEC, network_options={"hidden": [8], "normalise": {}})
    state = spec.build().state_dict()
    card = TeacherCard("x", "x", None, "x", "0" * 64, "sb3")
    other = state | {"normaliser.mean": state["normaliser.mean"] + 1}
    hashes = [Teacher(spec, card, weights).policy_sha256 for weights in (state, dict(state), other)]
    assert hashes[0] == hashes[1] != hashes[2]
