"""Why a measured return is not the claimed one: likely causes are tried one by one.

Every cause changes one thing of the measurement (an environment's setting, whose implementation plays, how
actions are chosen, how scores are counted) and plays again. A setting explains the claim if its return
agrees with it; it is a sure explanation if its return also differs from the first measurement, allowing for
the number of settings that were tried (Holm).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.stats
import torch

from reincarnate import seeds
from reincarnate.acting import ActRule, parse_act_rule
from reincarnate.device import beside_environments
from reincarnate.envs import env_spec, gym, make_env
from reincarnate.errors import UserError
from reincarnate.evaluate import OutputsPolicy, group_lanes, lanes_for, play_games
from reincarnate.progress import Progress
from reincarnate.teachers.claims import GAMES_IF_UNSAID, LEVEL, p_value
from reincarnate.teachers.teacher import Reported, Teacher
from reincarnate.types import Backend, EnvSpec, EnvStep, Returns, VectorEnv, Wrappers

#: A setting that is this far from the claim after its first games is not played on.
SCREEN_GAMES, SCREEN_LEVEL = 8, 0.001
#: Sides of square frames that published agents use.
_COMMON_SIDES = (64, 72, 80, 84, 96, 128)
_RULES = ("greedy", "sample", "epsilon=0.01", "epsilon=0.05")


@dataclass(frozen=True)
class Setting:
    """What a measured return depends on, beside the weights."""

    env: EnvSpec
    rule: ActRule
    backend: Backend = "envpool"
    wrappers: Wrappers = "common"
    normalise: bool = True  # use the observation statistics of a network that has them
    per_life: bool = False  # a life's score counts as a game's
    clipped: bool = False  # rewards count by their sign


@dataclass(frozen=True)
class Cause:
    """One thing that may differ, and the setting in which it does."""

    name: str
    words: str  # the setting, e.g. "sticky_probability=0.25"
    setting: Setting


@dataclass(frozen=True)
class Trial:
    """A cause that was tried."""

    cause: Cause
    returns: Returns | None  # None: it cannot be played
    p: float  # agreement with the claim
    p_change: float  # of the difference from the first measurement, after Holm
    share: float  # of the likelihood of all settings, the first measurement's among them
    problem: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether the claim could have been measured so."""
        return self.returns is not None and self.p > LEVEL

    @property
    def sure(self) -> bool:
        """Whether it makes a difference that chance does not explain."""
        return self.p_change < LEVEL

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "cause": self.cause.name,
            "setting": self.cause.words,
            "return": self.returns and self.returns.to_dict(),
            "p": self.p,
            "agrees": self.agrees,
            "p_change": self.p_change,
            "share": self.share,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Diagnosis:
    """All trials, in the order in which they were played."""

    claim: Reported
    measured: Returns
    trials: tuple[Trial, ...]

    @property
    def explanations(self) -> list[Trial]:
        """Settings that restore the claimed return: sure ones first, then the likeliest."""
        found = [trial for trial in self.trials if trial.agrees]
        return sorted(found, key=lambda trial: (not trial.sure, -trial.share))

    @property
    def verdict(self) -> str:
        """One line that names the setting, and how sure that is."""
        if not self.explanations:
            return f"none of {len(self.trials)} settings restores the claimed return, taken one at a time"
        best, *others = self.explanations
        restores = f"{best.cause.name} ({best.cause.words}) restores the claimed return"
        restores += f": p {best.p:.2g}, {best.share:.0%} of the likelihood of all settings tried"
        if not best.sure:
            restores += "; but it does not differ from the first measurement beyond chance: play more games"
        names = ", ".join(f"{trial.cause.name} ({trial.cause.words})" for trial in others)
        return f"{restores}; so may {names}" if others else restores

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: key ``diagnosis`` of ``teachers eval --json``."""
        best = next(iter(self.explanations), None)
        return {
            "restored_by": best and best.cause.name,
            "setting": best and best.cause.words,
            "sure": bool(best and best.sure),
            "verdict": self.verdict,
            "trials": [trial.to_dict() for trial in self.trials],
        }


def diagnose(
    teacher: Teacher,
    base: Setting,
    measured: Returns,
    claim: Reported,
    *,
    games: int,
    num_envs: int = 8,
    seed: int = 1,
    progress: Progress | None = None,
) -> Diagnosis:
    """Try every cause that applies to the teacher's environment.

    Args:
        teacher: on the device where it acts.
        base: how ``measured`` was measured.
        measured: the return that may differ from ``claim``.
        claim: what was claimed.
        games: at most so many whole games per cause; fewer where the first ones are far from the claim.
        num_envs: at most so many play at once.
        seed: of environments and acting; every cause plays other games.
        progress: where to show progress; standard error unless given.
    """
    shown = progress or Progress()
    found: list[tuple[Cause, Returns | None, str | None]] = []
    all_causes = causes(teacher, base, claim)
    for number, cause in enumerate(all_causes, 1):
        name = f"diagnose {number} of {len(all_causes)}: {cause.name}, {cause.words}"
        with shown.phase(name, total=games, unit="games") as bar:

            def on_game(done: int, mean: float, bar: Any = bar) -> None:
                bar.update(done, **({"return": mean} if done else {}))

            try:
                plan = _Plan(games, num_envs, seeds.derive(seed, "diagnose", number), on_game)
                found.append((cause, _screened(teacher, cause.setting, claim, plan), None))
            except UserError as error:  # e.g. a version that this implementation lacks
                found.append((cause, None, str(error)))
    return Diagnosis(claim, measured, tuple(_judged(found, measured, claim)))


def causes(teacher: Teacher, base: Setting, claim: Reported) -> list[Cause]:
    """Causes that apply to this teacher in this environment, the claim's own acting rule first."""
    found = list(_acting_causes(teacher, base, claim))
    if "normalise" in teacher.spec.network_options:
        words = "without statistics" if base.normalise else "with statistics"
        other = dataclasses.replace(base, normalise=not base.normalise)
        found.append(Cause("observation normalisation", words, other))
    found += _atari_causes(teacher, base) if base.env.kind == "atari" else []
    return found + list(_implementation_causes(base))


