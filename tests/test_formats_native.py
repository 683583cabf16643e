"""Our own format: what is written comes back bit for bit, and altered files are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from reincarnate.envs import env_spec
from reincarnate.errors import UserError
from reincarnate.teachers.formats import Hints, detect_and_read, save_native
from reincarnate.teachers.teacher import Reported, TeacherSpec
from reincarnate.types import EnvSpec

CARTPOLE = TeacherSpec(
    env_spec("CartPole-v1"), "q_values", "mlp", {"hidden": [8, 6], "activation": "tanh"}, "qdagger-dqn"
)
BREAKOUT = EnvSpec("Breakout-v5", "atari", 4, (2, 52, 52), sticky_probability=0.25, episodic_life=False)
NATURE = TeacherSpec(BREAKOUT, "policy_logits", "nature", {"hidden": 16}, "ppo")
IMPALA = TeacherSpec(
    dataclasses.replace(BREAKOUT, num_actions=18, full_action_set=True),
    "q_values",
    "impala",
    {"hidden": 16, "channels": [2, 4, 4], "pool_padding": "same"},
    "qdagger-dqn",
)


def network(spec: TeacherSpec) -> torch.nn.Module:
    built = spec.build()
    generator = torch.Generator().manual_seed(1)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return built


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_native(tmp_path, network(CARTPOLE), CARTPOLE)


@pytest.mark.parametrize("spec", [CARTPOLE, NATURE, IMPALA], ids=lambda spec: spec.network)
def test_a_round_trip_changes_nothing(tmp_path: Path, spec: TeacherSpec) -> None:
    original = network(spec).to(memory_format=torch.channels_last if spec.network != "mlp" else None)
    reported = Reported(12.5, "own measurement", std=2.0, n=32, act="epsilon=0.01")
    path = save_native(tmp_path / "x.safetensors", original, spec, {"seed": 1}, reported=reported)
    checkpoint = detect_and_read(path)
    assert checkpoint.spec == spec
    assert checkpoint.spec.env.obs_shape == spec.env.obs_shape
    assert checkpoint.reported == reported
    assert (checkpoint.format, checkpoint.assumed) == ("native", {})
    state = original.state_dict()
    assert list(checkpoint.state_dict) == list(state)
    assert all(torch.equal(checkpoint.state_dict[name], state[name]) for name in state)


def test_a_folder_gets_a_student_and_nothing_else(tmp_path: Path, saved: Path) -> None:
    assert saved == tmp_path / "student.safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["student.safetensors"]
    assert detect_and_read(saved).reported is None


def test_the_same_network_gives_the_same_bytes(tmp_path: Path, saved: Path) -> None:
    again = save_native(tmp_path / "again.safetensors", network(CARTPOLE), CARTPOLE)
    assert again.read_bytes() == saved.read_bytes()


def test_half_precision_is_stored_as_float32(tmp_path: Path) -> None:
    half = network(CARTPOLE).half()
    checkpoint = detect_and_read(save_native(tmp_path, half, CARTPOLE))
    assert torch.equal(checkpoint.state_dict["head.weight"], half.state_dict()["head.weight"].float())


def test_a_network_that_the_spec_does_not_describe_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not the weights of mlp with .*\[8, 6\]"):
        save_native(tmp_path, network(NATURE), CARTPOLE)
    with pytest.raises(TypeError, match=r"not JSON serializable"):
        save_native(tmp_path, network(CARTPOLE), CARTPOLE, {"when": object()})
    assert list(tmp_path.iterdir()) == []


def altered(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The same tensors with other metadata."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["reincarnate"])
    replaced = change(header)
    text = json.dumps(header if replaced is None else replaced)
    save_file(load_file(path), path, {"reincarnate": text})
    return path


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", value=2), r"expected format 1, found 2; a later reincarnate wrote it\?"),
        (put("format", value=None), r"expected format 1, found None"),
        (lambda header: [header], r"expected format 1, found None"),
        (put("spec", value=3), r"spec: expected an object, found 3"),
        (put("extra", value=1), r"not the keys of the metadata: .*unknown 'extra'"),
        (lambda header: {"format": 1}, r"missing 'metadata', 'reported', 'spec'"),
        (put("spec", "network", value="mpl"), r"spec describes no network \(no network 'mpl'"),
        (put("spec", "network_options", value={"hiden": [8]}), r"no option 'hiden'"),
        (put("spec", "network_options", value={"hidden": "8"}), r"spec describes no network"),
        (put("spec", "network_options", value=[]), r"spec\.network_options: expected dict"),
        (put("spec", "outputs", value="q"), r"spec\.outputs: expected .*, found 'q'"),
        (put("spec", "algorithm", value=None), r"spec\.algorithm: expected str, found None"),
        (put("spec", "surplus", value=1), r"spec: expected the fields env, outputs, .*, found .*surplus"),
        (put("spec", "env", "surplus", value=1), r"spec\.env: expected the fields env_id, .*surplus"),
        (put("spec", "env", "frame_skip", value="4"), r"spec\.env\.frame_skip: expected int, found '4'"),
        (put("spec", "env", "frame_skip", value=True), r"spec\.env\.frame_skip: expected int, found True"),
        (put("spec", "env", "fire_reset", value=1), r"spec\.env\.fire_reset: expected bool, found 1"),
        (put("spec", "env", "kind", value="video"), r"spec\.env\.kind: expected .*, found 'video'"),
        (put("spec", "env", "obs_shape", value=[]), r"spec\.env: vector observations have 1 positive"),
        (put("spec", "env", "obs_shape", value=4), r"spec\.env\.obs_shape: expected tuple"),
        (put("spec", "env", "obs_shape", value=[5]), r"layers\.0\.weight: expected \[8, 5\], found \[8, 4\]"),
        (put("spec", "env", "num_actions", value=3), r"head\.weight: expected \[3, 6\], found \[2, 6\]"),
        (put("spec", "env", "num_actions", value=0), r"spec\.env: num_actions must be at least 1"),
        (
            put("spec", "network_options", "hidden", value=[8]),
            r"not the keys of the mlp network: .*unknown 'trunk\.layers\.1",
        ),
        (put("reported", value={}), r"reported: expected the fields mean, .*found none"),
        (put("reported", value={"mean": 1}), r"reported: expected the fields"),
        (
            put("reported", value={"mean": float("nan"), "source": "", "std": None, "n": None, "act": None}),
            r"metadata is not JSON",
        ),
    ],
)
def test_altered_metadata_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"student\.safetensors: .*{message}") as got:
        detect_and_read(altered(saved, change))
    assert "\n" not in str(got.value)


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000])
def test_metadata_that_is_no_json_object_is_refused(saved: Path, text: str) -> None:
    save_file(load_file(saved), saved, {"reincarnate": text})
    with pytest.raises(UserError, match=r"metadata is not JSON; the file is damaged|expected format 1"):
        detect_and_read(saved)


def test_safetensors_of_others_are_told(tmp_path: Path, saved: Path) -> None:
    save_file(load_file(saved), saved)
    with pytest.raises(UserError, match=r"a safetensors file that reincarnate did not write"):
        detect_and_read(saved)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("head.bias", torch.tensor([1.0, float("nan")]), r"head\.bias: 1 of 2 weights are NaN or infinite"),
        ("head.bias", torch.zeros(2, dtype=torch.float16), r"head\.bias: expected torch\.float32, found"),
        ("head.bias", torch.zeros(2, 1), r"head\.bias: expected 1 axes, found shape \[2, 1\]"),
        ("trunk.extra", torch.zeros(2), r"not the keys of the mlp network: .*unknown 'trunk\.extra'"),
    ],
)
def test_altered_weights_are_refused(saved: Path, name: str, value: torch.Tensor, message: str) -> None:
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(saved) | {name: value}, saved, metadata)
    with pytest.raises(UserError, match=rf"student\.safetensors: {message}"):
        detect_and_read(saved)


def test_a_truncation_or_damage_is_told(saved: Path) -> None:
    whole = saved.read_bytes()
    for content in (whole[:9], whole[:100], whole[: len(whole) // 2], whole[:-1], whole + b"x"):
        saved.write_bytes(content)
        with pytest.raises(UserError, match=r"is truncated or damaged .*download it again") as got:
            detect_and_read(saved)
        assert "\n" not in str(got.value)


@pytest.mark.parametrize("size", [10_000_000, 99_999_999, 100_000_001, 2**63])
def test_a_header_that_claims_to_be_longer_than_the_file_is_told(saved: Path, size: int) -> None:
    content = saved.read_bytes()
    saved.write_bytes(size.to_bytes(8, "little") + content[8:])
    with pytest.raises(
        UserError, match=r"is truncated or damaged|is in no format that can be read"
    ) as caught:
        detect_and_read(saved)
    assert "\n" not in str(caught.value)


def test_the_user_may_name_another_environment_of_the_same_shape(tmp_path: Path, saved: Path) -> None:
    moved = detect_and_read(saved, Hints("CartPole-v0"))
    assert moved.spec.env == env_spec("CartPole-v0")
    assert moved.assumed == {"env_id": "--env"}
    with pytest.raises(UserError, match=r"takes observations of shape \[4\], Acrobot-v1 gives \[6\]"):
        detect_and_read(saved, Hints("Acrobot-v1"))
    path = save_native(tmp_path / "nature.safetensors", network(NATURE), NATURE)
    assert detect_and_read(path, Hints("BreakoutNoFrameskip-v4")).spec == NATURE
    counts = r"wrong action count: the network has 4 outputs, Pong-v5 has 6 actions"
    trained = r"leave --env out \(it was trained in Breakout-v5\)"
    with pytest.raises(UserError, match=rf"^--env Pong-v5 does not fit .*{counts}.*{trained}"):
        detect_and_read(path, Hints("Pong-v5"))
    wide = save_native(tmp_path / "impala.safetensors", network(IMPALA), IMPALA)
    pong = detect_and_read(wide, Hints("Pong-v5")).spec.env
    assert pong == dataclasses.replace(IMPALA.env, env_id="Pong-v5")


def test_naming_the_same_environment_changes_nothing(tmp_path: Path) -> None:
    short = dataclasses.replace(CARTPOLE, env=dataclasses.replace(CARTPOLE.env, max_agent_steps=50))
    path = save_native(tmp_path, network(short), short)
    assert detect_and_read(path, Hints("CartPole-v1")).spec == short
