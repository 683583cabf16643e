"""What a teacher reference means: text in, a ``Reference`` out, without touching the network.

A reference is a Hub repository ``owner/name[@revision][:file]``, its short form, a local file or folder,
a run directory (its student is the teacher), or ``bundled/NAME``. A path that exists wins over all others.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from reincarnate import files
from reincarnate.errors import UserError

#: Where the teachers that ship with the package lie, one folder each.
BUNDLED = Path(__file__).parent / "bundled"
RUN_STUDENT = "student.safetensors"
#: Endings of files that hold weights, the most specific first; a repository's first kind present is taken.
WEIGHT_ENDINGS = (".cleanrl_model", ".safetensors", ".zip", ".pt", ".pth", ".msgpack", ".ckpt")
#: The model card of a repository or folder.
CARD = "README.md"
_MAX_TEXT_BYTES = 4 << 20  # of a card, of a run's configuration
# What lies beside a policy and is none: training curves, the other parts of an unpacked archive.
_NOT_WEIGHTS = frozenset({"train_eval_metrics.zip", "pytorch_variables.pth", "optimizer.pt", "optimizer.pth"})
_NOT_WEIGHTS_ENDINGS = (".optimizer.pth", ".optimizer.pt")
# The Hub's own rule: huggingface_hub.utils.validate_repo_id.
_REPO = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
#: Dopamine's checkpoint of one iteration; those of its TensorFlow agents.
_DOPAMINE = re.compile(r"(?:(?P<folder>.*)/)?ckpt\.(?P<iteration>\d{1,9})", re.ASCII)
_DOPAMINE_TF = re.compile(r"(?:.*/)?tf_ckpt-\d+\..*")
_SEED = re.compile(r"-seed\d+$")
_ENV_AND_EXPERIMENT = re.compile(r"(?P<env>.+-v\d+)-(?P<experiment>\w+?)(?:-seed\d+)?")


@dataclass(frozen=True)
class Reference:
    """A parsed teacher reference; ``text`` is what the user wrote."""

    text: str
    kind: Literal["hub", "path", "run", "bundled"]
    repo: str | None = None  # hub: owner/name; bundled: NAME
    revision: str | None = None  # hub: branch, tag or commit; None is the default branch
    file: str | None = None  # hub: path inside the repository, if one was named
    path: Path | None = None  # path, run, bundled: the absolute file or folder


def parse_reference(text: str) -> Reference:
    """What ``text`` refers to.

    Raises:
        UserError: a path that does not exist, a run without a student, an unknown bundled teacher, or text
            that is no reference at all.
    """
    if not text.strip():
        raise UserError("the teacher reference is empty; give owner/name, a path, a run or bundled/NAME")
    path = _local_path(text)
    if path is not None and path.exists():
        return _parse_path(text, path.resolve())
    if text.startswith("bundled/"):
        return _parse_bundled(text)
    if _looks_like_path(text):
        form = "; a Hub repository is owner/name[@revision][:file]" if _is_long(text) else ""
        raise UserError(f"no such file or folder: {text!r}{nearest_here(text)}{form}")
    return _parse_hub(text)


def nearest_here(text: str) -> str:
    """`` (did you mean ...?)`` with the nearest file or folder on this machine; empty where none is near."""
    path = _local_path(text)
    return "" if path is None else files.did_you_mean(path)


def is_in_folder(text: str) -> bool:
    """Whether ``owner/name`` may as well be meant as a path: there is a folder of the owner's name here."""
    path = _local_path(text)
    return path is not None and path.parent != Path() and path.parent.is_dir()


def candidates(reference: Reference) -> list[str]:
    """Repositories to try in order: the one that was written, then CleanRL's names for it.

    CleanRL uploads ``{env_id}-{exp_name}-seed{seed}`` (cleanrl_utils/enjoy.py); its DQN agents play
    ``BreakoutNoFrameskip-v4``, which EnvPool calls ``Breakout-v5``.
    """
    if reference.repo is None:
        return []
    owner, _, name = reference.repo.partition("/")
    names = [name] if _SEED.search(name) else [name, f"{name}-seed1"]
    match = _ENV_AND_EXPERIMENT.fullmatch(name)
    if match and match["env"].endswith("-v5"):
        old = name.replace("-v5-", "NoFrameskip-v4-", 1)
        names += [old] if _SEED.search(old) else [f"{old}-seed1", old]
    return [f"{owner}/{each}" for each in names]


