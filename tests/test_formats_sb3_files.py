"""Hostile, damaged and odd Stable-Baselines3 archives: one line each, nothing runs, little is read."""

from __future__ import annotations

import base64
import io
import json
import pickle
import stat
import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reincarnate.errors import UserError
from reincarnate.teachers.formats import detect_and_read
from reincarnate.teachers.zoo import load_teacher

import sb3_writers as writers
from hostile_files import CARTPOLE, Planted, bounded, refused


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """What a bomb would create."""
    path = tmp_path / "exploded"
    yield path
    assert not path.exists()


@pytest.fixture(scope="module", autouse=True)
def _everything_is_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """So that the limits of memory count reading alone."""
    detect_and_read(writers.forge(tmp_path_factory.mktemp("first") / "m.zip"), CARTPOLE)


def test_a_bomb_among_the_weights_is_named(tmp_path: Path, marker: Path) -> None:
    path = writers.forge(tmp_path / "m.zip", {**writers.dqn_tensors(), "q_net.x": Planted(marker)})
    refused(path, r"m\.zip: policy\.pth is not opened: it asks to import \w+\.system")


def test_a_bomb_in_the_serialised_part_of_data_stays_text(tmp_path: Path, marker: Path) -> None:
    bomb = base64.b64encode(pickle.dumps(Planted(marker))).decode()
    data = writers.data_of()
    for name in ("policy_class", "observation_space", "action_space", "lr_schedule", "policy_kwargs"):
        data[name] = {**data.get(name, {}), ":type:": data.get(name, {}).get(":type:"), ":serialized:": bomb}
    checkpoint = detect_and_read(writers.forge(tmp_path / "m.zip", data=data), CARTPOLE)
    assert checkpoint.spec.network_options["hidden"] == [8]


@pytest.mark.parametrize("name", ["vecnormalize.pkl", "vec_normalize.pkl"])
def test_a_bomb_in_the_statistics_is_named(tmp_path: Path, marker: Path, name: str) -> None:
    path = writers.forge(tmp_path / "m.zip")
    (tmp_path / name).write_bytes(pickle.dumps(Planted(marker)))
    refused(path, rf"{name} is not opened: it asks to import \w+\.system")


@pytest.mark.parametrize("name", ["args.yml", "config.yml", "env_kwargs.yml"])
def test_a_bomb_in_a_yaml_tag_stays_text(tmp_path: Path, marker: Path, name: str) -> None:
    path = writers.forge(tmp_path / "m.zip")
    (tmp_path / name).write_text(f"x: !!python/object/apply:os.system ['touch {marker}']\n")
    assert detect_and_read(path, CARTPOLE).spec.algorithm == "dqn"
    (tmp_path / name).write_text(f"!!python/object/apply:os.system ['touch {marker}']\n")
    refused(path, rf"{name}: expected settings by name")


def test_text_of_the_configuration_is_never_evaluated(tmp_path: Path, marker: Path) -> None:
    path = writers.forge(tmp_path / "m.zip")
    call = f"__import__('os').system('touch {marker}')"
    (tmp_path / "config.yml").write_text(
        json.dumps(
            {"normalize": f"dict(norm_obs=False, x={call})", "policy_kwargs": f"dict(net_arch={call})"}
        )
    )
    assert detect_and_read(path, CARTPOLE).spec.algorithm == "dqn"


@pytest.mark.parametrize(
    "name", ["../../evil", "/etc/evil", "a/../../evil", "C:\\evil", "..\\evil", "\\evil"]
)
def test_a_member_outside_of_the_zip_refuses_it(tmp_path: Path, marker: Path, name: str) -> None:
    members = writers.members_of(writers.dqn_tensors(), writers.data_of()) | {name: b"x"}
    refused(
        writers.write_zip(tmp_path / "m.zip", members), r"m\.zip is not opened: a member is named .*outside"
    )
    assert not (tmp_path.parent / "evil").exists()


def test_a_link_in_the_zip_refuses_it(tmp_path: Path, marker: Path) -> None:
    path = writers.forge(tmp_path / "m.zip")
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("replay")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    refused(path, r"its member 'replay' is a link")


@pytest.mark.parametrize("name", ["policy.pth", "data"])
def test_two_members_of_one_name_refuse_it(tmp_path: Path, marker: Path, name: str) -> None:
    path = writers.forge(tmp_path / "m.zip")
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr(name, b"another")
    refused(path, rf"m\.zip is not opened: 2 members named '{name}', expected one")


