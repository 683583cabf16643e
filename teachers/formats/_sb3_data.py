"""The readable part of a model's ``data``: spaces, the policy's arguments, the algorithm's own fields.

Stable-Baselines3 pickles what JSON cannot hold and writes its attributes as text beside it. That text is
read here, never the pickle, and what it does not tell is None.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reincarnate.teachers.formats._yaml import Tagged

_MAX_TEXT = 10_000  # characters of a literal
_MAX_SIZE = 1 << 31  # of a dimension
_CLASS = re.compile(r"<class '([\w.<>]+)'>|([A-Za-z_][\w.]*)")


@dataclass(frozen=True)
class Space:
    """A space of gym or gymnasium, as far as its text tells."""

    kind: str | None  # Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple
    shape: tuple[int, ...] | None
    dtype: str | None
    n: int | None = None  # actions of Discrete
    start: int = 0


def read_space(value: Any) -> Space:
    """A space's fields; all None where there is nothing readable."""
    fields = value if isinstance(value, dict) else {}
    name = class_name(fields.get(":type:"))
    return Space(
        kind=name.rpartition(".")[2] if name else None,
        shape=_shape(fields.get("shape", fields.get("_shape"))),
        dtype=fields["dtype"] if isinstance(fields.get("dtype"), str) else None,
        n=_integer(fields.get("n")),
        start=_integer(fields.get("start")) or 0,
    )


def policy_module(data: Mapping[str, Any]) -> str | None:
    """The module that the policy's class came from, e.g. ``stable_baselines3.dqn.policies``."""
    fields = data.get("policy_class")
    module = fields.get("__module__") if isinstance(fields, dict) else None
    return module if isinstance(module, str) else None


def policy_arguments(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The policy's keyword arguments: plain values, or the text of others; None where there are none."""
    fields = data.get("policy_kwargs")
    if not isinstance(fields, dict):
        return None
    return {name: literal(value) for name, value in fields.items() if not name.startswith(":")}


def class_name(value: Any) -> str | None:
    """``torch.nn.modules.activation.ReLU`` of ``<class '...'>``, a plain name or a YAML tag."""
    if isinstance(value, Tagged):
        return value.name
    match = _CLASS.fullmatch(value) if isinstance(value, str) and len(value) <= _MAX_TEXT else None
    return (match[1] or match[2]) if match else None


def literal(value: Any) -> Any:
    """The Python literal that a text spells (``dict(a=1)`` too), else the value itself; nothing is run.

    What is no literal inside a dict stays text: ``dict(activation_fn=nn.ReLU)`` gives ``"nn.ReLU"``.
    """
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        return value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parser, about somebody's text
            return _plain(ast.parse(value.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return value


def _plain(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return {each.arg: _plain(each.value) for each in node.keywords if each.arg is not None}
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): _plain(value) for key, value in pairs if key is not None}
    if isinstance(node, ast.List):
        return [_plain(each) for each in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _integer(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value.strip()):
        return int(value)
    return value if type(value) is int else None


def _shape(value: Any) -> tuple[int, ...] | None:
    sizes = literal(value)
    if not isinstance(sizes, (list, tuple)) or len(sizes) > 8:
        return None
    if all(type(size) is int and 0 <= size < _MAX_SIZE for size in sizes):
        return tuple(sizes)
    return None
