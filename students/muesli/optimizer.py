"""Adam with decoupled weight decay whose step, not whose gradient, is clipped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class ClippedAdam:
    """``theta <- theta - lr (clip(m_hat / (sqrt(v_hat) + eps), -max_update, max_update) + decay theta)``.

    What agents of the paper's group use in place of a bound on the gradient's norm (second-hand). Adam's
    own step can be three times the learning rate when gradients are rare; here never above one. All state
    is in tensors that are changed in place, the learning rate too, so a captured update follows.

    Args:
        parameters: all in float32, on one device.
        rate: learning rate.
        eps: added to the root of the second moment.
        weight_decay: decoupled (Loshchilov and Hutter 2019).
        max_update: inf is AdamW.
        betas: decays of the moments.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        rate: float,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_update: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self.parameters = list(parameters)
        self._eps, self._decay, self._clip, self._betas = eps, weight_decay, max_update, betas
        device = self.parameters[0].device
        self.rate = torch.full((), rate, device=device)
        self._missing = torch.ones(2, dtype=torch.float64, device=device)  # beta^updates, of each moment
        self._beta_tensor = torch.tensor(betas, dtype=torch.float64, device=device)
        self._first = [torch.zeros_like(p) for p in self.parameters]
        self._second = [torch.zeros_like(p) for p in self.parameters]

    def zero_grad(self) -> None:
        """Gradients are made anew by the next backward pass."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step; a parameter without a gradient (of an ablated head) keeps its value."""
        rows = [
            (p, p.grad, m, v)
            for p, m, v in zip(self.parameters, self._first, self._second, strict=True)
            if p.grad is not None
        ]
        self._missing.mul_(self._beta_tensor)
        scale = (1.0 - self._missing).float()
        values, gradients, first, second = (list(column) for column in zip(*rows, strict=True))
        torch._foreach_lerp_(first, gradients, 1.0 - self._betas[0])
        torch._foreach_mul_(second, self._betas[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - self._betas[1])
        root = torch._foreach_sqrt(torch._foreach_div(second, scale[1]))
        torch._foreach_add_(root, self._eps)
        update = torch._foreach_div(torch._foreach_div(first, scale[0]), root)
        torch._foreach_clamp_min_(update, -self._clip)
        torch._foreach_clamp_max_(update, self._clip)
        if self._decay:
            torch._foreach_add_(update, values, alpha=self._decay)
        torch._foreach_mul_(update, self.rate)
        torch._foreach_sub_(values, update)

    def state_dict(self) -> dict[str, Any]:
        """Moments and counts; the settings are not among them."""
        return {"first": self._first, "second": self._second, "missing": self._missing, "rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`, in place."""
        for mine, theirs in ((self._first, state["first"]), (self._second, state["second"])):
            for ours, value in zip(mine, theirs, strict=True):
                ours.copy_(value)
        self._missing.copy_(state["missing"])
        self.rate.copy_(state["rate"])
