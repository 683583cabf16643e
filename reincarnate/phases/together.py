"""What several ranks have played, as if it had been one process; of one process, what it has played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reincarnate.phases.stage import Stage
from reincarnate.rollout import Game, Outcome


@dataclass(frozen=True)
class Played:
    """One vector step of all ranks."""

    agent_steps: int  # summed over ranks
    games: Sequence[Game]  # that ended, by rank; environment i of rank r is number r * num_envs + i


def played_by_all(stage: Stage, outcome: Outcome) -> Played:
    """What every rank's environments did in the vector step in which this rank's gave ``outcome``.

    The same on every rank, so that counters, m and what follows from them are, too.
    """
    ranks, num_envs = stage.ranks, stage.config.env.num_envs
    if ranks.size == 1:
        return Played(outcome.agent_steps, outcome.games)
    mine = [float(outcome.agent_steps)]
    for game in outcome.games:
        mine += [float(game.env_id + ranks.rank * num_envs), game.raw_return]
    rows = ranks.gather_rows(mine, 1 + 2 * num_envs)
    games = [Game(int(row[i]), row[i + 1]) for row in rows for i in range(1, len(row), 2)]
    return Played(sum(int(row[0]) for row in rows), games)
