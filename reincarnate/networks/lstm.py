"""An LSTM whose state is one tensor and whose games may end inside a sequence."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Lstm(nn.Module):
    """One LSTM layer (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).

    Parameters are named and ordered as those of ``torch.nn.LSTMCell`` (gates i, f, g, o), with one bias
    instead of two: ``weight_ih`` [4 units, inputs], ``weight_hh`` [4 units, units], ``bias`` [4 units].
    A cell, not ``nn.LSTM``: the state is set to zero in the middle of a sequence, the model starts from a
    state of its own, and all actions share one product.

    The state is one tensor [N, 2, units]: hidden, then cell, so that a buffer stores it as one column.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.weight_ih = nn.Parameter(torch.empty(4 * units, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * units, units))
        self.bias = nn.Parameter(torch.empty(4 * units))

    def initialise(self, generator: torch.Generator | None) -> None:
        """U(-1/sqrt(units), 1/sqrt(units)) as PyTorch, but 1 for the forget gate's bias.

        A gate that starts open remembers; one that starts half closed forgets in a few steps (Jozefowicz
        et al. 2015). DeepMind's LSTMs add the same 1.
        """
        bound = 1.0 / math.sqrt(self.units)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
        nn.init.ones_(self.bias[self.units : 2 * self.units])

    def initial_state(self, size: int) -> Tensor:
        """[size, 2, units] zeros: what every game begins with."""
        return self.bias.new_zeros((size, 2, self.units))

    def read(self, inputs: Tensor) -> Tensor:
        """What inputs [..., inputs] add to the gates, [..., 4 units]; for a whole sequence at once."""
        return nn.functional.linear(inputs, self.weight_ih, self.bias)

    def recall(self, hidden: Tensor) -> Tensor:
        """What the hidden state [..., units] adds to the gates, [..., 4 units]."""
        return nn.functional.linear(hidden, self.weight_hh)

    def forward(self, read: Tensor, state: Tensor) -> Tensor:
        """One step: gates' inputs [N, 4 units] of :meth:`read`, state [N, 2, units] -> the next state."""
        hidden, cell = state.unbind(dim=1)
        return torch.stack(cell_step(read + self.recall(hidden), cell), dim=1)

    def sequence(self, inputs: Tensor, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """T steps; the state is zero before every step at which a game begins.

        Args:
            inputs: [B, T, inputs].
            state: [B, 2, units] before the first step.
            first: [B, T] bool.

        Returns:
            Hidden states [B, T, units] and the last state [B, 2, units].
        """
        reads = self.read(inputs).unbind(dim=1)
        kept = (~first).to(state.dtype)[:, :, None, None].unbind(dim=1)
        outputs = []
        for read, keep in zip(reads, kept, strict=True):
            state = self(read, state * keep)
            outputs.append(state[:, 0])
        return torch.stack(outputs, dim=1), state


def cell_step(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden and cell [..., units] after gates [..., 4 units]; ``cell`` may broadcast."""
    into, forget, candidate, out = gates.chunk(4, dim=-1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(candidate)
    return torch.sigmoid(out) * torch.tanh(cell), cell
