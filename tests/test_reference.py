import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.errors import UserError
from reincarnate.teachers import reference as module
from reincarnate.teachers.reference import (
    RUN_STUDENT,
    Reference,
    bundled_names,
    candidates,
    choose_file,
    is_in_folder,
    is_safe_name,
    local_card,
    local_file,
    nearest_here,
    parse_reference,
    split_name,
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative references must not meet the checkout's own folders."""
    monkeypatch.chdir(tmp_path)


# Hub repositories


@pytest.mark.parametrize(
    ("text", "repo", "revision", "file"),
    [
        ("cleanrl/CartPole-v1-dqn-seed1", "cleanrl/CartPole-v1-dqn-seed1", None, None),
        ("a/b@main", "a/b", "main", None),
        ("a/b@refs/pr/12", "a/b", "refs/pr/12", None),
        ("a/b@0f1e2d3", "a/b", "0f1e2d3", None),
        ("a/b:x.zip", "a/b", None, "x.zip"),
        ("a/b:deep/folder/x.zip", "a/b", None, "deep/folder/x.zip"),
        ("a/b@v1.0:q@2.pth", "a/b", "v1.0", "q@2.pth"),
        ("sb3/dqn-CartPole-v1", "sb3/dqn-CartPole-v1", None, None),
    ],
)
def test_hub_references(text: str, repo: str, revision: str | None, file: str | None) -> None:
    assert parse_reference(text) == Reference(text, "hub", repo=repo, revision=revision, file=file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the teacher reference is empty"),
        ("  ", "the teacher reference is empty"),
        ("CartPole", "no teacher 'CartPole': not a file, a folder or a Hub repository"),
        ("a/", "no teacher 'a/'"),
        ("a/b c", "no teacher 'a/b c'"),
        ("a/b--c", "no teacher"),
        ("a/b..c", "no teacher"),
        ("a/b.git", "no teacher"),
        ("a/-b", "no teacher"),
        ("a/" + "b" * 97, "no teacher"),
        ("é/b", "no teacher"),
        ("a/b@", "names no valid revision"),
        ("a/b@../x", "names no valid revision"),
        ("a/b@x y", "names no valid revision"),
        ("a/b@/x", "names no valid revision"),
        ("a/b:", "names no valid file"),
        ("a/b:../x.zip", "names no valid file"),
        ("a/b:/etc/x.zip", "names no valid file"),
        ("a/b:c\\..\\x.zip", "names no valid file"),
        ("https://hub.example/a/b", "is an address; write the Hub repository as owner/name"),
        ("hf://a/b", "is an address"),
        ("a\0b/c", "no teacher"),
        ("./model.pt", "no such file or folder: './model.pt'"),
        ("../runs", "no such file or folder"),
        ("/nowhere/model.zip", "no such file or folder"),
        ("~/nowhere", "no such file or folder: '~/nowhere'"),
        ("runs/model.cleanrl_model", "no such file or folder"),
        ("a/b/c", "no such file or folder: 'a/b/c'"),
    ],
)
def test_what_is_no_reference(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_reference(text)
    assert "\n" not in str(caught.value)


@settings(deadline=None)  # a busy machine may take its time
@given(st.text(max_size=40))
def test_any_text_is_understood_or_refused_in_one_line(text: str) -> None:
    refused = None
    try:
        reference = parse_reference(text)
    except UserError as error:
        refused = str(error)
    if refused is None:
        assert reference.text == text
        assert (reference.kind == "hub") == (reference.path is None)
    else:
        assert len(refused.splitlines()) == 1


@given(
    st.from_regex(r"[\w.-]{1,20}(/[\w.-]{1,20}){0,3}", fullmatch=True),
    st.sampled_from(["", "../", "/", "a/../"]),
)
def test_safe_names_stay_below_their_folder(name: str, before: str) -> None:
    folder = Path("/folder")
    joined = (folder / (before + name)).resolve()
    assert is_safe_name(before + name) <= (joined.is_relative_to(folder) and joined != folder)


# Short forms


def test_short_form_candidates() -> None:
    assert candidates(parse_reference("cleanrl/Breakout-v5-dqn_atari_jax@main")) == [
        "cleanrl/Breakout-v5-dqn_atari_jax",
        "cleanrl/Breakout-v5-dqn_atari_jax-seed1",
        "cleanrl/BreakoutNoFrameskip-v4-dqn_atari_jax-seed1",
        "cleanrl/BreakoutNoFrameskip-v4-dqn_atari_jax",
    ]


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("cleanrl/BreakoutNoFrameskip-v4-dqn_atari_jax-seed1", []),
        ("cleanrl/CartPole-v1-dqn", ["cleanrl/CartPole-v1-dqn-seed1"]),
        ("cleanrl/Pong-v5-dqn_atari-seed3", ["cleanrl/PongNoFrameskip-v4-dqn_atari-seed3"]),
        ("me/x", ["me/x-seed1"]),
    ],
)
def test_candidates(text: str, others: list[str]) -> None:
    assert candidates(parse_reference(text)) == [text, *others]


