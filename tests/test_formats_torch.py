"""PyTorch checkpoints against plain modules of CleanRL's shape; and nothing in a file is executed."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reincarnate.errors import UserError
from reincarnate.teachers.formats import Checkpoint, Hints, detect_and_read

import checkpoint_writers as writers
from paths import SHARED_CHECKPOINTS, needs_checkpoints

OWN = SHARED_CHECKPOINTS / "own"
CARTPOLE = Hints("CartPole-v1")
BREAKOUT = Hints("Breakout-v5")


def outputs(checkpoint: Checkpoint, obs: Tensor) -> Tensor:
    network = checkpoint.spec.build()
    network.load_state_dict(checkpoint.state_dict)
    with torch.no_grad():
        return network(obs)


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(
    ("env_id", "actions", "stack", "side"),
    [
        ("Breakout-v5", 4, 4, 84),
        ("Pong-v5", 6, 4, 85),
        ("Breakout-v5", 18, 1, 52),
        ("Seaquest-v5", 18, 3, 96),
    ],
)
def test_nature_q_values_are_those_of_the_module_that_was_saved(
    tmp_path: Path, env_id: str, actions: int, stack: int, side: int
) -> None:
    network = writers.torch_nature(stack, side, side, actions, hidden=64)
    path = writers.save_dqn(tmp_path / "dqn_atari.cleanrl_model", network)
    checkpoint = detect_and_read(path, Hints(env_id, image_size=(side, side)))
    obs = images(3, stack, side, side)
    with torch.no_grad():
        torch.testing.assert_close(outputs(checkpoint, obs), network(obs / 255.0), atol=1e-5, rtol=1e-5)
    assert checkpoint.spec.env.obs_shape == (stack, side, side)
    assert checkpoint.spec.env.full_action_set == (actions == 18 and env_id == "Breakout-v5")
    assert checkpoint.format == "cleanrl_torch"


@pytest.mark.parametrize("side", [84, 85, 52])
def test_impala_q_values_are_those_of_the_module_that_was_saved(tmp_path: Path, side: int) -> None:
    network = writers.torch_impala(4, side, 4)
    path = writers.save_dqn(tmp_path / "qdagger.cleanrl_model", network)
    checkpoint = detect_and_read(path, Hints("Breakout-v5", image_size=(side, side)))
    obs = images(2, 4, side, side)
    with torch.no_grad():
        torch.testing.assert_close(outputs(checkpoint, obs), network(obs / 255.0), atol=1e-5, rtol=1e-5)
    assert checkpoint.spec.network_options["pool_padding"] == "torch"


def test_a_dense_q_network_plays_as_the_module_that_was_saved(tmp_path: Path) -> None:
    network = writers.torch_mlp(4, (120, 84), 2, nn.ReLU)
    checkpoint = detect_and_read(writers.save_dqn(tmp_path / "dqn.cleanrl_model", network), CARTPOLE)
    obs = torch.randn(50, 4)
    with torch.no_grad():
        torch.testing.assert_close(outputs(checkpoint, obs), network(obs))
    assert checkpoint.spec.network_options == {"hidden": [120, 84], "activation": "relu"}
    assert (checkpoint.spec.algorithm, checkpoint.spec.outputs) == ("dqn", "q_values")


def test_an_atari_policy_gives_the_actors_logits(tmp_path: Path) -> None:
    trunk = writers.torch_nature(4, 84, 84, 1)[:-1]
    actor, critic = nn.Linear(512, 4), nn.Linear(512, 1)
    state = writers.prefixed(trunk, "network") | writers.prefixed(actor, "actor")
    path = tmp_path / "ppo.cleanrl_model"
    torch.save(state | writers.prefixed(critic, "critic"), path)
    checkpoint = detect_and_read(path, BREAKOUT)
    obs = images(3, 4, 84, 84)
    with torch.no_grad():
        torch.testing.assert_close(outputs(checkpoint, obs), actor(trunk(obs / 255.0)), atol=1e-5, rtol=1e-5)
    assert (checkpoint.spec.algorithm, checkpoint.spec.outputs) == ("ppo", "policy_logits")


def test_a_dense_policy_gives_the_actors_logits(tmp_path: Path) -> None:
    actor, critic = (writers.torch_mlp(4, (64, 64), size, nn.Tanh) for size in (2, 1))
    path = tmp_path / "ppo.cleanrl_model"
    torch.save(writers.prefixed(critic, "critic") | writers.prefixed(actor, "actor"), path)
    checkpoint = detect_and_read(path, CARTPOLE)
    obs = torch.randn(50, 4)
    with torch.no_grad():
        torch.testing.assert_close(outputs(checkpoint, obs), actor(obs))
    assert checkpoint.spec.network_options == {"hidden": [64, 64], "activation": "tanh"}


@needs_checkpoints
@pytest.mark.parametrize("folder", ["Breakout-ppo", "Breakout-ppo-mid", "Breakout-ppo-weak"])
def test_the_real_policies_load(folder: str) -> None:
    checkpoint = detect_and_read(OWN / folder / "ppo_atari_envpool.cleanrl_model")
    state = torch.load(OWN / folder / "ppo_atari_envpool.cleanrl_model", weights_only=True)
    trunk = writers.torch_nature(4, 84, 84, 1)[:-1]
    trunk.load_state_dict({key[8:]: value for key, value in state.items() if key.startswith("network.")})
    obs = images(8, 4, 84, 84)
    with torch.no_grad():
        theirs = nn.functional.linear(trunk(obs / 255.0), state["actor.weight"], state["actor.bias"])
        torch.testing.assert_close(outputs(checkpoint, obs), theirs, atol=1e-4, rtol=0)
    assert checkpoint.spec.env.env_id == "Breakout-v5"


@needs_checkpoints
def test_the_real_q_networks_load() -> None:
    for path, network, obs in (
        (
            OWN / "Breakout-dqn" / "dqn_atari.cleanrl_model",
            writers.torch_nature(4, 84, 84, 4),
            images(8, 4, 84, 84),
        ),
        (
            OWN / "CartPole-v1-dqn-seed1" / "dqn.cleanrl_model",
            writers.torch_mlp(4, (120, 84), 2, nn.ReLU),
            torch.randn(8, 4),
        ),
    ):
        state = torch.load(path, weights_only=True)
        network.load_state_dict({key.removeprefix("network."): value for key, value in state.items()})
        scaled = obs / 255.0 if obs.dtype == torch.uint8 else obs
        with torch.no_grad():
            torch.testing.assert_close(
                outputs(detect_and_read(path), obs), network(scaled), atol=1e-4, rtol=0
            )


def dense_state() -> OrderedDict[str, Tensor]:
    return OrderedDict(writers.prefixed(writers.torch_mlp(4, (120, 84), 2, nn.ReLU), "network"))


def save(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    half = OrderedDict((key, value.half()) for key, value in dense_state().items())
    state = detect_and_read(save(tmp_path / "x", half), CARTPOLE).state_dict
    assert all(value.dtype == torch.float32 for value in state.values())
    torch.testing.assert_close(state["head.weight"], half["network.4.weight"].float(), atol=0, rtol=0)


def test_parameters_and_files_without_checksums_are_read(tmp_path: Path) -> None:
    state = OrderedDict((key, nn.Parameter(value)) for key, value in dense_state().items())
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path / "x", state)
    finally:
        torch.serialization.set_crc32_options(True)
    assert detect_and_read(path, CARTPOLE).spec.network == "mlp"


def test_missing_and_unknown_keys_are_named(tmp_path: Path) -> None:
    state = dense_state()
    del state["network.2.bias"]
    state["extra.weight"] = torch.zeros(1)
    counts = r"x: not the keys of CleanRL's dqn: expected 6, found 6"
    with pytest.raises(UserError, match=rf"{counts}; missing 'network.2.bias'; unknown 'extra.weight'"):
        detect_and_read(save(tmp_path / "x", state), CARTPOLE)


def test_a_network_without_its_last_layer_is_compared_with_the_nearest_script(tmp_path: Path) -> None:
    state = writers.prefixed(writers.torch_nature(4, 84, 84, 4)[:-1], "network")
    with pytest.raises(
        UserError, match=r"CleanRL's dqn_atari: .*missing 'network.9.bias', 'network.9.weight'"
    ):
        detect_and_read(save(tmp_path / "x", state), BREAKOUT)


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("network.2.weight", (84, 119), r"network\.2\.weight: expected \[84, 120\], found \[84, 119\]"),
        ("network.2.bias", (83,), r"network\.2\.bias: expected \[84\], found \[83\]"),
        ("network.4.weight", (2, 84, 1), r"network\.4\.weight: expected 2 axes, found shape \[2, 84, 1\]"),
        ("network.0.weight", (120, 0), r"network\.0\.weight: empty, shape \[120, 0\]"),
    ],
)
def test_a_wrong_shape_names_key_expected_and_found(
    tmp_path: Path, key: str, shape: tuple[int, ...], message: str
) -> None:
    state = dense_state() | {key: torch.zeros(shape)}
    with pytest.raises(UserError, match=rf"x: {message}$"):
        detect_and_read(save(tmp_path / "x", state), CARTPOLE)


def test_a_wrong_convolution_and_a_wrong_critic_are_named(tmp_path: Path) -> None:
    network = writers.prefixed(writers.torch_nature(4, 84, 84, 4), "network")
    network["network.2.weight"] = torch.zeros(64, 32, 3, 3)
    with pytest.raises(
        UserError, match=r"network\.2\.weight: expected \[64, 32, 4, 4\], found \[64, 32, 3, 3\]"
    ):
        detect_and_read(save(tmp_path / "x", network), BREAKOUT)
    actor, critic = (writers.torch_mlp(4, (64, 64), size, nn.Tanh) for size in (2, 3))
    state = writers.prefixed(critic, "critic") | writers.prefixed(actor, "actor")
    with pytest.raises(UserError, match=r"critic\.4\.weight: expected \[1, any\], found \[3, 64\]"):
        detect_and_read(save(tmp_path / "y", state), CARTPOLE)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    state = dense_state()
    state["network.4.bias"][0] = float("nan")
    with pytest.raises(UserError, match=r"network\.4\.bias: 1 of 2 weights are NaN or infinite"):
        detect_and_read(save(tmp_path / "x", state), CARTPOLE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3), r"x holds a Tensor, not a state dict"),
        ({"model_weights": {}, "step": {}}, r"x is not a state dict: 'model_weights' holds a dict"),
        ({"model_weights": {}, "args": {}}, r"x: the keys of no CleanRL script .*found none"),
        ({"model_weights": {}, "args": [1]}, r"x: args: expected a map of arguments, found a list"),
        ({3: torch.zeros(1)}, r"x is not a state dict: a key is a int, not text"),
        ({}, r"x: the keys of no CleanRL script .*found none"),
        ({"lm.weight": torch.zeros(1)}, r"x: the keys of no CleanRL script .*found lm.weight"),
        (
            {"network.0.weight": torch.zeros(1), "lstm.weight_ih_l0": torch.zeros(1)},
            r"x holds a policy with a memory \(lstm\), which cannot be a teacher here$",
        ),
        (
            {"actor_mean.0.weight": torch.zeros(1), "actor_logstd": torch.zeros(1)},
            r"x holds a policy of continuous actions \(actor_logstd, actor_mean\), which cannot be a teacher",
        ),
        (({"fc1.weight": torch.zeros(1)}, {}), r"x holds 2 networks, as CleanRL's ddpg and td3 write them"),
    ],
)
def test_what_is_no_known_state_dict_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        detect_and_read(save(tmp_path / "x", value), CARTPOLE)


class _Touch:
    """Unpickling it creates a file: what an attacker's checkpoint would do."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (str(self.target), "w")


