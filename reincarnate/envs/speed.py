"""How fast a game runs for people: agent steps per second of its own clock."""

from __future__ import annotations

from fractions import Fraction

from reincarnate.envs import gym
from reincarnate.errors import UserError
from reincarnate.types import EnvSpec

ATARI_FRAMES_PER_SECOND = 60
#: Where an environment does not say.
USUAL_STEPS_PER_SECOND = 30
#: EnvPool's environments that gymnasium may be unable to make (it wants Box2D), by name without version.
_KNOWN = {"LunarLander": 50}


def steps_per_second(spec: EnvSpec) -> Fraction:
    """Agent steps per second at true speed: 60 frames / frame skip for Atari, else what gymnasium's
    environment of that name says (``render_fps``).
    """
    if spec.kind == "atari":
        return Fraction(ATARI_FRAMES_PER_SECOND, spec.frame_skip)
    name = spec.env_id.rpartition("/")[2]
    usual = _KNOWN.get(name.partition("-v")[0], USUAL_STEPS_PER_SECOND)
    try:
        said = gym.metadata(name).get("render_fps") or usual
    except UserError:
        said = usual
    return Fraction(said).limit_denominator(1000)
