"""The running scale of the advantage: one number that makes losses independent of the rewards' scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reincarnate.losses.shapes import require


@dataclass(frozen=True)
class AdvantageMoment:
    """Second moment and mean of ``G - v`` as 0-d float64 tensors that are only ever changed in place.

    A captured update reads and writes them where they are. In float64 a reward of 1e30 has a square.
    """

    value: Tensor  # 0-d, the decayed sum, 0 at first
    product: Tensor  # 0-d, decay^updates, 1 at first: what the sums still lack
    mean: Tensor  # 0-d, the decayed sum of the error itself, 0 at first

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> AdvantageMoment:
        """The state before the first update."""
        return cls(
            torch.zeros((), dtype=torch.float64, device=device),
            torch.ones((), dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {"value": self.value, "product": self.product, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Inverse of :meth:`state_dict`, in place."""
        self.value.copy_(state["value"])
        self.product.copy_(state["product"])
        self.mean.copy_(state["mean"])


@torch.no_grad()
def update_moment(moment: AdvantageMoment, error: Tensor, valid: Tensor, decay: float) -> None:
    """``var <- beta var + (1 - beta) mean(error^2)`` over valid entries, in place; ``prod <- beta prod``.

    The mean is not subtracted: it is ``E[(G - v)^2]`` (Hessel et al. 2021, section 4.5); it is followed
    beside it. A batch without a valid entry changes nothing.

    Args:
        moment: changed in place.
        error: [...] ``G - v``.
        valid: [...] bool.
        decay: beta.

    Raises:
        ValueError: shapes that do not agree.
    """
    require("valid", valid, tuple(error.shape))
    squares = torch.where(valid, error.double().square(), 0.0)
    count = valid.sum()
    mean = squares.sum() / count.clamp(min=1)
    rate = (1.0 - decay) * (count > 0).double()
    moment.value.lerp_(mean, rate)
    moment.mean.lerp_(torch.where(valid, error.double(), 0.0).sum() / count.clamp(min=1), rate)
    moment.product.mul_(1.0 - rate)


@torch.no_grad()
def advantage_scale(moment: AdvantageMoment, eps: float = 1e-12) -> Tensor:
    """``sigma = sqrt(var / (1 - prod) + eps)``, 0-d float32; update the moment first.

    The division corrects the start at 0, as Adam's does. 1 as long as there is no data.

    ``eps`` does not protect a game whose rewards are all 0: G - v is then the noise of the network, sigma
    is as small, and advantages reach the clip. Watch sigma.
    """
    missing = 1.0 - moment.product
    corrected = torch.where(missing > 0, moment.value / missing.clamp(min=1e-300), 1.0)
    return torch.sqrt(corrected + eps).float()


@torch.no_grad()
def advantage_centre(moment: AdvantageMoment) -> Tensor:
    """The running, bias-corrected mean of ``G - v``, 0-d float32: how far the critic lags behind its returns.

    0 as long as there is no data.
    """
    missing = 1.0 - moment.product
    return torch.where(missing > 0, moment.mean / missing.clamp(min=1e-300), 0.0).float()
