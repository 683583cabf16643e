"""The phases of a run: evaluate, collect, offline, online. One loop drives every student."""

from reincarnate.phases.evaluation import (
    evaluate_random,
    evaluate_student,
    evaluate_teacher,
    student_rule,
    teacher_normalized,
    teacher_rule,
)
from reincarnate.phases.offline import OfflineState, offline
from reincarnate.phases.online import OnlineState, make_coefficient, online
from reincarnate.phases.stage import Stage, Stopped, save_student

__all__ = [
    "OfflineState",
    "OnlineState",
    "Stage",
    "Stopped",
    "evaluate_random",
    "evaluate_student",
    "evaluate_teacher",
    "make_coefficient",
    "offline",
    "online",
    "save_student",
    "student_rule",
    "teacher_normalized",
    "teacher_rule",
]
