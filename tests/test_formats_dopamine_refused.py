"""Everything that a file of Dopamine's name may be instead of a checkpoint."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reincarnate.errors import UserError
from reincarnate.teachers.formats import Hints, detect_and_read

flax = pytest.importorskip("flax")
import dopamine_writers as writers  # noqa: E402 - it needs flax
from dopamine_writers import IMAGE, bundle_of, read  # noqa: E402
from hostile_files import Planted  # noqa: E402


@pytest.fixture
def small() -> dict[str, Any]:
    """A small network's bundle with numpy arrays, for what needs no JAX."""
    return dict(bundle_of(4))


def test_every_kind_of_bundle_that_is_none_says_what_it_is(tmp_path: Path, small: dict[str, Any]) -> None:
    path, params = tmp_path / "Breakout" / "ckpt.3", small["online_params"]["params"]
    rest = {"state": IMAGE, "training_steps": 3}
    cases: list[tuple[Any, str]] = [
        (rest | {"eval_mode": False}, "an agent of Dopamine in TensorFlow, whose weights lie in tf_ckpt-N"),
        (rest | {"network_params": params}, "is Dopamine's PPO, which is not read"),
        (rest | {"network_params": params, "log_alpha": 0.1}, "is Dopamine's SAC, which has continuous"),
        (["training_steps"], "no Dopamine bundle: expected a dict, found a list"),
        (rest | {"online_params": [1]}, "online_params: expected a dict of parameters, found a list"),
        (rest | {"online_params": {"params": {"a": {"b": 3}}}}, "a/b: expected an array, found a int"),
        (
            rest | {"online_params": {"Dense_0": {"kernel": np.zeros((4, 2), np.float32)}}},
            "no Dopamine network",
        ),
        (_with(params, "Conv_1", None), "missing 'Conv_1/bias', 'Conv_1/kernel'"),
        (_with(params, "Extra", {"kernel": np.ones((1, 1))}), "unknown 'Extra/kernel'"),
        (
            _with(params, "Dense_1", {"kernel": np.ones(4), "bias": np.ones(4)}),
            "Dense_1/kernel: expected 2 axes",
        ),
        (
            _with(params, "Dense_0", {"kernel": np.ones((7, 4)), "bias": np.ones(4)}),
            "Dense_0/kernel: 7 inputs are not 64 channels",
        ),
        (
            _with(params, "Dense_1", {"kernel": np.ones((4, 4)), "bias": np.ones(5)}),
            r"Dense_1/bias: expected \[4\], found \[5\]",
        ),
        (
            _with(params, "Dense_1", {"kernel": np.full((4, 4), np.nan), "bias": np.ones(4)}),
            "Dense_1/kernel: 16 of 16 weights are NaN",
        ),
        (
            _with(params, "Dense_1", {"kernel": np.ones((4, 4), np.int32), "bias": np.ones(4)}),
            "expected floating-point weights, found int32",
        ),
        (
            _with(params, "Dense_1", {"kernel": np.ones((4, 0)), "bias": np.ones(0)}),
            r"Dense_1/kernel: empty, shape \[4, 0\]",
        ),
    ]
    for data, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            read(path, data)
        assert "\n" not in str(caught.value)


def _with(params: dict[str, Any], layer: str, values: Any) -> dict[str, Any]:
    changed = {name: value for name, value in params.items() if name != layer}
    if values is not None:
        changed[layer] = values
    return {"training_steps": 3, "online_params": {"params": changed}}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_bombs_anywhere_in_a_bundle_do_not_go_off(
    tmp_path: Path, small: dict[str, Any], protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, marker = tmp_path / "Breakout" / "ckpt.3", tmp_path / "exploded"
    bomb = Planted(marker)
    frozen = writers.slotted(monkeypatch, {"params": bomb})
    bombs: list[Any] = [
        small | {"optimizer_state": (bomb,)},
        small | {"online_params": {"params": {"Conv_0": {"kernel": bomb}}}},
        small | {"online_params": frozen},
        small | {"logs": {bomb: 1} if protocol > 2 else [bomb]},
    ]
    for data in bombs:
        with pytest.raises(UserError, match=r"ckpt.3 is not opened: it asks to import \w+\.system") as caught:
            detect_and_read(writers.save(path, data, protocol))
        assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_lies_about_sizes_and_endless_nesting_are_one_line(tmp_path: Path, small: dict[str, Any]) -> None:
    path = tmp_path / "Breakout" / "ckpt.3"
    endless: dict[str, Any] = {}
    endless["a"] = endless
    shared = np.zeros(100_000, np.float32)
    whole = pickle.dumps(small)
    cases: list[tuple[Any, str]] = [
        (pickle.dumps(small | {"online_params": endless}), "a/a/.*: expected a dict of parameters"),
        (
            pickle.dumps(small | {"online_params": {str(i): shared for i in range(200)}}),
            r"80000000 bytes of arrays in a file of \d+; refused",
        ),
        (
            pickle.dumps(small | {"online_params": {str(i): shared[:1] for i in range(300)}}),
            "more than 256 arrays",
        ),
        (whole[: len(whole) // 2], "truncated or damaged"),
        (whole.replace(b"M@\x1e", b"M@\x1f"), "truncated or damaged"),  # 7744 rows become 8000
    ]
    path.parent.mkdir()
    for data, message in cases:
        path.write_bytes(data)
        with pytest.raises(UserError, match=message) as caught:
            detect_and_read(path)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700


def test_other_pickles_are_still_refused_as_such(tmp_path: Path) -> None:
    path = writers.save(tmp_path / "x.pkl", {"weights": [1, 2]})
    with pytest.raises(UserError, match="a bare Python pickle"):
        detect_and_read(path, Hints("Breakout-v5"))