def _acting_causes(teacher: Teacher, base: Setting, claim: Reported) -> Iterator[Cause]:
    tried = {str(base.rule)}
    for text in (claim.act, *_RULES):
        if text is None or text in tried:
            continue
        tried.add(text)
        with contextlib.suppress(UserError):  # a card may state anything
            rule = parse_act_rule(text, teacher.spec.outputs)
            yield Cause("acting rule", str(rule), dataclasses.replace(base, rule=rule))


def _atari_causes(teacher: Teacher, base: Setting) -> list[Cause]:
    env = base.env
    found = [_changed("sticky actions", base, sticky_probability=0.0 if env.sticky_probability else 0.25)]
    other = env_spec(env.env_id, full_action_set=not env.full_action_set)
    if other.num_actions != env.num_actions:  # the first actions of the other set are played
        found.append(
            _changed("action set", base, full_action_set=other.full_action_set, num_actions=other.num_actions)
        )
    if gym.has_fire(env):
        found.append(_changed("FIRE reset", base, fire_reset=not env.fire_reset))
    found.append(_changed("no-op reset", base, noop_max=1 if env.noop_max > 1 else 30))
    found.append(_changed("life-loss episodes", base, episodic_life=not env.episodic_life))
    if env.episodic_life:
        found.append(
            Cause("life-loss episodes", "a life's score claimed", dataclasses.replace(base, per_life=True))
        )
    found.append(
        Cause("clipped rewards", "signs of rewards claimed", dataclasses.replace(base, clipped=True))
    )
    for side in _COMMON_SIDES:
        shape = (env.frame_stack, side, side)
        if shape != env.obs_shape and _fits(teacher, shape):
            found.append(_changed("frame size", base, obs_shape=shape))
    return found


def _changed(name: str, base: Setting, **changes: Any) -> Cause:
    words = ", ".join(f"{field}={value}" for field, value in changes.items() if field != "num_actions")
    return Cause(name, words, dataclasses.replace(base, env=dataclasses.replace(base.env, **changes)))


def _implementation_causes(base: Setting) -> Iterator[Cause]:
    """Another implementation; for Atari that is another resize and other resets too."""
    atari = base.env.kind == "atari"
    name = "resize and resets" if atari else "implementation"
    if base.backend == "gymnasium":
        yield Cause(name, "backend=envpool", dataclasses.replace(base, backend="envpool"))
    whose: tuple[Wrappers, ...] = ("sb3", "cleanrl") if atari else ("common",)
    for wrappers in whose:
        other = dataclasses.replace(base, backend="gymnasium", wrappers=wrappers)
        words = f"backend=gymnasium, wrappers={wrappers}" if atari else "backend=gymnasium"
        if base.backend == "envpool" or (atari and wrappers != base.wrappers):
            yield Cause(name, words, other)


def _fits(teacher: Teacher, shape: tuple[int, ...]) -> bool:
    """Whether the weights also fit frames of this size."""
    env = dataclasses.replace(teacher.spec.env, obs_shape=shape)
    try:
        network = dataclasses.replace(teacher.spec, env=env).build("meta")
    except UserError:
        return False
    ours = teacher.network.state_dict()
    return all(value.shape == ours[name].shape for name, value in network.state_dict().items())


# Playing


@dataclass(frozen=True)
class _Plan:
    games: int
    num_envs: int
    seed: int
    on_game: Callable[[int, float], None]  # games done, their mean return


