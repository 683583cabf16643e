"""YAML with Python tags (RL Zoo's ``args.yml``, ``config.yml``) as plain data; no tag constructs anything.

PyYAML parses the text into nodes; turning nodes into values is done here, for plain types alone. An object
of any class becomes :class:`Tagged`, its name and its parts, whatever the tag would have called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reincarnate.errors import UserError
from reincarnate.teachers.formats._text import reason

_MAX_BYTES = 1 << 17
_MAX_DEPTH = 32
_MAX_SIZE = 8 << 20  # characters, with all that the aliases stand for
_MAX_DIGITS = 100  # of a number; longer ones stay text
_PLAIN = "tag:yaml.org,2002:"
_PYTHON = "tag:yaml.org,2002:python/"
#: Dicts that ``yaml.dump`` writes as a call with a list of pairs.
_DICTS = frozenset({"collections.OrderedDict", "collections.defaultdict", "builtins.dict"})


@dataclass(frozen=True)
class Tagged:
    """Something of Python's that was not made: a class, a function, an object."""

    name: str  # e.g. torch.nn.modules.activation.ReLU
    value: Any = None  # its arguments or state, as plain data

    def __str__(self) -> str:
        return self.name

    @property
    def text(self) -> str | None:
        """The text of a subclass of ``str``, which is written as a call with the text."""
        parts = self.value.get("args") if isinstance(self.value, dict) else self.value
        first = parts[0] if isinstance(parts, list) and parts else None
        return first if isinstance(first, str) else None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file: dicts, lists, tuples, text, numbers, booleans, None and :class:`Tagged`.

    Raises:
        UserError: no YAML, no mapping, too large or too deep.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise UserError(f"{path} is not read: more than {_MAX_BYTES >> 10} KiB of YAML")
    try:
        value = _Reader().value(yaml.compose(content, Loader=yaml.SafeLoader), 0)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is no YAML that can be read ({reason(error)})") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected settings by name, found a {type(value).__name__}")
    return {str(name): setting for name, setting in value.items()}


class _Reader:
    """From nodes to values; what several places refer to is made once."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}  # of what was made
        self._open: set[int] = set()

    def value(self, node: yaml.Node | None, depth: int) -> Any:
        if node is None:
            return None
        if depth > _MAX_DEPTH or id(node) in self._open:
            raise ValueError("it is nested too deeply")
        if id(node) not in self._made:
            self._open.add(id(node))
            self._made[id(node)] = self._make(node, depth + 1)
            self._count(node)
            self._open.discard(id(node))
        return self._made[id(node)]

    def _count(self, node: yaml.Node) -> None:
        """Refuse what a few aliases blow up: nobody could print it."""
        size = 1 + len(node.tag)
        if isinstance(node, yaml.ScalarNode):
            size += len(node.value)
        elif isinstance(node, yaml.MappingNode):
            size += sum(self._sizes[id(part)] for pair in node.value for part in pair)
        else:
            size += sum(self._sizes[id(part)] for part in node.value)
        if size > _MAX_SIZE:
            raise ValueError("its aliases stand for far more than it holds")
        self._sizes[id(node)] = size

    def _make(self, node: yaml.Node, depth: int) -> Any:
        tag = node.tag
        if isinstance(node, yaml.ScalarNode):
            return _scalar(tag, node.value)
        if isinstance(node, yaml.SequenceNode):
            parts: Any = [self.value(each, depth) for each in node.value]
            if tag in (f"{_PYTHON}tuple", f"{_PYTHON}list", f"{_PLAIN}seq"):
                return tuple(parts) if tag.endswith("tuple") else parts
        else:
            parts = {_key(self.value(key, depth)): self.value(each, depth) for key, each in node.value}
            if tag in (f"{_PYTHON}dict", f"{_PLAIN}map"):
                return parts
        name = _name(tag)
        if name in _DICTS:
            return _pairs(parts)
        return Tagged(name, parts)


def _name(tag: str) -> str:
    """``collections.OrderedDict`` of ``tag:yaml.org,2002:python/object/apply:collections.OrderedDict``."""
    return tag.removeprefix(_PLAIN).partition(":")[2] or tag


def _key(key: Any) -> Any:
    if not isinstance(key, (str, int, float, bool, type(None))):
        raise ValueError("a key that is no plain text or number")
    return key


def _pairs(parts: Any) -> dict[Any, Any]:
    """A dict of ``[[[key, value], ...]]``, the arguments of the call that would have made it."""
    arguments = parts.get("args", []) if isinstance(parts, dict) else parts
    items = next((each for each in arguments if isinstance(each, (list, tuple))), [])
    return {_key(key): value for key, value in items}


_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() in ("true", "yes", "on"),
    "int": lambda text: int(text.replace("_", ""), 0) if text.lstrip("+-") != "0" else 0,
    "float": lambda text: float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan")),
    "str": str,
}
_PYTHON_SCALARS = {"none": "null", "unicode": "str", "long": "int"}


def _scalar(tag: str, text: str) -> Any:
    if tag.startswith(_PYTHON):
        kind, _, name = tag.removeprefix(_PYTHON).partition(":")
        if kind in ("name", "module", "object", "object/apply", "object/new"):
            return Tagged(name, text or None)
        short = _PYTHON_SCALARS.get(kind, kind)
    else:
        short = tag.removeprefix(_PLAIN)
    if short == "int" and len(text) > _MAX_DIGITS:
        return text
    try:
        return _SCALARS.get(short, str)(text)
    except ValueError:  # YAML's octal numbers
        return text
