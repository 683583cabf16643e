"""Environments: a name becomes an :class:`EnvSpec`, an EnvSpec becomes N environments stepped together.

``pool.py`` alone knows EnvPool's rules, ``gym.py`` gymnasium's; both give the same complete
:class:`~reincarnate.types.EnvStep`, so that nothing above them cares which one runs.
"""

from reincarnate.envs.make import current_id, env_spec, make_env
from reincarnate.envs.presets import preset_spec
from reincarnate.envs.speed import steps_per_second

__all__ = ["current_id", "env_spec", "make_env", "preset_spec", "steps_per_second"]
