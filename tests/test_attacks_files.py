"""Files that were made to hang, to exhaust memory or to end in a traceback: one line each, in little time."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from reincarnate.cli import group
from reincarnate.errors import UserError
from reincarnate.networks import build_network
from reincarnate.teachers.formats import Hints, detect_and_read, save_native
from reincarnate.teachers.formats._yaml import read_yaml
from reincarnate.teachers.reference import local_card, parse_reference
from reincarnate.teachers.teacher import TeacherSpec
from reincarnate.types import EnvSpec

import sb3_writers as writers

CARTPOLE = Hints("CartPole-v1")


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """A hang becomes a failure; seconds of work, for a busy machine makes any wait longer."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def refused(path: Path, match: str, hints: Hints = CARTPOLE) -> None:
    with within(60), pytest.raises(UserError, match=match) as caught:
        detect_and_read(path, hints)
    assert str(caught.value).isprintable()


# ---------------------------------------------------------------- Dopamine's pickles


def bundle(path: Path, params: Any) -> Path:
    path.write_bytes(pickle.dumps({"training_steps": 1, "online_params": params}))
    return path


def test_dicts_that_are_shared_do_not_multiply(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for _ in range(7):  # 40 ** 7 ways through 7 dicts
        tree = {f"Dense_{i}": tree for i in range(40)}
    refused(bundle(tmp_path / "ckpt.1", {"params": tree}), "more than 1024 dicts")


def test_a_dict_within_itself_does_not_multiply(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    tree.update({f"x{i}": tree for i in range(40)})
    refused(bundle(tmp_path / "ckpt.1", {"params": tree}), "more than 1024 dicts|expected a dict")


@pytest.mark.parametrize("key", [10**5000, ("a", 1), 1.5, None], ids=["huge", "tuple", "float", "None"])
def test_keys_that_are_no_text_are_named_by_their_kind(tmp_path: Path, key: Any) -> None:
    params = {"params": {key: np.zeros(3, np.float32)}}
    refused(bundle(tmp_path / "ckpt.1", params), "a key is a")
    (tmp_path / "ckpt.2").write_bytes(pickle.dumps({"online_paramz": 1, "network_paramz": 2, key: 3}))
    with contextlib.suppress(UserError):
        detect_and_read(tmp_path / "ckpt.2", CARTPOLE)


# ---------------------------------------------------------------- beside Stable-Baselines3 models


def beside(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content)
    return writers.forge(folder / "m.zip")


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    path = beside(tmp_path, "config.yml", "\n".join([*lines, "env_wrapper: *a11", ""]))
    refused(path, r"config\.yml is no YAML that can be read \(its aliases stand for far more")


@pytest.mark.parametrize("place", ["n_timesteps: 0x{}", "? 0x{}\n: {{}}", "env_wrapper: 0x{}"])
def test_numbers_too_long_to_print_stay_text(tmp_path: Path, place: str) -> None:
    path = beside(tmp_path, "config.yml", place.format("f" * 20_000))
    with within(60), contextlib.suppress(UserError):  # no wrapper is called so
        detect_and_read(path, CARTPOLE)
    numbers = read_yaml(tmp_path / "config.yml")
    assert all(isinstance(each, str) for pair in numbers.items() for each in pair if each != {})


def test_a_huge_shape_in_data_says_nothing(tmp_path: Path) -> None:
    data = writers.data_of()
    data["observation_space"]["_shape"] = f"(0x{'f' * 8000},)"
    data["observation_space"].pop("shape", None)
    with contextlib.suppress(UserError), within(60):
        detect_and_read(writers.forge(tmp_path / "m.zip", data=data), CARTPOLE)


@pytest.mark.parametrize("value", [10**400, float("nan"), -(10**400), True, None, "x"])
def test_statistics_with_odd_numbers_are_one_line(tmp_path: Path, value: Any) -> None:
    state = {"norm_obs": True, "clip_obs": value, "epsilon": 1e-8}
    running = {name: np.ones(4) for name in ("mean", "var")}
    (tmp_path / "vecnormalize.pkl").write_bytes(vec_normalize(state, running))
    path = writers.forge(tmp_path / "m.zip")
    if value is None:  # not stated: the default
        assert detect_and_read(path, CARTPOLE).spec.network_options["normalise"]["clip"] == 10.0
    else:
        refused(path, r"clip_obs: expected a number")


def vec_normalize(state: dict[str, Any], running: dict[str, Any]) -> bytes:
    """What pickling a VecNormalize gives, without Stable-Baselines3."""
    names = ("stable_baselines3.common.vec_env.vec_normalize", "VecNormalize")
    inner = ("stable_baselines3.common.running_mean_std", "RunningMeanStd")

    def of(where: tuple[str, str], values: bytes) -> bytes:
        return b"c" + "\n".join(where).encode() + b"\n)\x81" + values + b"b"

    def plain(values: dict[str, Any]) -> bytes:
        return pickle.dumps(values, 2)[2:-1]

    numbers = of(inner, plain(running))
    whole = plain(state) + b"X" + (7).to_bytes(4, "little") + b"obs_rms" + numbers + b"s"
    return b"\x80\x02" + of(names, whole) + b"."


# ---------------------------------------------------------------- this project's own format


def native(path: Path, **changes: Any) -> Path:
    """A good file whose specification is then changed."""
    spec = TeacherSpec(EnvSpec("CartPole-v1", "vector", 2, (4,)), "q_values", "mlp", {"hidden": [8]}, "dqn")
    save_native(path, spec.build(), spec)
    described = spec.to_dict() | changes.pop("spec", {})
    header = {"format": 1, "spec": described, "reported": None, "metadata": {}} | changes
    text = json.dumps(header).replace('"1e999"', "1e999")
    save_file(spec.build().state_dict(), path, {"reincarnate": text})
    return path


REPORTED = {"mean": 1.0, "source": "card", "std": None, "n": None, "act": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"reported": REPORTED | {"mean": "1e999"}},
        {"spec": {"network_options": {"hidden": [8], "normalise": {"epsilon": "1e999", "clip": 1.0}}}},
    ],
    ids=["return", "option"],
)
def test_infinity_by_another_name_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    refused(native(tmp_path / "x.safetensors", **changes), "metadata is not JSON")