def test_only_hub_references_have_candidates(tmp_path: Path) -> None:
    assert candidates(parse_reference(str(tmp_path))) == []


@pytest.mark.parametrize(
    ("name", "env", "script"),
    [
        ("BreakoutNoFrameskip-v4-dqn_atari_jax-seed1", "BreakoutNoFrameskip-v4", "dqn_atari_jax"),
        ("Breakout-v5-ppo_atari_envpool_xla_jax_scan-seed1", "Breakout-v5", "ppo_atari_envpool_xla_jax_scan"),
        ("CartPole-v1-dqn", "CartPole-v1", "dqn"),
        ("dqn-CartPole-v1", "CartPole-v1", "dqn"),
        ("CartPole-v1", "CartPole-v1", None),
        ("my-agent", None, None),
    ],
)
def test_split_name(name: str, env: str | None, script: str | None) -> None:
    assert split_name(name) == (env, script)


# Paths and runs


def test_existing_path_wins_over_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "cleanrl" / "CartPole-v1-dqn"
    folder.mkdir(parents=True)
    assert parse_reference("cleanrl/CartPole-v1-dqn") == Reference(
        "cleanrl/CartPole-v1-dqn", "path", path=folder
    )


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "q.pth"
    file.write_bytes(b"x")
    assert parse_reference("~/q.pth").path == file
    assert local_file(parse_reference("~/q.pth")) == file


def run_folder(folder: Path, config: object, student: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if student:
        (folder / RUN_STUDENT).write_bytes(b"weights")
    return folder


RUN_CONFIG = {"teacher": "bundled/x", "student": "qdagger-dqn", "preset": "quick"}


def test_run_directory_means_its_student(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "one", RUN_CONFIG)
    (folder / "other.safetensors").write_bytes(b"a snapshot")
    reference = parse_reference("runs/one")
    assert reference == Reference("runs/one", "run", path=folder)
    assert local_file(reference) == folder / RUN_STUDENT


@pytest.mark.parametrize("config", [RUN_CONFIG, {"format": 1, "config": RUN_CONFIG, "versions": {}}])
def test_run_without_a_student(tmp_path: Path, config: object) -> None:
    run_folder(tmp_path / "unfinished", config, student=False)
    with pytest.raises(UserError, match="the run 'unfinished' has no student yet"):
        parse_reference("unfinished")


@pytest.mark.parametrize("config", [{}, [], 3, {"policy_class": {}}])
def test_other_config_files_make_no_run(tmp_path: Path, config: object) -> None:
    folder = run_folder(tmp_path / "zoo", config, student=False)
    (folder / "x.zip").write_bytes(b"weights")
    (folder / "config.json").touch()
    assert parse_reference("zoo").kind == "path"
    (folder / "config.json").write_bytes(b"\xff no JSON")
    assert local_file(parse_reference("zoo")) == folder / "x.zip"


def test_folder_with_nested_checkpoint_and_card(tmp_path: Path) -> None:
    """RL Zoo's layout: the zip beside a folder of settings."""
    folder = tmp_path / "dqn-CartPole-v1"
    (folder / "CartPole-v1").mkdir(parents=True)
    for name in ("CartPole-v1.zip", "train_eval_metrics.zip", "CartPole-v1/args.yml"):
        (folder / name).write_bytes(b"x")
    (folder / "README.md").write_text("# card")
    file = local_file(parse_reference("dqn-CartPole-v1"))
    assert file == folder / "CartPole-v1.zip"
    assert local_card(file) == "# card"
    assert local_card(folder / "CartPole-v1" / "args.yml") is None


def test_folder_without_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no known checkpoint in .*it holds nothing"):
        local_file(parse_reference(str(tmp_path)))


# Which file


@pytest.mark.parametrize(
    ("names", "where", "chosen"),
    [
        (["README.md", "dqn.cleanrl_model", "events.out", "model.zip"], "x/y", "dqn.cleanrl_model"),
        (["a/model.safetensors", "model.safetensors", "README.md"], "x/y", "model.safetensors"),
        (["a/b/model.pt"], "x/y", "a/b/model.pt"),
        (["dqn-CartPole-v1.zip", "train_eval_metrics.zip"], "sb3/dqn-CartPole-v1", "dqn-CartPole-v1.zip"),
        (["best.zip", "CartPole-v1.zip"], "/zoo/dqn-CartPole-v1", "CartPole-v1.zip"),
        (["dqn.cleanrl_model", "old.cleanrl_model"], "cleanrl/CartPole-v1-dqn-seed1", "dqn.cleanrl_model"),
    ],
)
def test_choose_file(names: list[str], where: str, chosen: str) -> None:
    assert choose_file(names, where) == chosen


def test_several_checkpoints_are_told_with_advice_for_where_they_are(tmp_path: Path) -> None:
    names = ["a.pt", "b.pt"]
    with pytest.raises(
        UserError, match=r"x/y holds several .*: a\.pt, b\.pt; name one of them \(OWNER/NAME:FILE"
    ):
        choose_file(names, "x/y")
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"several .*name one of them \(its path, e\.g\. .*/a\.pt\)") as told:
        local_file(parse_reference(str(tmp_path)))
    assert "OWNER" not in str(told.value)


