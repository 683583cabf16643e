"""Atari settings that go by a name, for runs without a teacher, whose environment would win."""

from __future__ import annotations

from typing import Any, Literal

from reincarnate.envs.make import env_spec
from reincarnate.types import EnvSpec

PresetName = Literal["machado"]

#: Machado et al. 2018 (arXiv 1709.06009), sections 3 and 5: sticky actions, all 18 actions, no signal when
#: a life is lost; with 96x96 images and games of 30 minutes (27,000 agent steps), as results of Muesli are
#: given in. No no-ops: ``noop_max=1`` is EnvPool's least (0 ends its process). Rewards are not clipped.
MACHADO: dict[str, Any] = {
    "sticky_probability": 0.25,
    "full_action_set": True,
    "episodic_life": False,
    "reward_clip": False,
    "noop_max": 1,
    "fire_reset": False,
    "max_agent_steps": 27_000,
}
_PRESETS: dict[PresetName, dict[str, Any]] = {"machado": MACHADO}
_IMAGE_SIZES: dict[PresetName, int] = {"machado": 96}


def preset_spec(env_id: str, preset: PresetName | None, image_size: int | None, **changes: Any) -> EnvSpec:
    """The EnvSpec of a named environment under a preset; nothing of it applies to vector observations.

    Args:
        env_id: any name that :func:`reincarnate.envs.env_spec` knows.
        preset: None keeps the environment's own settings.
        image_size: pixels of a side; None is the preset's.
        **changes: fields of EnvSpec that win over the preset.

    Raises:
        UserError: what :func:`reincarnate.envs.env_spec` refuses.
    """
    real = env_spec(env_id)
    if real.kind == "vector":
        return env_spec(env_id, **changes)
    settings = dict(_PRESETS[preset]) if preset else {}
    side = image_size or (_IMAGE_SIZES[preset] if preset else None)
    shape = {"obs_shape": (real.frame_stack, side, side)} if side else {}
    return env_spec(env_id, **(settings | shape | changes))
