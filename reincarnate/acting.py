"""How outputs become actions: greedy, epsilon-greedy or sampled, with the behaviour's log-probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reincarnate.errors import UserError
from reincarnate.types import OutputKind


@dataclass(frozen=True)
class ActRule:
    """``greedy``, ``sample`` or ``epsilon=X``; what is recorded beside every return."""

    kind: Literal["greedy", "sample", "epsilon"]
    epsilon: float = 0.0

    def __str__(self) -> str:
        return f"epsilon={self.epsilon:g}" if self.kind == "epsilon" else self.kind


def parse_act_rule(text: str, outputs: OutputKind) -> ActRule:
    """``auto | greedy | sample | epsilon=X``; auto is epsilon=0.01 for Q-values and sample for policies.

    Raises:
        UserError: the text is none of these.
    """
    if text == "auto":
        return ActRule("epsilon", 0.01) if outputs == "q_values" else ActRule("sample")
    if text == "greedy":
        return ActRule("greedy")
    if text == "sample":
        return ActRule("sample")
    name, _, number = text.partition("=")
    try:
        epsilon = float(number)
    except ValueError:
        epsilon = -1.0
    if name != "epsilon" or not 0.0 <= epsilon <= 1.0:
        raise UserError(f"no acting rule {text!r}; use auto, greedy, sample or epsilon=X with X from 0 to 1")
    return ActRule("epsilon", epsilon)


def default_temperature(outputs: OutputKind) -> float:
    """0.1 for Q-values (Agarwal et al. 2022, appendix), 1.0 for policy logits, which are a policy already."""
    return 0.1 if outputs == "q_values" else 1.0


def distillation_temperature(teacher: OutputKind, student: OutputKind) -> float:
    """What pi_T = softmax(outputs / temperature) is taught at; lower for a student that samples.

    A Q-value teacher plays greedily. Its softmax at 0.1 is a signal for other Q-values and not a policy to be
    played: the bundled Breakout teacher, sampled so, lost a third of its return, at 0.03 nothing (8 games).
    """
    if (teacher, student) == ("q_values", "policy_logits"):
        return 0.03
    return default_temperature(teacher)


def greedy_policy_log_prob(best: Tensor, action: Tensor, epsilon: Tensor | float, num_actions: int) -> Tensor:
    """Log-probability [N] of ``action`` [N] under epsilon-greedy with greedy action ``best`` [N]."""
    return torch.log((action == best) * (1.0 - epsilon) + epsilon / num_actions)


def epsilon_greedy(
    outputs: Tensor, epsilon: Tensor | float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Action [N] int64 and its log-probability [N] float32 from outputs [N, A].

    ``epsilon`` may be a 0-d device tensor, so that a captured graph can follow a schedule.
    """
    best = outputs.argmax(dim=1)
    draws = torch.rand(best.shape, generator=generator, device=outputs.device)
    uniform = torch.randint(0, outputs.shape[1], best.shape, generator=generator, device=outputs.device)
    action = torch.where(draws < epsilon, uniform, best)
    return action, greedy_policy_log_prob(best, action, epsilon, outputs.shape[1])


def sample(outputs: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Action [N] and log-probability [N] from softmax(outputs / temperature), by the Gumbel-max trick."""
    log_policy = torch.log_softmax(outputs.float() / temperature, dim=1)
    noise = torch.empty_like(log_policy).exponential_(generator=generator)
    action = (log_policy - noise.log()).argmax(dim=1)
    return action, log_policy.gather(1, action[:, None])[:, 0]


def act(
    outputs: Tensor, rule: ActRule, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Apply ``rule`` to outputs [N, A]: action [N] int64, behaviour log-probability [N] float32."""
    if rule.kind == "sample":
        return sample(outputs, temperature, generator)
    return epsilon_greedy(outputs, rule.epsilon if rule.kind == "epsilon" else 0.0, generator)


def behaviour_log_policy(outputs: Tensor, epsilon: Tensor, kind: OutputKind, temperature: float) -> Tensor:
    """Log-policy [n, A] of what acted, from raw outputs [n, A] and the epsilon [n] that it explored with.

    Policy logits were sampled at ``temperature``, Q-values played epsilon-greedily. Actions that a greedy
    policy never takes get 1e-12 instead of 0, whose logarithm nothing could be computed with.
    """
    if kind == "policy_logits":
        return torch.log_softmax(outputs.float() / temperature, dim=1)
    num_actions = outputs.shape[1]
    every = torch.arange(num_actions, device=outputs.device)
    best = (outputs.argmax(dim=1, keepdim=True) == every).float()
    share = epsilon[:, None]
    return ((1.0 - share) * best + share / num_actions).clamp_min(1e-12).log()
