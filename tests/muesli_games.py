"""Two small games that a learner plays in lockstep, and the sequences that come of them."""

from __future__ import annotations

import torch
from torch import Tensor

from reincarnate.acting import ActRule
from reincarnate.losses import Support
from reincarnate.networks import build_muesli_network
from reincarnate.students.muesli import Muesli, MuesliConfig, SequenceBatch

from random_tensors import generator

SUPPORT = Support(limit=5.0, bins=21)
ACTIONS, FEATURES = 3, 4


def learner(
    core: int | None = 16, seed: int = 0, rate: float = 3e-3, device: str = "cpu", **settings
) -> Muesli:
    g = None if device == "meta" else generator(seed)
    network = build_muesli_network(
        "mlp", (FEATURES,), ACTIONS, device=device, generator=g, core=core, model=16, bins=21,
        trunk={"hidden": (16,)},
    )  # fmt: skip
    chosen = MuesliConfig(**({"discount": 0.97} | settings))
    return Muesli(network, chosen, support=SUPPORT, learning_rate=rate, generator=g)


def recall_observation(cue: Tensor, step: int, last: int) -> Tensor:
    """[N, 4]: the cue (0 or 1) one-hot at the first step alone; whether to answer now; a constant."""
    obs = torch.zeros(len(cue), FEATURES)
    if step == 0:
        obs[torch.arange(len(cue)), cue] = 1.0
    obs[:, 2], obs[:, 3] = float(step == last), 1.0
    return obs


def play_recall(student: Muesli, games: int, delay: int, g: torch.Generator) -> tuple[SequenceBatch, float]:
    """``games`` games of ``delay + 1`` steps, each a sequence; answering with the cue at the end pays 1.

    Returns the batch and the mean reward of a game.
    """
    cue = torch.randint(0, 2, (games,), generator=g)
    state = student.initial_state(games)
    start = torch.ones(games, dtype=torch.bool)
    rows: dict[str, list[Tensor]] = {"obs": [], "action": [], "policy": []}
    for step in range(delay + 2):
        obs = recall_observation(cue, min(step, delay + 1), delay)
        action, policy, state = student.play(obs, state, start if step == 0 else ~start, ActRule("sample"))
        for name, value in (("obs", obs), ("action", action), ("policy", policy)):
            rows[name].append(value)
    stacked = {name: torch.stack(values, dim=1) for name, values in rows.items()}
    flags = torch.zeros(games, delay + 2, dtype=torch.bool)
    right = (stacked["action"][:, delay] == cue).float()
    reward = torch.zeros(games, delay + 2)
    reward[:, delay] = right
    at = torch.arange(delay + 2).expand(games, -1)
    batch = SequenceBatch(
        obs=stacked["obs"],
        action=stacked["action"],
        reward=reward,
        terminal=flags | (at == delay),
        truncated=flags,
        executed=flags | (at <= delay),
        game_start=flags | (at == 0),
        behaviour_log_policy=stacked["policy"],
        state=student.initial_state(games),
    )
    return batch, right.mean().item()


def random_batch(B: int = 3, T: int = 8, seed: int = 0, core: int | None = 16) -> SequenceBatch:
    """Sequences with ends of every kind in them; the rows obey the buffer's rules."""
    g = generator(seed)
    obs = torch.randn(B, T, FEATURES, generator=g)
    terminal, truncated = torch.zeros(2, B, T, dtype=torch.bool)
    terminal[0, T // 3], truncated[1 % B, T // 2] = True, True
    ended = terminal | truncated
    executed = ~torch.cat([torch.zeros(B, 1, dtype=torch.bool), ended[:, :-1]], dim=1)
    start = torch.cat([torch.zeros(B, 1, dtype=torch.bool), ~executed[:, :-1]], dim=1)
    return SequenceBatch(
        obs=obs,
        action=torch.randint(0, ACTIONS, (B, T), generator=g),
        reward=torch.randn(B, T, generator=g) * executed,
        terminal=terminal,
        truncated=truncated,
        executed=executed,
        game_start=start,
        behaviour_log_policy=torch.log_softmax(torch.randn(B, T, ACTIONS, generator=g), dim=2),
        state=None if core is None else torch.randn(B, 2, core, generator=g),
    )
