"""Returns of the teacher, of random play and of the student, each under a recorded acting rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reincarnate import seeds
from reincarnate.acting import ActRule, parse_act_rule
from reincarnate.atari_scores import human_normalized
from reincarnate.evaluate import RandomPolicy, RecurrentPolicy, evaluate, lanes_for
from reincarnate.phases.shared_returns import shared
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

    def policy(generator: torch.Generator) -> Policy:
        return RecurrentPolicy(teacher, rule, teacher.temperature, generator)

    what = {"policy": teacher.policy_sha256, "act": str(rule)} if stage.shares_teacher else {}
    return _evaluate_once(stage, policy, f"evaluate teacher ({rule})", "evaluate teacher", what)


def evaluate_random(stage: Stage) -> Returns:
    """G_random: the uniform policy."""

    def policy(generator: torch.Generator) -> Policy:
        return RandomPolicy(stage.spec.num_actions, generator)

    what = {"policy": "random", "act": "uniform"}
    return _evaluate_once(stage, policy, "evaluate random play", "evaluate random", what)


def evaluate_student(stage: Stage, phase: str, updates: int, agent_steps: int, seconds: float) -> Returns:
    """The student's return now, after ``seconds`` of training in this phase.

    Recorded in the curves and logged over the phase's own axis.
    """
    rule = student_rule(stage)
    policy = StudentPolicy(stage.student, rule, stage.generator)
    title = f"evaluate student {_moment(stage, phase, updates, agent_steps)} ({rule})"
    returns = _evaluate(stage, policy, title, stage.seed(f"evaluate {phase}", updates), stage.generator)
    stage.curves.add_evaluation(phase, updates, agent_steps, str(rule), returns, seconds)
    scalars = {
        "return": returns.mean,
        "return_std": returns.std,
        "teacher_normalized": teacher_normalized(returns, stage.teacher_return, stage.random_return),
        "human_normalized": human_normalized(stage.spec.env_id, returns.mean),
    }
    known = {name: value for name, value in scalars.items() if value is not None}
    stage.logger.scalars(f"{phase}/evaluation", known, updates if phase == "offline" else agent_steps)
    return returns


def _moment(stage: Stage, phase: str, updates: int, agent_steps: int) -> str:
    """E.g. ``during offline, at 1,000 updates``, and ``after offline`` at its end."""
    config = stage.config
    if phase == "offline":
        done, total, unit = updates, config.offline.updates, "updates"
    else:
        done, total, unit = agent_steps, config.online.agent_steps, "agent steps"
    return f"after {phase}" if done >= total else f"during {phase}, at {done:,} {unit}"


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


def _evaluate_once(
    stage: Stage,
    policy: Callable[[torch.Generator], Policy],
    title: str,
    purpose: str,
    what: Mapping[str, Any],
) -> Returns:
    """A measurement of the teacher's part: of the run's own, or one that all runs of a comparison share.

    A shared one has its own generator, so that it does not matter to a run's student who made it.
    """
    if not stage.shares_teacher:
        return _evaluate(stage, policy(stage.generator), title, stage.seed(purpose), stage.generator)
    env, seed = stage.config.env, stage.config.seed_of_teacher
    generator = torch.Generator(stage.device).manual_seed(seeds.derive(seed, f"{purpose}: act"))
    depends = {
        **what,
        "env": stage.spec.to_dict(),
        "backend": env.backend,
        "num_envs": env.num_envs,
        "games": stage.config.evaluate.games,
        "seed": seed,
    }

    def measure() -> Returns:
        return _evaluate(stage, policy(generator), title, seeds.derive(seed, purpose), generator)

    def found() -> tuple[Returns, bool] | None:
        return shared(depends, measure, stage.stop_point) if stage.ranks.first else None

    # Rank 0 measures it alone: what runs share does not depend on the number of their ranks.
    [measured] = [each for each in stage.apart(found) if each is not None]
    returns, reused = measured
    if reused:
        stage.progress.say(f"{title}: {returns}, measured before")
    return returns


def _evaluate(stage: Stage, policy: Policy, title: str, seed: int, generator: torch.Generator) -> Returns:
    """Whole games, shared among the ranks: every environment of every rank plays the same number."""
    games, env, before = stage.config.evaluate.games, stage.config.env, generator.get_state()
    rank, size = stage.share
    lanes = lanes_for(games, size * (env.num_envs if env.num_envs > 1 else EVALUATION_ENVS))
    first, end = lanes * rank // size, lanes * (rank + 1) // size

    def play() -> tuple[float, ...]:
        mine = end - first
        return _play(stage, policy, title, seed + first, generator, mine, games // lanes) if mine else ()

    # A resumed run repeats the evaluation with the same random numbers.
    everybodys = stage.apart(play, undo=lambda: generator.set_state(before))
    returns = Returns.from_games([score for each in everybodys for score in each])
    stage.progress.say(f"{title}: {returns}")
    return returns


def _play(
    stage: Stage, policy: Policy, title: str, seed: int, generator: torch.Generator, lanes: int, quota: int
) -> tuple[float, ...]:
    """The returns of this rank's games: ``quota`` in each of ``lanes`` environments."""
    games, before = lanes * quota, generator.get_state()
    with stage.progress.phase(title, total=games, unit="games") as bar:

        def on_progress(done: int, total: int, mean: float) -> None:
            if stage.stop_requested():  # a resumed run repeats the evaluation with the same random numbers
                generator.set_state(before)
            stage.stop_point()
            bar.update(done, **({"return": mean} if done else {}))

        return evaluate(
            policy,
            stage.spec,
            games,
            num_envs=lanes,
            seed=seed,
            device=stage.device,
            backend=stage.config.env.backend,
            progress=on_progress,
        ).returns