# Mistyped paths


def test_a_mistyped_path_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "demo" / "snapshots").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for text, meant in (
        ("./runs/dmo", "runs/demo"),
        ("runs/demo/snapshot/x.safetensors", "runs/demo/snapshots"),
        ("rnus/demo/snapshots", "runs"),
        (str(tmp_path / "runs" / "demoo"), str(tmp_path / "runs" / "demo")),
    ):
        with pytest.raises(UserError) as told:
            parse_reference(text)
        assert str(told.value).startswith(f"no such file or folder: {text!r} (did you mean {meant!r}?)")
    with pytest.raises(UserError, match=r"'runs/x/y/z'; a Hub repository is owner/name"):
        parse_reference("runs/x/y/z")
    with pytest.raises(
        UserError, match=r"no teacher 'CartPole-dqm': .*\(did you mean bundled/CartPole-dqn\?\)"
    ):
        parse_reference("CartPole-dqm")
    assert nearest_here("runs/demmo") == " (did you mean 'runs/demo'?)"  # as well a Hub repository
    assert is_in_folder("runs/zzz")
    assert nearest_here("runs/zzz") == nearest_here("cleanrl/x") == nearest_here("a\0b/c") == ""
    assert not is_in_folder("cleanrl/x")


def test_long_listings_are_cut() -> None:
    with pytest.raises(UserError, match=r"it holds 00\.txt, .*, 11\.txt and 18 more"):
        choose_file([f"{i:02}.txt" for i in range(30)], "x/y")


# Bundled teachers


def test_bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Breakout-dqn", "CartPole-dqn", "__pycache__"):
        (tmp_path / "shipped" / name).mkdir(parents=True)
    for name in ("Breakout-dqn", "CartPole-dqn"):
        (tmp_path / "shipped" / name / "model.safetensors").write_bytes(b"x")
    monkeypatch.setattr(module, "BUNDLED", tmp_path / "shipped")
    assert bundled_names() == ["Breakout-dqn", "CartPole-dqn"]
    reference = parse_reference("bundled/CartPole-dqn")
    assert (reference.kind, reference.repo) == ("bundled", "CartPole-dqn")
    assert local_file(reference) == tmp_path / "shipped" / "CartPole-dqn" / "model.safetensors"
    with pytest.raises(
        UserError, match=r"no bundled teacher 'breakout-dqn' \(did you mean bundled/Breakout-dqn"
    ):
        parse_reference("bundled/breakout-dqn")
    with pytest.raises(UserError, match="there are: Breakout-dqn, CartPole-dqn"):
        parse_reference("bundled/../secret")