def split_name(name: str) -> tuple[str | None, str | None]:
    """Environment and experiment in a repository's or folder's name, e.g. ``CartPole-v1-dqn-seed1``.

    Understands CleanRL's ``{env}-{experiment}-seed{n}`` and RL Zoo's ``{algorithm}-{env}``; None if absent.
    """
    match = _ENV_AND_EXPERIMENT.fullmatch(name)
    if match:
        return match["env"], match["experiment"]
    zoo = re.fullmatch(r"(?:(?P<algorithm>[a-z0-9_]+)-)?(?P<env>[A-Z]\w*(?:-\w+)*-v\d+)", name)
    return (zoo["env"], zoo["algorithm"]) if zoo else (None, None)


def choose_file(names: Sequence[str], where: str, wanted: str | None = None, *, local: bool = False) -> str:
    """The file with the weights among ``names`` (POSIX paths below ``where``).

    A wanted file must be there. Else the first ending of ``WEIGHT_ENDINGS`` that occurs decides, files at the
    top before nested ones, and among several the one the repository is named after, or that has a folder of
    its own beside it (its settings, or its unpacked copy). Without any: Dopamine's newest ``ckpt.N``, or a
    file without an ending that the repository is named after. ``local``: ``where`` is a folder here, and
    advice is for one.

    Raises:
        UserError: the wanted file is missing, nothing looks like weights, or several do; lists what is there.
    """
    if wanted is not None:
        if wanted not in names:
            raise UserError(f"{where} has no file {wanted!r}; it holds {_listed(names)}")
        return wanted
    found = (
        _likeliest(names)
        or _newest_dopamine(names)
        or [name for name in names if _bare_and_named_after(where, name)]
    )
    if not found and any(map(_DOPAMINE_TF.fullmatch, names)):
        raise UserError(
            f"{where} holds a TensorFlow checkpoint of Dopamine (tf_ckpt-N), which is not read; its JAX "
            "agents write ckpt.N"
        )
    if not found:
        raise UserError(
            f"no known checkpoint in {where} (known: {', '.join(WEIGHT_ENDINGS)}, ckpt.N); it holds "
            f"{_listed(names)}"
        )
    if len(found) > 1:
        found = [name for name in found if _named_after(where, PurePosixPath(name).stem)] or found
    if len(found) > 1:
        found = [name for name in found if _has_folder(name, names)] or found
    if len(found) > 1:
        one = f"its path, e.g. {PurePosixPath(where) / found[0]}" if local else "OWNER/NAME:FILE"
        raise UserError(f"{where} holds several checkpoints: {_listed(found)}; name one of them ({one})")
    return found[0]


def bundled_names() -> list[str]:
    """Names of the teachers that ship with the package."""
    return sorted(
        folder.name
        for folder in BUNDLED.iterdir()
        if folder.is_dir() and any(_is_weights(each.name) for each in folder.iterdir())
    )


def local_file(reference: Reference) -> Path:
    """The weights that a path, run or bundled reference means.

    Raises:
        UserError: a folder without a known checkpoint, or with several.
    """
    path = reference.path
    if path is None:
        raise ValueError(f"{reference.text} is not on this machine")
    if not path.is_dir():
        return path
    if reference.kind == "run":
        return path / RUN_STUDENT
    names = [each.relative_to(path).as_posix() for each in files_below(path)]
    return path / choose_file(names, str(path), local=True)


def local_card(file: Path) -> str | None:
    """The model card beside a checkpoint, if there is a readable one."""
    try:
        return _small_text(file.parent / CARD)
    except (OSError, UnicodeDecodeError):
        return None


def _small_text(path: Path) -> str | None:
    """The text of a file; None where it is none (a pipe would be waited for), or far too large."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        content = file.read(_MAX_TEXT_BYTES + 1)
    return content.decode("utf-8") if len(content) <= _MAX_TEXT_BYTES else None


def files_below(folder: Path) -> list[Path]:
    """Files in a folder and one level below it (RL Zoo nests once), sorted."""
    return sorted(each for pattern in ("*", "*/*") for each in folder.glob(pattern) if each.is_file())


def _local_path(text: str) -> Path | None:
    """Text as a path with ``~`` expanded; None where it cannot be one."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, an unknown user's home
        return None
    return path


def _looks_like_path(text: str) -> bool:
    """Whether the user must have meant a file: its form, its ending, or too many parts for a repository."""
    if text.startswith(("/", "./", "../", "~", "\\")) or text in (".", "..") or Path(text).is_absolute():
        return True
    head = text.partition(":")[0]
    named = head.endswith(WEIGHT_ENDINGS) or _DOPAMINE.fullmatch(head) is not None
    return named or _is_long(text)


def _is_long(text: str) -> bool:
    """Whether it has more parts than owner and name."""
    head = text.partition(":")[0]
    relative = not text.startswith(("/", ".", "~", "\\"))
    return relative and head.count("/") > 1 and "@" not in head and "://" not in text