def _screened(teacher: Teacher, setting: Setting, claim: Reported, plan: _Plan) -> Returns:
    """All games, or the first ones where these are far from the claim already."""
    first = min(plan.games, SCREEN_GAMES)
    returns = measure(teacher, setting, dataclasses.replace(plan, games=first))
    rest = plan.games - first
    if rest == 0 or p_value(returns, claim) < SCREEN_LEVEL:
        return returns

    def on_game(done: int, mean: float) -> None:
        total = (first * returns.mean + done * mean) / (first + done)
        plan.on_game(first + done, total)

    seed = seeds.derive(plan.seed, "rest")
    more = measure(teacher, setting, _Plan(rest, plan.num_envs, seed, on_game))
    return Returns.from_games([*returns.returns, *more.returns])


def measure(teacher: Teacher, setting: Setting, plan: _Plan) -> Returns:
    """The return of whole games (or lives) in a setting.

    Raises:
        UserError: the setting cannot be played.
    """
    acts = teacher if setting.normalise else _without_normaliser(teacher)
    generator = torch.Generator(device=teacher.device).manual_seed(seeds.derive(plan.seed, "act"))
    actions = setting.env.num_actions
    policy = OutputsPolicy(
        lambda obs: acts.outputs(obs)[:, :actions], setting.rule, teacher.temperature, generator
    )
    lanes = lanes_for(plan.games, plan.num_envs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(beside_environments(teacher.device))
        envs: list[VectorEnv] = []
        for first, size in group_lanes(lanes):
            made = make_env(setting.env, size, plan.seed + first, setting.backend, setting.wrappers)
            envs.append(_Counted(stack.enter_context(made), setting.per_life, setting.clipped))
        games = play_games(
            policy,
            envs,
            plan.games // lanes,
            device=teacher.device,
            progress=lambda done, wanted, mean: plan.on_game(done, mean),
        )
    return Returns.from_games([score for lane in games for score in lane])


class _Counted:
    """An environment whose score is counted otherwise; what the policy sees is the same."""

    def __init__(self, env: VectorEnv, per_life: bool, clipped: bool) -> None:
        self._env, self._per_life, self._clipped = env, per_life, clipped
        self.spec, self.num_envs = env.spec, env.num_envs

    def reset(self) -> EnvStep:
        """As the environment's."""
        return self._env.reset()

    def send(self, action: npt.NDArray[np.int64]) -> None:
        """As the environment's."""
        self._env.send(action)

    def recv(self) -> EnvStep:
        """A step in which a life may count as a game and a reward as its sign."""
        step = self._env.recv()
        if self._per_life:
            step = dataclasses.replace(step, game_over=step.game_over | step.terminal, game_start=step.reset)
        if self._clipped:
            step = dataclasses.replace(step, raw_reward=np.sign(step.raw_reward))
        return step

    def step(self, action: npt.NDArray[np.int64]) -> EnvStep:
        """``send`` then ``recv``."""
        self.send(action)
        return self.recv()

    def close(self) -> None:
        """Free the environment."""
        self._env.close()


def _without_normaliser(teacher: Teacher) -> Teacher:
    """The same weights on raw observations."""
    options = {name: value for name, value in teacher.spec.network_options.items() if name != "normalise"}
    state = teacher.network.state_dict()
    kept = {name: value for name, value in state.items() if not name.startswith("normaliser.")}
    spec = dataclasses.replace(teacher.spec, network_options=options)
    return Teacher(spec, teacher.card, kept).to(teacher.device)


# Judging


def _judged(
    found: list[tuple[Cause, Returns | None, str | None]], measured: Returns, claim: Reported
) -> Iterator[Trial]:
    played = [returns for _, returns, _ in found if returns is not None]
    weights = [_likelihood(returns, claim) for returns in played]
    total = _likelihood(measured, claim) + sum(weights)
    changes = iter(holm([_p_of_change(returns, measured) for returns in played]))
    shares = iter(weight / total if total > 0 else 0.0 for weight in weights)
    for cause, returns, problem in found:
        if returns is None:
            yield Trial(cause, None, 0.0, 1.0, 0.0, problem)
        else:
            yield Trial(cause, returns, p_value(returns, claim), next(changes), next(shares))


def holm(p_values: list[float]) -> list[float]:
    """P-values after Holm's step-down correction for their number, in the order given."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _p_of_change(returns: Returns, measured: Returns) -> float:
    """Welch's test between two measurements."""
    if returns.std == 0 and measured.std == 0:
        return float(returns.mean == measured.mean)
    if min(returns.n, measured.n) < 2:
        return 1.0
    ours, theirs = ((each.mean, each.std, each.n) for each in (returns, measured))
    return float(scipy.stats.ttest_ind_from_stats(*ours, *theirs, equal_var=False).pvalue)


def _likelihood(returns: Returns, claim: Reported) -> float:
    """How well the claim's mean follows from a setting: the normal density of the difference of the means."""
    std = returns.std if claim.std is None else claim.std
    variance = returns.std**2 / returns.n + std**2 / (claim.n or GAMES_IF_UNSAID)
    error = max(math.sqrt(variance), 0.005)  # claims are rounded to two digits
    return float(scipy.stats.norm.pdf(claim.mean, returns.mean, error))
