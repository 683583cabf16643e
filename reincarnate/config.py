"""Everything a run can be told: nested frozen dataclasses, four presets, JSON round trip.

``RunConfig`` is what ``config.json`` holds. ``preset()`` gives the tables of docs/qdagger.md;
``override()`` applies ``--set part.field=value`` and refuses unknown names with the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from reincarnate.config_muesli import MUESLI_ENVIRONMENT, MUESLI_PRESETS, MuesliConfig
from reincarnate.config_presets import ENVIRONMENT, EXPLORATION, PRESET_SETTINGS
from reincarnate.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class EnvConfig:
    """Environments. None keeps what the teacher's EnvSpec says (or EnvSpec's default without a teacher)."""

    id: str | None = None
    backend: Literal["envpool", "gymnasium"] = "envpool"
    num_envs: int = 16
    preset: Literal["machado"] | None = None  # of an Atari game without a teacher; what is set below wins
    image_size: int | None = None  # pixels of a side, of an Atari game without a teacher
    sticky_probability: float | None = None  # 0..1
    episodic_life: bool | None = None
    reward_clip: bool | None = None
    full_action_set: bool | None = None
    noop_max: int | None = None
    fire_reset: bool | None = None
    max_agent_steps: int | None = None  # per game


@dataclass(frozen=True)
class EvaluateConfig:
    """Whole games on the raw score, never cut short."""

    games: int = 30
    teacher_act: str = "auto"  # auto | greedy | sample | epsilon=X
    student_act: str = "auto"


@dataclass(frozen=True)
class CollectConfig:
    """Teacher rollouts into D_T."""

    agent_steps: int = 500_000
    epsilon_start: float = 0.05  # of a Q-value teacher; a policy teacher samples
    epsilon_end: float = 0.05
    epsilon_decay_agent_steps: int = 1
    teacher_data: str | None = None  # a D_T: a folder, or owner/name[@revision] on the Hub; collects nothing


@dataclass(frozen=True)
class OfflineConfig:
    """Training on D_T alone, at m = 1."""

    updates: int = 500_000
    target_update_every_updates: int = 2_000
    evaluations: int = 10  # evaluation and snapshot, evenly spaced, the last one at the end


@dataclass(frozen=True)
class OnlineConfig:
    """Training on D_S alone, with the annealed m."""

    agent_steps: int = 10_000_000
    learning_starts_agent_steps: int = 20_000
    replay_capacity_agent_steps: int = 1_000_000
    agent_steps_per_update: int = 4
    epsilon_start: float = 0.01
    epsilon_end: float = 0.01
    epsilon_decay_agent_steps: int = 1
    target_update_every_agent_steps: int = 8_000
    evaluations: int = 10


@dataclass(frozen=True)
class TdConfig:
    """Temporal-difference loss."""

    n_step: int = 3
    loss: Literal["huber", "mse"] = "huber"
    discount: float = 0.99
    double_q: bool = False


@dataclass(frozen=True)
class DistillConfig:
    """lambda_0 * m * KL(pi_T || pi_S), pi = softmax(outputs / temperature)."""

    coefficient: float = 3.0  # lambda_0
    student_temperature: float = 0.1
    teacher_temperature: float | None = (
        None  # None: 0.1 for Q-values (0.03 to a student that samples), 1 for logits
    )
    window_games: int = 20  # K, the games behind G_student
    stop_fraction: float = 0.6  # t0 as a fraction of the online phase; m is 0 from there on


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam. The learning rate is m * learning_rate + (1 - m) * learning_rate_final."""

    batch_size: int = 32
    learning_rate: float = 1e-4
    learning_rate_final: float = 1e-5
    adam_eps: float = 1.5e-4
    # m: as above. linear: from learning_rate to learning_rate_final over the updates of the whole run.
    schedule: Literal["m", "linear"] = "m"


