"""Device, precision and what runs asynchronously; the only file that names torch.cuda."""

from __future__ import annotations

import contextlib
from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[object]:
    """Convolutions and linear layers in ``precision``; parameters, gradients and losses stay float32.

    ``fp32`` inside a bf16 region switches it off again. Enter it inside a captured function, never around
    the capture: casts cached outside would be replayed stale.
    """
    if device.type not in ("cpu", "cuda"):  # meta tensors, in tests
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
