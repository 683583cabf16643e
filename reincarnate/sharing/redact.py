"""Taking this machine out of a run's documents: folders, the user's name in them, the host's name.

A teacher that is a file here becomes ``local:FILE``; its SHA-256, which says exactly which weights they were,
stays. Any other text that is a path becomes ``local``. After that nothing is trusted: what is about to be
uploaded is searched for this machine's folders once more, and the upload refused if one is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from reincarnate.errors import UserError

_PATH = re.compile(r"~|/|\.\.?(?:[/\\]|$)|[A-Za-z]:[\\/]|\\\\")  # how a path begins, on any system
_QUOTED_FOLDER = re.compile(r"the folder name '[^']*'")
_HIDDEN = "local"
_PICTURE = re.compile(rb"data:image/png;base64,[A-Za-z0-9+/=]*")  # random letters, slashes among them


def is_local(teacher: Mapping[str, Any]) -> bool:
    """Whether a teacher (of ``teacher.json``) is a file of this machine: neither on the Hub nor bundled."""
    return teacher["revision"] is None and not str(teacher["resolved"]).startswith("bundled/")


class Redactor:
    """Replaces what names this machine, given the run's folder and its ``teacher.json``."""

    def __init__(self, folder: Path, teacher: Mapping[str, Any] | None) -> None:
        self._names: dict[str, str] = {}
        places = [folder.resolve(), Path.home(), Path.cwd()]
        if teacher is not None and is_local(teacher):
            shown = f"{_HIDDEN}:{PurePath(str(teacher['file'])).name}"
            self._names = {str(teacher["ref"]): shown, str(teacher["resolved"]): shown}
            self._names[str(teacher["file"])] = PurePath(str(teacher["file"])).name
            places.append(Path(teacher["resolved"]))
        # The root folder and its children are on every machine: they tell nothing, and are everywhere.
        self._places = sorted({str(place) for place in places if len(place.parts) > 2}, key=len, reverse=True)
        self._places.append(f"{Path.home()}/")

    def clean(self, value: Any) -> Any:
        """A JSON value without this machine's names."""
        if isinstance(value, dict):
            return {name: self.clean(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self.clean(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """A text without this machine's names."""
        if text in self._names:
            return self._names[text]
        if _PATH.match(text):
            return _HIDDEN
        for place in self._places:
            text = text.replace(place, _HIDDEN)
        return _QUOTED_FOLDER.sub("the folder's name", text) if self._names else text

    def refuse_leak(self, name: str, content: bytes) -> None:
        """Raise UserError where a file that is about to be uploaded still names a folder of this machine."""
        searched = _PICTURE.sub(b"", content)
        for place in self._places:
            as_json = json.dumps(place)[1:-1].encode()
            if place.encode() in searched or as_json in searched:
                raise UserError(
                    f"{name} would still name a folder of this machine ({place}); nothing was pushed: "
                    "please report it"
                )