@dataclass(frozen=True)
class SystemConfig:
    """The machine, not the method."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    buffer: Literal["auto", "ram", "cuda", "disk"] = "auto"
    compress: Literal["none", "lz4", "zlib"] = "none"  # of frames in memory, without loss
    checkpoint_every_seconds: float = 300.0


@dataclass(frozen=True)
class RunConfig:
    """One run, complete."""

    teacher: str | None = None  # a reference; None for a scratch student
    student: str = "qdagger-dqn"
    #: ``auto``: impala for images, mlp for vectors; ``light``: nature for images, mlp for vectors.
    network: Literal["auto", "light", "nature", "impala", "mlp"] = "auto"
    preset: str = "default"
    seed: int = 1
    #: Of G_T, G_random and D_T, which runs with the same one share through the cache; None: the run's own.
    teacher_seed: int | None = None
    env: EnvConfig = field(default_factory=EnvConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    td: TdConfig = field(default_factory=TdConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    muesli: MuesliConfig = field(default_factory=MuesliConfig)
    system: SystemConfig = field(default_factory=SystemConfig)

    def __post_init__(self) -> None:
        _validate(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, nested by part."""
        return dataclasses.asdict(self)

    @property
    def seed_of_teacher(self) -> int:
        """What the teacher's part (G_T, G_random, D_T) is seeded with."""
        return self.seed if self.teacher_seed is None else self.teacher_seed

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Inverse of :meth:`to_dict`; unknown names raise UserError."""
        return _build(cls, values, prefix="")


PRESETS: tuple[str, ...] = tuple(PRESET_SETTINGS)


def preset(
    name: str, *, scratch: bool = False, explores: bool | None = None, student: str | None = None
) -> RunConfig:
    """The named preset.

    Args:
        name: one of :data:`PRESETS`.
        scratch: there is no teacher, whose environment would win.
        explores: the student starts from nothing, so its exploration starts at random; as ``scratch`` unless
            given (a scratch student beside a teacher that it is compared with).
        student: whose settings the preset has; ``muesli`` and ``qdagger-muesli`` have some of their own.

    Raises:
        UserError: no preset of that name.
    """
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}{_nearest(name, PRESETS)}; known: {', '.join(PRESETS)}")
    explore = EXPLORATION[name] if (scratch if explores is None else explores) else {}
    environment = ENVIRONMENT.get(name, {}) if scratch else {}
    presets = MUESLI_PRESETS.get(student or "")
    if presets is not None and name not in presets:
        raise UserError(f"student {student!r} has no preset {name!r}; it has {', '.join(presets)}")
    own = dict(presets[name]) if presets is not None else {}
    if scratch and presets is not None:
        own |= MUESLI_ENVIRONMENT.get(name, {})
    return override(RunConfig(preset=name), PRESET_SETTINGS[name] | explore | environment | own)


def override(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Replace dotted fields, e.g. ``{"optimizer.batch_size": 64}``; text is parsed to the field's type.

    Raises:
        UserError: unknown name (with the nearest known one) or a value of the wrong type or range.
    """
    nested = config.to_dict()
    for name, value in values.items():
        part, _, leaf = name.rpartition(".")
        known = field_names()
        if name not in known:
            raise UserError(
                f"no setting {name!r}{_nearest(name, known)}; `reincarnate run --help` lists them"
            )
        target = nested[part] if part else nested
        target[leaf] = _parse(name, value, known[name])
    return RunConfig.from_dict(nested)


def field_names() -> dict[str, Any]:
    """Every dotted setting with its type."""
    names: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(annotation):
            hints = typing.get_type_hints(annotation)
            names.update({f"{name}.{leaf}": hint for leaf, hint in hints.items()})
        else:
            names[name] = annotation
    return names


def _build(cls: type[T], values: Mapping[str, Any], prefix: str) -> T:
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"no setting {prefix + name!r}{_nearest(name, hints)}")
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise UserError(f"{prefix}{name} holds settings of its own, not {value!r}")
            arguments[name] = _build(typing.cast("type[Any]", hint), value, f"{prefix}{name}.")
        else:
            arguments[name] = _parse(prefix + name, value, hint)
    return cls(**arguments)


