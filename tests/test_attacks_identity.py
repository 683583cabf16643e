"""What changes beside a checkpoint makes another teacher; environments that are listed and cannot be made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from reincarnate import envs, files, runfiles
from reincarnate.envs import pool
from reincarnate.errors import UserError
from reincarnate.teachers.collect import Collection, read_teacher_data
from reincarnate.teachers.teacher import Teacher, TeacherCard, TeacherSpec
from reincarnate.types import EnvSpec

from small_runs import small_config

ENV = EnvSpec("CartPole-v1", "vector", 2, (4,), **pool.NEUTRAL, max_agent_steps=500)
OPTIONS = {"hidden": [8], "normalise": {"epsilon": 1e-8, "clip": 10.0}}


def teachers() -> tuple[Teacher, Teacher]:
    """Two that differ in the statistics beside one and the same file."""
    spec = TeacherSpec(ENV, "q_values", "mlp", OPTIONS, "dqn")
    state = spec.build().state_dict()
    card = TeacherCard("x", "x", None, "x.zip", "0" * 64, "sb3")
    other = state | {"normaliser.mean": state["normaliser.mean"] + 1.0}
    return Teacher(spec, card, state), Teacher(spec, card, other)


def collection(teacher: Teacher) -> Collection:
    return Collection.of(teacher, ENV, small_config().collect, 4, "envpool", 1)


def test_other_statistics_are_another_collection() -> None:
    first, second = map(collection, teachers())
    assert first.teacher_sha256 == second.teacher_sha256
    assert first.key != second.key
    assert Collection.from_dict(first.to_dict()) == first


def test_teacher_data_of_other_statistics_is_refused(tmp_path: Path) -> None:
    first, second = teachers()
    made = collection(first)
    manifest = {"format": 2, "complete": True, "collection": made.to_dict()}
    files.write_json(tmp_path / "manifest.json", manifest)
    assert read_teacher_data(tmp_path, first, ENV) == made
    with pytest.raises(UserError, match=r"another policy of the same file .*collect it again"):
        read_teacher_data(tmp_path, second, ENV)


def test_a_run_does_not_go_on_with_other_statistics(tmp_path: Path) -> None:
    first, second = teachers()
    recorded = first.to_json()
    runfiles.check_same_teacher(tmp_path, recorded, first)
    with pytest.raises(UserError, match=r"changed since the run began: its file is the same, the statistics"):
        runfiles.check_same_teacher(tmp_path, recorded, second)
    del recorded["policy_sha256"]  # a run of before
    runfiles.check_same_teacher(tmp_path, recorded, second)


def test_the_hash_of_a_policy_does_not_depend_on_where_it_is() -> None:
    first, _ = teachers()
    before = first.policy_sha256
    assert Teacher(first.spec, first.card, first.network.state_dict()).to("cpu").policy_sha256 == before
    moved = dataclasses.replace(first.card, ref="y", resolved="elsewhere")
    assert Teacher(first.spec, moved, first.network.state_dict()).policy_sha256 == before
    assert len(before) == 64


def test_an_environment_that_is_listed_and_cannot_be_made_is_one_line() -> None:
    """Procgen needs a library of the system; where that is there, the environment is as good as any."""
    if _procgen_works():
        pytest.skip("it can be made here")
    with pytest.raises(UserError, match="EnvPool cannot make 'BigfishEasy-v0' here") as caught:
        envs.env_spec("BigfishEasy-v0")
    assert "\n" not in str(caught.value)


def _procgen_works() -> bool:
    import envpool

    try:
        envpool.make_spec("BigfishEasy-v0")
    except ImportError:
        return False
    return True


def test_failures_inside_envpool_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import envpool

    def fail(*_: object, **__: object) -> None:
        raise ImportError("no libQt\n  install it")

    monkeypatch.setattr(envpool, "make_spec", fail)
    pool.default_spec.cache_clear()
    with pytest.raises(UserError, match=r"EnvPool cannot make 'CartPole-v1' here: no libQt install it"):
        envs.env_spec("CartPole-v1")
    monkeypatch.undo()
    pool.default_spec.cache_clear()
    monkeypatch.setattr(envpool, "make", fail)
    with pytest.raises(UserError, match=r"EnvPool cannot make 'CartPole-v1' here"), torch.inference_mode():
        envs.make_env(envs.env_spec("CartPole-v1"), 2, 1).reset()


@pytest.mark.parametrize("name", ["README.md", "checkpoint", "events.out.tfevents.1.x"])
def test_a_run_writes_over_nothing(tmp_path: Path, name: str) -> None:
    runfiles.refuse_used(tmp_path)
    (tmp_path / "teacher.json").touch()  # a start that was killed
    (tmp_path / "notes.txt").touch()
    runfiles.refuse_used(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=rf"already holds {name}, which a run writes; choose another --out"):
        runfiles.refuse_used(tmp_path)