def test_a_network_of_a_million_layers_is_not_built(tmp_path: Path) -> None:
    options = {"network_options": {"hidden": [1] * 1_000_000}}
    with within(20):
        refused(native(tmp_path / "x.safetensors", spec=options), "more layers than the file has weights")


@pytest.mark.parametrize(
    "options",
    [
        {"hidden": [8], "head": {"atoms": 10**12, "v_min": 0.0, "v_max": 1.0}},
        {"hidden": [10**400]},
        {"hidden": [-8]},
        {"hidden": "8"},
        {"hidden": [8], "activation": ["relu"]},
        {"hidden": [8], "num_outputs": 3},
        {"hidden": [[8]]},
    ],
    ids=["atoms", "huge", "negative", "text", "a list", "unknown", "nested"],
)
def test_odd_network_options_are_one_line(tmp_path: Path, options: dict[str, Any]) -> None:
    refused(native(tmp_path / "x.safetensors", spec={"network_options": options}), "spec|weight")


def test_quantiles_without_bound_are_refused() -> None:
    with pytest.raises(UserError, match="taus at most"):
        build_network("iqn", (4, 84, 84), 4, device="meta", taus=10**9)


# ---------------------------------------------------------------- files of other kinds


def test_a_sparse_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.cleanrl_model"
    path.write_bytes(b"\x81\xa6params\x80")
    with path.open("r+b") as file:
        try:
            file.truncate(1 << 40)
        except OSError:
            pytest.skip("no sparse files here")
    refused(path, "is not opened: more than")


def test_a_pipe_in_place_of_a_card_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "README.md")
    assert local_card(tmp_path / "x.zip") is None


def test_a_card_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b" " * (5 << 20))
    assert local_card(tmp_path / "x.zip") is None


def test_a_deep_config_beside_a_checkpoint_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert parse_reference(str(tmp_path)).kind == "path"


def test_control_sequences_do_not_reach_the_terminal() -> None:
    @click.command()
    def command() -> None:
        group.say("a\x1b[2Jb")
        group.print_result({}, False, lambda: ["c\x1b]0;title\x07d", "e"])

    result = CliRunner().invoke(command)
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "\x07" not in result.output
    assert "a[2Jb" in result.output


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64, torch.float16])
def test_weights_of_other_types_are_refused_or_exact(tmp_path: Path, kind: torch.dtype) -> None:
    layers = {"network.0": (8, 4), "network.2": (8, 8), "network.4": (2, 8)}
    state = {}
    for name, shape in layers.items():
        state |= {f"{name}.weight": torch.ones(shape).to(kind), f"{name}.bias": torch.ones(shape[0]).to(kind)}
    torch.save(state, tmp_path / "dqn.cleanrl_model")
    if kind.is_floating_point:
        weights = detect_and_read(tmp_path / "dqn.cleanrl_model", CARTPOLE).state_dict
        assert all(value.dtype == torch.float32 and bool((value == 1).all()) for value in weights.values())
    else:
        refused(tmp_path / "dqn.cleanrl_model", r"dqn\.cleanrl_model")