@pytest.mark.parametrize(("name", "size"), [("policy.pth", 40 << 20), ("data", 15 << 20)])
def test_a_member_that_inflates_far_beyond_its_size_is_not_inflated(
    tmp_path: Path, marker: Path, name: str, size: int
) -> None:
    members = writers.members_of(writers.dqn_tensors(), writers.data_of()) | {name: b"\0" * size}
    path = writers.write_zip(tmp_path / "m.zip", members, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    refused(path, rf"{name} claims to inflate [\d,]+ bytes to {size:,}")


def test_a_bomb_that_no_policy_needs_is_left_alone(tmp_path: Path, marker: Path) -> None:
    members = writers.members_of(writers.dqn_tensors(), writers.data_of()) | {
        "policy.optimizer.pth": b"\0" * (16 << 20)
    }
    path = writers.write_zip(tmp_path / "m.zip", members, zipfile.ZIP_DEFLATED)
    with bounded():
        assert detect_and_read(path, CARTPOLE).spec.algorithm == "dqn"


def overwrite_sizes(path: Path, name: str, size: int) -> None:
    """State another size in the directory, as a forger would."""
    content = bytearray(path.read_bytes())
    at = content.rfind(name.encode()) - 46  # the name follows its directory entry
    content[at + 20 : at + 28] = struct.pack("<LL", size, size)
    path.write_bytes(content)


@pytest.mark.parametrize("size", [0xFFFFFFF0, 1 << 29])
def test_a_size_that_the_file_does_not_hold_is_not_believed(tmp_path: Path, marker: Path, size: int) -> None:
    path = writers.write_zip(
        tmp_path / "m.zip",
        dict(reversed(writers.members_of(writers.dqn_tensors(), writers.data_of()).items())),
    )
    overwrite_sizes(path, "data", size)
    refused(path, r"m\.zip is (not opened: data claims|truncated or damaged)")


def test_a_directory_of_millions_is_not_listed(tmp_path: Path, marker: Path) -> None:
    path = writers.forge(tmp_path / "m.zip")
    content = bytearray(path.read_bytes())
    content[-10:-6] = struct.pack("<L", 0x7FFFFFFF)
    path.write_bytes(content)
    refused(path, r"its zip directory lists far more than a model has")


def test_other_compressions_and_passwords_are_refused(tmp_path: Path, marker: Path) -> None:
    members = writers.members_of(writers.dqn_tensors(), writers.data_of())
    path = writers.write_zip(tmp_path / "m.zip", members, zipfile.ZIP_LZMA)
    refused(path, r"compressed in a way that models never are")
    path = writers.write_zip(tmp_path / "m.zip", members)
    content = bytearray(path.read_bytes())
    content[content.rfind(b"PK\x01\x02", 0, content.rfind(b"policy.pth")) + 8] |= 1
    content[content.find(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    refused(path, r"m\.zip is (not opened|truncated or damaged)")


def test_every_truncation_is_told(tmp_path: Path, marker: Path) -> None:
    whole = writers.forge(tmp_path / "whole.zip").read_bytes()
    path = tmp_path / "m.zip"
    for length in (4, 10, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, r"m\.zip is (truncated or damaged|not a complete)|m\.zip")


def test_flipped_bits_are_told(tmp_path: Path) -> None:
    whole = writers.forge(tmp_path / "whole.zip").read_bytes()
    path = tmp_path / "m.zip"
    for at in range(0, len(whole), max(1, len(whole) // 150)):
        content = bytearray(whole)
        content[at] ^= 0x55
        path.write_bytes(content)
        said = ""
        try:
            detect_and_read(path, CARTPOLE)
        except UserError as error:
            said = str(error)
        assert said.isprintable()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not JSON", r"m\.zip: data is no JSON"),
        (b"[1]", r"data: expected an object, found a list"),
        (b"[" * 100_000, r"data is no JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", r"data is no JSON"),
        (b"\xff\xfe", r"data is no JSON"),
    ],
)
def test_data_that_is_no_json_object_is_told(tmp_path: Path, marker: Path, data: bytes, message: str) -> None:
    members = writers.members_of(writers.dqn_tensors(), data)
    refused(writers.write_zip(tmp_path / "m.zip", members), message)


def test_other_archives_say_what_they_are(tmp_path: Path) -> None:
    old = {"data": b"{}", "parameters": b"", "parameter_list": b"[]"}
    refused(writers.write_zip(tmp_path / "m.zip", old), r"a model of Stable-Baselines 2 \(TensorFlow\)")
    bare = {"data": b"{}", "_stable_baselines3_version": b"1.0"}
    refused(writers.write_zip(tmp_path / "m.zip", bare), r"archive without policy\.pth")
    buffer = io.BytesIO()
    torch.save(writers.dqn_tensors(), buffer, _use_new_zipfile_serialization=False)
    legacy = {"data": b"{}", "policy.pth": buffer.getvalue()}
    refused(writers.write_zip(tmp_path / "m.zip", legacy), r"PyTorch wrote before 1\.6 \(a bare pickle\)")


def test_deflated_archives_and_zipped_folders_are_read(tmp_path: Path) -> None:
    members = writers.members_of(writers.ppo_tensors(), writers.data_of(n_epochs=4))
    path = writers.write_zip(tmp_path / "deflated.zip", members, zipfile.ZIP_DEFLATED)
    assert detect_and_read(path, CARTPOLE).spec.algorithm == "ppo"
    inner = {f"ppo-CartPole-v1/{name}": content for name, content in members.items()}
    assert detect_and_read(writers.write_zip(tmp_path / "inner.zip", inner), CARTPOLE).spec.algorithm == "ppo"


def unpack(folder: Path, **changed: Any) -> Path:
    folder.mkdir(parents=True)
    members = writers.members_of(writers.dqn_tensors(), writers.data_of()) | changed
    for name, content in members.items():
        (folder / name).write_bytes(content)
    (folder / "policy.optimizer.pth").write_bytes(b"x")
    (folder / "pytorch_variables.pth").write_bytes(b"x")
    return folder


def test_an_unpacked_model_is_read_as_its_zip(tmp_path: Path) -> None:
    folder = unpack(tmp_path / "dqn-CartPole-v1")
    teacher = load_teacher(str(folder))
    assert (teacher.card.file, teacher.card.format) == ("policy.pth", "sb3")
    assert teacher.spec.env.env_id == "CartPole-v1"
    packed = detect_and_read(writers.forge(tmp_path / "m.zip"), CARTPOLE)
    assert all(
        torch.equal(value, packed.state_dict[name]) for name, value in teacher.network.state_dict().items()
    )
    (folder / "data").unlink()
    with pytest.raises(UserError, match=r"unpacked Stable-Baselines3 model, and its 'data' is not beside it"):
        load_teacher(str(folder))
