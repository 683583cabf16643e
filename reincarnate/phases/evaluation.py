"""Returns of the teacher, of random play and of the student, each under a recorded acting rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reincarnate.acting import ActRule, parse_act_rule
from reincarnate.evaluate import OutputsPolicy, RandomPolicy, evaluate
from reincarnate.phases.stage import Stage
from reincarnate.students.student import Student
from reincarnate.types import Policy, Returns

#: Environments that an evaluation steps together where training uses a single one.
EVALUATION_ENVS = 8


def teacher_rule(stage: Stage) -> ActRule:
    """How the teacher acts when it is evaluated.

    Raises:
        ValueError: the run has no teacher.
    """
    if stage.teacher is None:
        raise ValueError("this run has no teacher")
    return parse_act_rule(stage.config.evaluate.teacher_act, stage.teacher.spec.outputs)


def student_rule(stage: Stage) -> ActRule:
    """How the student acts when it is evaluated."""
    return parse_act_rule(stage.config.evaluate.student_act, stage.student.outputs)


def evaluate_teacher(stage: Stage) -> Returns:
    """G_T: the teacher under its acting rule, in the run's environment."""
    rule, teacher = teacher_rule(stage), stage.teacher
    assert teacher is not None  # teacher_rule raised otherwise
    policy = OutputsPolicy(teacher.outputs, rule, teacher.temperature, stage.generator)
    return _evaluate(stage, policy, f"evaluate teacher ({rule})", stage.seed("evaluate teacher"))


def evaluate_random(stage: Stage) -> Returns:
    """G_random: the uniform policy."""
    policy = RandomPolicy(stage.spec.num_actions, stage.generator)
    return _evaluate(stage, policy, "evaluate random play", stage.seed("evaluate random"))


def evaluate_student(stage: Stage, phase: str, updates: int, agent_steps: int) -> Returns:
    """The student's return now; recorded in the curves and logged over the phase's own axis."""
    rule = student_rule(stage)
    policy = StudentPolicy(stage.student, rule, stage.generator)
    title = f"evaluate student after {phase} ({rule})"
    returns = _evaluate(stage, policy, title, stage.seed(f"evaluate {phase}", updates))
    stage.curves.add_evaluation(phase, updates, agent_steps, str(rule), returns)
    scalars = {"return": returns.mean, "return_std": returns.std}
    normalized = teacher_normalized(returns, stage.teacher_return, stage.random_return)
    if normalized is not None:
        scalars["teacher_normalized"] = normalized
    stage.logger.scalars(f"{phase}/evaluation", scalars, updates if phase == "offline" else agent_steps)
    return returns


def teacher_normalized(student: Returns, teacher: Returns | None, random: Returns | None) -> float | None:
    """(G - G_random) / (G_T - G_random); None without a teacher, or one that plays no better than random."""
    if teacher is None or random is None or teacher.mean <= random.mean:
        return None
    return (student.mean - random.mean) / (teacher.mean - random.mean)


@dataclass(frozen=True)
class StudentPolicy:
    """A student under an acting rule, as :func:`reincarnate.evaluate.evaluate` wants it."""

    student: Student
    rule: ActRule
    generator: torch.Generator

    def initial_state(self, num_envs: int) -> Any:
        """The student's own."""
        return self.student.initial_state(num_envs)

    def act(self, obs: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Action [N] and the next state."""
        action, _, state = self.student.act(obs, state, self.rule)
        return action, state


def _evaluate(stage: Stage, policy: Policy, title: str, seed: int) -> Returns:
    env, games = stage.config.env, stage.config.evaluate.games
    before = stage.generator.get_state()
    with stage.progress.phase(title, total=games, unit="games") as bar:

        def on_progress(done: int, total: int, mean: float) -> None:
            if stage.stop_requested():  # a resumed run repeats the evaluation with the same random numbers
                stage.generator.set_state(before)
            stage.stop_point()
            bar.update(done, **({"return": mean} if done else {}))

        returns = evaluate(
            policy,
            stage.spec,
            games,
            num_envs=env.num_envs if env.num_envs > 1 else EVALUATION_ENVS,
            seed=seed,
            device=stage.device,
            backend=env.backend,
            progress=on_progress,
        )
    stage.progress.say(f"{title}: {returns}")
    return returns