def _parse(name: str, value: Any, hint: Any) -> Any:
    """Value of the hinted type, from text or from JSON."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        if value not in options:
            raise UserError(f"{name} must be one of {', '.join(options)}, got {value!r}")
        return value
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # "X | None"
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return _parse(name, value, next(option for option in options if option is not types.NoneType))
    try:
        parsed = _scalar(value, hint)
    except (ValueError, TypeError, KeyError, OverflowError):
        finite = " (a finite number that float32 can hold)" if hint is float else ""
        raise UserError(f"{name} takes a value of type {hint.__name__}{finite}, got {value!r}") from None
    if hint is int and abs(parsed) > _LARGEST:
        raise UserError(f"{name} must be at most {_LARGEST}, got {value!r}")
    return parsed


#: Smallest normal and largest number of what networks, losses and optimisers compute in.
_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
_LARGEST = 10**15  # of whole numbers: exact as a float, and counts of it still fit where they are stored
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _scalar(value: Any, hint: type) -> Any:
    if hint is bool:
        if isinstance(value, str):
            return _BOOLEANS[value.lower()]
        if not isinstance(value, bool):
            raise ValueError
        return value
    if hint is int:
        if isinstance(value, bool):
            raise ValueError
        number = float(str(value).replace("_", ""))  # accepts 500_000 and 1e6
        if number != int(number):
            raise ValueError
        return int(number)
    if hint is float:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if number and not _FLOAT32[0] <= abs(number) <= _FLOAT32[1]:  # nan fits nowhere
            raise ValueError
        return number
    if not isinstance(value, str):
        raise ValueError
    return value


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not close:  # the right leaf in the wrong part, or without any
        leaf = name.rpartition(".")[2]
        close = [full for full in names if full.rpartition(".")[2] == leaf][:1]
    return f" (did you mean {close[0]!r}?)" if close else ""


_POSITIVE = (
    "collect.agent_steps",
    "env.num_envs",
    "evaluate.games",
    "offline.target_update_every_updates",
    "online.replay_capacity_agent_steps",
    "online.agent_steps_per_update",
    "online.target_update_every_agent_steps",
    "td.n_step",
    "distill.student_temperature",
    "distill.window_games",
    "optimizer.batch_size",
    "optimizer.adam_eps",
    "system.checkpoint_every_seconds",
    "collect.epsilon_decay_agent_steps",
    "online.epsilon_decay_agent_steps",
)
_NOT_NEGATIVE = (
    "offline.updates",
    "offline.evaluations",
    "online.agent_steps",
    "online.learning_starts_agent_steps",
    "online.evaluations",
    "distill.coefficient",
    "optimizer.learning_rate",
    "optimizer.learning_rate_final",
    "seed",
)
_UNIT = (
    "collect.epsilon_start",
    "collect.epsilon_end",
    "online.epsilon_start",
    "online.epsilon_end",
    "td.discount",
    "distill.stop_fraction",
    "env.sticky_probability",
)
_POSITIVE_OR_NONE = (
    "distill.teacher_temperature",
    "env.image_size",
    "env.noop_max",
    "env.max_agent_steps",
)
_NOT_NEGATIVE_OR_NONE = ("teacher_seed",)
#: What is held at once, in memory that nothing else checks.
_AT_MOST = {"env.num_envs": 65_536, "optimizer.batch_size": 1_048_576}


def _validate(config: RunConfig) -> None:
    def value(name: str) -> Any:
        part, _, leaf = name.rpartition(".")
        return getattr(getattr(config, part) if part else config, leaf)

    rules: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
        (_POSITIVE, lambda x: x > 0, "greater than 0"),
        (_POSITIVE_OR_NONE, lambda x: x is None or x > 0, "greater than 0"),
        (_NOT_NEGATIVE, lambda x: x >= 0, "0 or more"),
        (_NOT_NEGATIVE_OR_NONE, lambda x: x is None or x >= 0, "0 or more"),
        (_UNIT, lambda x: x is None or 0 <= x <= 1, "between 0 and 1"),
    )
    for names, holds, words in rules:
        for name in names:
            if not holds(value(name)):
                raise UserError(f"{name} must be {words}, got {value(name)!r}")
    for name, most in _AT_MOST.items():
        if value(name) > most:
            raise UserError(f"{name} must be at most {most}, got {value(name)!r}")
