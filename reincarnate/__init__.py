"""Reincarnate: reuse a policy that somebody already trained instead of training from scratch.

The names below are the public library; ``reincarnate.api`` shows their use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Before torch is loaded: its idle threads else spin for milliseconds after every operation, on the cores
# that the environments need at that moment (a fifth to a half more agent steps per second on two cores).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")

if TYPE_CHECKING:
    from reincarnate.api import (
        RunResult,
        TeacherReturn,
        collect_teacher,
        evaluate_teacher,
        resume,
        run,
    )
    from reincarnate.comparison import Comparison, compare, report_runs
    from reincarnate.config import RunConfig, override, preset
    from reincarnate.envs import env_spec, make_env
    from reincarnate.errors import UserError
    from reincarnate.replay import Replay
    from reincarnate.sharing import push
    from reincarnate.teachers.export import export_teacher
    from reincarnate.teachers.teacher import Teacher
    from reincarnate.teachers.zoo import list_teachers, load_teacher
    from reincarnate.types import Batch, EnvSpec, Returns
    from reincarnate.watching import Watched, watch

# Imported on first use, so that `reincarnate --help` does not wait for torch.
_HOME = {
    "Batch": "types",
    "Comparison": "comparison",
    "EnvSpec": "types",
    "Replay": "replay",
    "Returns": "types",
    "RunConfig": "config",
    "RunResult": "api",
    "Teacher": "teachers.teacher",
    "TeacherReturn": "api",
    "UserError": "errors",
    "Watched": "watching",
    "collect_teacher": "api",
    "compare": "comparison",
    "env_spec": "envs",
    "evaluate_teacher": "api",
    "export_teacher": "teachers.export",
    "list_teachers": "teachers.zoo",
    "load_teacher": "teachers.zoo",
    "make_env": "envs",
    "override": "config",
    "preset": "config",
    "push": "sharing",
    "report_runs": "comparison",
    "resume": "api",
    "run": "api",
    "watch": "watching",
}

__all__ = [
    "Batch",
    "Comparison",
    "EnvSpec",
    "Replay",
    "Returns",
    "RunConfig",
    "RunResult",
    "Teacher",
    "TeacherReturn",
    "UserError",
    "Watched",
    "collect_teacher",
    "compare",
    "env_spec",
    "evaluate_teacher",
    "export_teacher",
    "list_teachers",
    "load_teacher",
    "make_env",
    "override",
    "preset",
    "push",
    "report_runs",
    "resume",
    "run",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'reincarnate' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"reincarnate.{_HOME[name]}"), name)
    globals()[name] = value
    return value
