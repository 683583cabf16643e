"""The files of a push in a folder of their own: cleaned copies, report and card made anew from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from reincarnate import files, runfiles
from reincarnate.errors import UserError
from reincarnate.report import card, read_run, write_report
from reincarnate.sharing import events, lineage
from reincarnate.sharing.redact import Redactor
from reincarnate.teachers.hub import sha256_of
from reincarnate.teachers.reference import CARD, RUN_STUDENT

_DOCUMENTS = ("config.json", "teacher.json", "result.json", "curves.json")
_RECORDINGS = ("replay.mp4", "replay.gif")
_REPORT = ("curves.png", "curves.svg", "losses.png", "losses.svg", "report.html")
#: Everything that a push may write, so that a later push takes away what it no longer has.
OWNED = (*_DOCUMENTS, *_RECORDINGS, *_REPORT, RUN_STUDENT, CARD, lineage.FILE)
_SEARCHED = (".json", ".md", ".html", ".svg", ".safetensors")


def check_run(folder: Path, force: bool) -> dict[str, Any]:
    """``result.json`` of a run that can be pushed.

    Raises:
        UserError: no run, no student yet, or (without ``force``) one that is not finished.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a run directory (no config.json); give one that `run` wrote")
    result = read_run(folder).result
    if not (folder / RUN_STUDENT).is_file():
        raise UserError(
            f"the run {folder} has no student yet ({RUN_STUDENT} is missing); let it finish first"
        )
    if result["status"] != "done" and not force:
        raise UserError(
            f"the run {folder} is not finished (status: {result['status']}); go on with `reincarnate run "
            f"--resume {folder}`, or pass --force to push what it has"
        )
    return result


def stage(folder: Path, target: Path, repo: str) -> list[Path]:
    """Fill ``target`` with what ``folder`` gives to the repository ``repo``; the files, by name.

    Raises:
        UserError: a file of the run is damaged, or would name this machine in spite of all.
    """
    redactor = Redactor(folder, runfiles.read_teacher(folder))
    chain = lineage.ancestors(folder, files.read_json(folder / "result.json"))
    for name in _DOCUMENTS:
        if (folder / name).is_file():
            files.write_json(target / name, _document(name, redactor.clean(files.read_json(folder / name))))
    _student(folder / RUN_STUDENT, target / RUN_STUDENT, redactor)
    events.rewrite(folder, target, redactor.text)
    for name in _RECORDINGS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    write_report(target)
    run = read_run(target)
    chain.append(lineage.student(repo, run.spec or {}, sha256_of(target / RUN_STUDENT), run.result))
    files.write_json(target / lineage.FILE, {"format": 1, "chain": chain})
    files.write_bytes(target / CARD, card.card(run, repo=repo, chain=chain).encode())
    staged = sorted(target.iterdir())
    for path in staged:
        if path.suffix in _SEARCHED or ".tfevents." in path.name:
            redactor.refuse_leak(path.name, path.read_bytes())
    return staged


def _document(name: str, value: Any) -> Any:
    """Where D_T lies on this machine is of no use elsewhere."""
    if name == "result.json":
        value["buffers"]["teacher"]["path"] = None
    return value


def _student(path: Path, copy: Path, redactor: Redactor) -> None:
    """The student, its weights untouched; only a header that names this machine is written anew."""
    from safetensors import safe_open
    from safetensors.torch import save

    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = json.loads(metadata["reincarnate"])
    cleaned = redactor.clean(header)
    if cleaned == header:
        shutil.copyfile(path, copy)
        return
    metadata["reincarnate"] = json.dumps(cleaned, allow_nan=False)
    files.write_bytes(copy, save(tensors, metadata))