def _parse_path(text: str, path: Path) -> Reference:
    config = path / "config.json"
    if not (path.is_dir() and config.is_file()):
        return Reference(text, "path", path=path)
    if (path / RUN_STUDENT).is_file():
        return Reference(text, "run", path=path)
    if _is_run_config(config):
        raise UserError(
            f"the run {text!r} has no student yet ({RUN_STUDENT} is missing); let it finish first"
        )
    return Reference(text, "path", path=path)


def _is_run_config(config: Path) -> bool:
    """Whether a config.json is a run's: other tools use that name too, also beside checkpoints."""
    try:
        values = json.loads(_small_text(config) or "null")
    except (OSError, ValueError, RecursionError):
        return False
    parts = [values, *values.values()] if isinstance(values, dict) else []
    return any(isinstance(part, dict) and {"student", "preset"} <= part.keys() for part in parts)


def _parse_bundled(text: str) -> Reference:
    name = text.removeprefix("bundled/")
    known = bundled_names()
    if name not in known:
        raise UserError(
            f"no bundled teacher {name!r}{_nearest_bundled(name)}; there are: {', '.join(known) or 'none'}"
        )
    return Reference(text, "bundled", repo=name, path=BUNDLED / name)


def _nearest_bundled(name: str) -> str:
    close = difflib.get_close_matches(name, bundled_names(), n=1, cutoff=0.4)
    return f" (did you mean bundled/{close[0]}?)" if close else ""


def _parse_hub(text: str) -> Reference:
    if "://" in text:
        raise UserError(f"{text!r} is an address; write the Hub repository as owner/name[@revision][:file]")
    head, colon, file = text.partition(":")  # neither a repository nor a git revision may hold a colon
    repo, at, revision = head.partition("@")
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo or repo.endswith((".git", "-", ".")):
        near = nearest_here(text) or _nearest_bundled(text)
        raise UserError(
            f"no teacher {text!r}: not a file, a folder or a Hub repository "
            f"(owner/name[@revision][:file]){near}"
        )
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise UserError(f"{text!r} names no valid revision after '@'; give a branch, tag or commit")
    if colon and not is_safe_name(file):
        raise UserError(f"{text!r} names no valid file after ':'; give a path inside the repository")
    return Reference(text, "hub", repo=repo, revision=revision or None, file=file or None)


def is_safe_name(name: str) -> bool:
    """Whether a file name of a repository stays below the folder it is written to."""
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") for part in parts)
    return plain and not re.search(r"[\x00-\x1f\\:]", name)


def _is_weights(name: str) -> bool:
    own = PurePosixPath(name).name
    beside = own in _NOT_WEIGHTS or own.endswith(_NOT_WEIGHTS_ENDINGS)
    return name.endswith(WEIGHT_ENDINGS) and not beside


def _likeliest(names: Sequence[str]) -> list[str]:
    """Names of the first ending that occurs, and of these the least nested."""
    for ending in WEIGHT_ENDINGS:
        found = [name for name in names if _is_weights(name) and name.endswith(ending)]
        if found:
            depth = min(name.count("/") for name in found)
            return sorted(name for name in found if name.count("/") == depth)
    return []


def _newest_dopamine(names: Sequence[str]) -> list[str]:
    """Dopamine's newest ``ckpt.N`` of each of the least nested folders that have one.

    A ``sentinel_checkpoint_complete.N`` says that N was written to its end; where a folder has any, only
    those that have theirs count.
    """
    folders: dict[str, list[int]] = {}
    for match in filter(None, map(_DOPAMINE.fullmatch, names)):
        folders.setdefault(match["folder"] or "", []).append(int(match["iteration"]))
    depth = min((folder.count("/") + bool(folder) for folder in folders), default=0)
    newest = []
    for folder, iterations in folders.items():
        if folder.count("/") + bool(folder) == depth:
            prefix = f"{folder}/" if folder else ""
            complete = [n for n in iterations if f"{prefix}sentinel_checkpoint_complete.{n}" in names]
            newest.append(f"{prefix}ckpt.{max(complete or iterations)}")
    return sorted(newest)


def _has_folder(name: str, names: Sequence[str]) -> bool:
    """Whether there is a folder called as the file, as RL Zoo has one for a model's settings."""
    return any(each.startswith(f"{PurePosixPath(name).with_suffix('')}/") for each in names)


def _named_after(where: str, stem: str) -> bool:
    """Whether a repository or folder is called after a file: ``stem``, ``X-stem`` or ``X-stem-seedN``."""
    name = _SEED.sub("", PurePosixPath(where).name)
    return name == stem or name.endswith(f"-{stem}")


def _bare_and_named_after(where: str, name: str) -> bool:
    """Whether a file at the top carries the repository's name and no ending (``ppo-LunarLander-v2``)."""
    return "/" not in name and not PurePosixPath(name).suffix and _named_after(where, name)


def _listed(names: Sequence[str], most: int = 12) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(sorted(names)[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