def test_the_planted_side_effect_would_run_if_it_were_unpickled(tmp_path: Path) -> None:
    """The check behind the next tests: without it they would pass on a harmless file."""
    pickle.loads(pickle.dumps(_Touch(tmp_path / "ran"))).close()
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_planted_in_a_torch_file_does_not_run(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "dqn.cleanrl_model"
    torch.save(dense_state() | {"bomb": _Touch(tmp_path / "ran")}, path, pickle_protocol=protocol)
    with pytest.raises(
        UserError, match=r"dqn.cleanrl_model is not opened: it (asks to import|builds objects)"
    ) as got:
        detect_and_read(path, CARTPOLE)
    assert not (tmp_path / "ran").exists()
    assert "\n" not in str(got.value)


@pytest.mark.parametrize("protocol", [0, 1, 2, 5])
def test_a_bare_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "dqn.cleanrl_model"
    path.write_bytes(pickle.dumps(_Touch(tmp_path / "ran"), protocol=protocol))
    with pytest.raises(UserError, match=r"bare Python pickle, which could run code"):
        detect_and_read(path, CARTPOLE)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_that_only_allocates_is_refused_too(tmp_path: Path) -> None:
    """torch's own list of safe imports has bytearray: 100 GB in thirty bytes."""
    bomb = pickle.dumps({"a": 1}, protocol=2)[:-1] + b"cbuiltins\nbytearray\n(J\xff\xff\xff\x7ftR."
    path = rewritten(save(tmp_path / "x", dense_state()), {"data.pkl": lambda _: bomb})
    with pytest.raises(UserError, match=r"asks to import builtins\.bytearray"):
        detect_and_read(path, CARTPOLE)


def rewritten(
    path: Path, changes: dict[str, Callable[[bytes], bytes]], compression: int = zipfile.ZIP_STORED
) -> Path:
    """The same archive with some members' bytes changed (and their checksums right)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(buffer, "w", compression) as new:
        for member in old.infolist():
            change = changes.get(member.filename.partition("/")[2], lambda content: content)
            new.writestr(member.filename, change(old.read(member)))
    path.write_bytes(buffer.getvalue())
    return path


def test_sizes_that_the_file_does_not_hold_are_refused(tmp_path: Path) -> None:
    """A storage that claims more numbers than are there, and one number repeated by strides of 0."""

    def enlarge(content: bytes) -> bytes:
        at = content.index(b"K\x02", content.index(b"cpu"))  # the count of network.4.bias's storage
        return content[:at] + b"J" + struct.pack("<i", 10**9) + content[at + 2 :]

    path = save(tmp_path / "x", {"network.4.bias": torch.zeros(2)})
    with pytest.raises(UserError, match=r"cannot be read by torch\.load"):
        detect_and_read(rewritten(path, {"data.pkl": enlarge}), CARTPOLE)
    endless = dense_state() | {"network.0.weight": torch.zeros(1).expand(10**6, 10**6)}
    with pytest.raises(UserError, match=r"network\.0\.weight: shape \[1000000, 1000000\] needs more bytes"):
        detect_and_read(save(tmp_path / "y", endless), CARTPOLE)


def test_a_compressed_archive_is_not_opened(tmp_path: Path) -> None:
    path = rewritten(save(tmp_path / "x", dense_state()), {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match=r"x is a compressed archive, which torch\.save never writes"):
        detect_and_read(path, CARTPOLE)


def test_members_that_overlap_are_not_opened(tmp_path: Path) -> None:
    """A zip bomb without compression: many entries that share the same bytes."""
    path = save(tmp_path / "x", dense_state())
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
        largest = max(archive.infolist(), key=lambda member: member.file_size)
    start = content.index(b"PK\x01\x02", directory)
    entries = content[start : content.index(b"PK\x05\x06", start)]
    if b"PK\x06\x06" in entries:
        entries = entries[: entries.index(b"PK\x06\x06")]
    assert largest.file_size > 1000
    count = entries.count(b"PK\x01\x02")
    end = struct.pack(
        "<4s4H2LH", b"PK\x05\x06", 0, 0, count * 50, count * 50, len(entries) * 50, directory, 0
    )
    path.write_bytes(content[:directory] + entries * 50 + end)
    with pytest.raises(UserError, match=r"x (claims more content than the file holds|is a zip archive that)"):
        detect_and_read(path, CARTPOLE)


def test_two_pickles_are_not_opened(tmp_path: Path) -> None:
    """What was checked must be what is loaded."""
    path = save(tmp_path / "x", dense_state())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"\x80\x02}.")
    with pytest.raises(UserError, match=r"x has more than one data\.pkl"):
        detect_and_read(path, CARTPOLE)


def test_a_truncation_is_told(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole", dense_state()).read_bytes()
    path = tmp_path / "part"
    for length in (4, 30, 1000, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"part is truncated or damaged .*download it again"):
            detect_and_read(path, CARTPOLE)


def test_a_flipped_bit_in_the_weights_is_found(tmp_path: Path) -> None:
    path = save(tmp_path / "x", dense_state())
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        member = max(archive.infolist(), key=lambda each: each.file_size)
    content[member.header_offset + 500] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x is damaged: .*data/\d+ fails its checksum"):
        detect_and_read(path, CARTPOLE)


def test_a_pickle_that_is_cut_is_told(tmp_path: Path) -> None:
    path = rewritten(save(tmp_path / "x", dense_state()), {"data.pkl": lambda content: content[:-40]})
    with pytest.raises(UserError, match=r"x is damaged: its data\.pkl is no pickle"):
        detect_and_read(path, CARTPOLE)


def test_another_zip_is_told(tmp_path: Path) -> None:
    path = tmp_path / "CartPole-v1.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "{}")
    with pytest.raises(
        UserError, match=r"is a zip archive that torch\.save did not write \(no data\.pkl in it"
    ):
        detect_and_read(path, CARTPOLE)
