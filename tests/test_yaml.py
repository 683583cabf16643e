"""RL Zoo's YAML as plain data: what the real writer writes comes back, and no tag runs anything."""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path

import pytest
import yaml
from torch import nn

from reincarnate.errors import UserError
from reincarnate.teachers.formats._yaml import Tagged, read_yaml

from paths import SHARED_CHECKPOINTS, needs_checkpoints


class EnvironmentName(str):
    """As huggingface_sb3 names environments: a text with attributes."""

    def __new__(cls, gym_id: str) -> EnvironmentName:
        self = super().__new__(cls, gym_id.replace("/", "-"))
        self.gym_id = gym_id
        return self


def written(path: Path, value: object) -> Path:
    path.write_text(yaml.dump(value))
    return path


def test_what_rl_zoo_writes_comes_back(tmp_path: Path) -> None:
    shared = {"clip_reward": False}
    wrapper = [{"stable_baselines3.common.atari_wrappers.AtariWrapper": shared}]
    settings = OrderedDict(
        algo="dqn",
        env_wrapper=wrapper,
        again=wrapper,
        frame_stack=4,
        learning_rate=1e-4,
        normalize=True,
        pair=(1, 2.5),
        nothing=None,
        empty={},
        text="dict(net_arch=[256, 256])",
        activation=nn.ReLU,
    )
    read = read_yaml(written(tmp_path / "config.yml", settings))
    assert list(read) == list(settings)
    assert read.pop("activation") == Tagged("torch.nn.modules.activation.ReLU")
    assert read == {name: value for name, value in settings.items() if name != "activation"}


def test_a_subclass_of_text_keeps_its_text(tmp_path: Path) -> None:
    read = read_yaml(written(tmp_path / "args.yml", {"env": EnvironmentName("ALE/Breakout-v5")}))
    assert isinstance(read["env"], Tagged)
    assert read["env"].text == "ALE-Breakout-v5"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("!!python/tuple [1, [2]]", (1, [2])),
        ("!!python/none ''", None),
        ("!!python/unicode 'x'", "x"),
        ("!!python/bool 'True'", True),
        ("1e6", "1e6"),  # YAML 1.1 wants a sign in the exponent
        ("1.0e+6", 1e6),
        ("-0x10", -16),
        ("1_000", 1000),
        ("!!python/object/apply:collections.defaultdict {args: [!!python/name:builtins.list ''], x: 1}", {}),
        ("2021-03-01", "2021-03-01"),
        (".inf", float("inf")),
        ("010", "010"),
        ("1" * 5000, "1" * 5000),
    ],
)
def test_plain_values(tmp_path: Path, text: str, value: object) -> None:
    (tmp_path / "x.yml").write_text(f"x: {text}\n")
    assert read_yaml(tmp_path / "x.yml") == {"x": value}


@needs_checkpoints
def test_the_published_files_are_read() -> None:
    folder = SHARED_CHECKPOINTS / "sb3" / "ppo-MountainCar-v0" / "MountainCar-v0"
    assert read_yaml(folder / "args.yml")["env"] == "MountainCar-v0"
    config = read_yaml(folder / "config.yml")
    assert (config["normalize"], config["n_envs"], config["n_timesteps"]) == (True, 16, 1e6)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.yml").touch()
    assert read_yaml(tmp_path / "x.yml") == {}


@pytest.mark.parametrize(
    "bomb",
    [
        "x: !!python/object/apply:os.system ['touch {marker}']",
        "!!python/object/apply:os.system ['touch {marker}']",
        "x: !!python/object/apply:subprocess.check_output {{args: [[touch, {marker}]]}}",
        "x: !!python/object/new:os.system ['touch {marker}']",
        "x: !!python/object/new:type {{args: [z, !!python/tuple [], {{}}], state: {marker}}}",
        "x: !!python/object:os.system {{a: 'touch {marker}'}}",
        "x: !!python/name:os.system ''",
        "x: !!python/module:antigravity ''",
        "? !!python/object/apply:os.system ['touch {marker}']\n: 1",
    ],
)
def test_no_tag_runs_anything(tmp_path: Path, bomb: str) -> None:
    path, marker = tmp_path / "args.yml", tmp_path / "exploded"
    path.write_text(bomb.format(marker=marker))
    said, value = "", None
    try:
        value = read_yaml(path).get("x")
    except UserError as error:
        said = str(error)
    assert isinstance(value, Tagged) or said
    assert said.isprintable()
    assert not marker.exists()


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [x, x]"] + [
        f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 9) + "]" for i in range(1, levels)
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: &a [*a]", r"x\.yml is no YAML that can be read \(it is nested too deeply\)"),
        ("x: " + "[" * 50 + "]" * 50, r"nested too deeply"),
        ("x: " + "[" * 20_000, r"is no YAML that can be read"),
        ("[1, 2]", r"expected settings by name, found a list"),
        ("just words", r"expected settings by name, found a str"),
        ("x: [1", r"is no YAML that can be read"),
        ("x: *nowhere", r"is no YAML that can be read"),
        ("\x00", r"is no YAML that can be read"),
        ("a: " + "b" * (1 << 17), r"is not read: more than 128 KiB of YAML"),
    ],
)
def test_damaged_and_absurd_ones_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_yaml(path)
    assert "\n" not in str(caught.value)


def test_a_billion_laughs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_text(laughs(25))
    start = time.perf_counter()
    with pytest.raises(UserError, match="its aliases stand for far more than it holds"):
        read_yaml(path)
    assert time.perf_counter() - start < 5.0
    path.write_text(laughs(3))
    read = read_yaml(path)
    assert read["a2"][0] is read["a1"]
