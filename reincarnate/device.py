"""Device, precision, optimiser and the captured step; the only file that names torch.cuda."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from reincarnate.errors import UserError

Precision = Literal["fp32", "bf16"]
#: bfloat16 must be this much faster than float32 to be chosen; below that, exactness wins.
WORTH_BF16 = 1.15
#: Real updates before a capture: they settle cuDNN's choice of algorithm and Adam's lazy state.
WARM_UP_UPDATES = 12


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU.

    Raises:
        UserError: ``cuda`` was asked for and is not there, or the name is unknown.
    """
    available = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"no device {name!r}; use auto, cpu or cuda")
    if name == "cuda" and not available:
        raise UserError("no CUDA device is available to this PyTorch; use --device cpu or auto")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[object]:
    """Convolutions and linear layers in ``precision``; parameters, gradients and losses stay float32.

    ``fp32`` inside a bf16 region switches it off again. Enter it inside a captured function, never around
    the capture: casts cached outside would be replayed stale.
    """
    if device.type not in ("cpu", "cuda"):  # meta tensors, in tests
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def compute_dtype(device: torch.device) -> torch.dtype:
    """What convolutions and linear layers compute in just now: bfloat16 inside :func:`autocast`."""
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32


def choose_precision(device: torch.device, work: Callable[[Precision], Callable[[], None]]) -> Precision:
    """The faster precision for ``work(precision)()``, timed on this device; float32 unless bf16 clearly wins.

    Args:
        device: where the work runs.
        work: makes one update of the learner in a precision.
    """
    seconds = {precision: _fastest(work(precision), device) for precision in ("fp32", "bf16")}
    return "bf16" if seconds["fp32"] >= WORTH_BF16 * seconds["bf16"] else "fp32"


def make_adam(
    parameters: Iterable[Tensor], rate: float, eps: float, device: torch.device
) -> torch.optim.Adam:
    """Adam whose learning rate is a device tensor, so that a captured graph follows ``rate.fill_()``.

    Fused and capturable on every device (the meta device has no fused kernel).
    """
    real = device.type != "meta"
    rate_tensor = torch.tensor(rate, dtype=torch.float32, device=device)
    return torch.optim.Adam(
        list(parameters), lr=rate_tensor, eps=eps, fused=real, foreach=not real, capturable=real
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Step:
    """A function without arguments that the CPU calls and CUDA captures once and replays.

    The first :data:`WARM_UP_UPDATES` calls run it eagerly on the stream that is captured, the next one
    records it. Everything the function reads must stay where it is in memory (see docs: fixed addresses).

    Args:
        function: one whole update; reads no device value on the host.
        device: where it runs.
        generators: whose random numbers it draws.
    """

    def __init__(
        self, function: Callable[[], None], device: torch.device, generators: Sequence[torch.Generator] = ()
    ) -> None:
        self._function, self._generators = function, generators
        self._cuda = device.type == "cuda"
        self._calls = 0
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the function once."""
        if not self._cuda:
            self._function()
        elif self._graph is not None:
            self._graph.replay()
        else:
            self._warm_up()

    def _warm_up(self) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._function()
        current.wait_stream(self._stream)
        self._calls += 1
        if self._calls == WARM_UP_UPDATES:
            self._capture()

    def _capture(self) -> None:
        self._stream.synchronize()
        gc.collect()
        gc.disable()  # a collection that frees another graph would kill the capture
        try:
            graph = torch.cuda.CUDAGraph()
            for generator in self._generators:
                register = getattr(graph, "register_generator_state", None)
                if register is not None:
                    register(generator)
            with torch.cuda.graph(graph, stream=self._stream):
                self._function()  # records, computes nothing
            self._graph = graph
        finally:
            gc.enable()


def _fastest(update: Callable[[], None], device: torch.device, rounds: int = 4) -> float:
    """The shortest of some timed calls, after a warm-up; other work on the machine only makes it longer."""
    update()
    times = []
    for _ in range(rounds):
        synchronize(device)
        started = time.perf_counter()
        update()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)
