"""Device, precision, optimiser and the captured step; the only file that names torch.cuda."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from reincarnate.errors import UserError

Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
#: bfloat16 must be this much faster than float32 to be chosen; below that, exactness wins.
WORTH_BF16 = 1.15
#: Real updates before a capture: they settle cuDNN's choice of algorithm and Adam's lazy state.
WARM_UP_UPDATES = 12
#: Rounds of timing to choose a precision, fewer when they take longer than this.
TIMED_ROUNDS, TIMING_SECONDS = 6, 3.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def has_cuda() -> bool:
    """Whether this PyTorch can use a CUDA device."""
    return torch.cuda.is_available()


def pick_device(name: str, index: int | None = None) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU.

    ``index``: which of the CUDA devices; it becomes the process's own. None: the usual one.

    Raises:
        UserError: ``cuda`` was asked for and is not there, or the name is unknown.
    """
    available = has_cuda()
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"no device {name!r}; use auto, cpu or cuda")
    if name == "cuda" and not available:
        raise UserError("no CUDA device is available to this PyTorch; use --device cpu or auto")
    if available and name != "cpu" and index is not None:
        return _own_device(index)
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _own_device(index: int) -> torch.device:
    count = torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"process {index} on this machine needs CUDA device {index}, and there are {count}; "
            "start one process per device"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def visible_gpus() -> tuple[str, ...]:
    """The GPUs of this process as CUDA_VISIBLE_DEVICES names them; none of them is touched."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return tuple(str(number) for number in range(torch.cuda.device_count()))
    return tuple(name.strip() for name in told.split(",") if name.strip() not in ("", "-1"))


def tune(device: torch.device) -> None:
    """Settings of the whole process that make updates faster; call it once, before networks are built.

    Freed memory is kept: of updates on the CPU, of batches that are gathered there for CUDA. On CUDA, TF32
    in float32 products, and cuDNN tries its algorithms.
    """
    _keep_freed_memory()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[object]:
    """Convolutions and linear layers in ``precision``; parameters, gradients and losses stay float32.

    ``fp32`` inside a bf16 region switches it off again. Enter it inside a captured function, never around
    the capture: casts cached outside would be replayed stale.
    """
    if device.type not in ("cpu", "cuda"):  # meta tensors, in tests
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextlib.contextmanager
def beside_environments(device: torch.device) -> Iterator[None]:
    """On the CPU, half of PyTorch's threads, while environments step on the other cores.

    All of them would wait for the one whose core an environment has just taken.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compute_dtype(device: torch.device) -> torch.dtype:
    """What convolutions and linear layers compute in just now: bfloat16 inside :func:`autocast`."""
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32


def choose_precision(device: torch.device, work: Callable[[Precision], Callable[[], None]]) -> Precision:
    """The faster precision for ``work(precision)()``, timed on this device; float32 unless bf16 clearly wins.

    Where the device has no room for one learner of each, it is bfloat16, which takes less.

    Args:
        device: where the work runs.
        work: makes one update of the learner in a precision, a :class:`Step` where the device captures.
    """
    try:
        seconds = _fastest({precision: work(precision) for precision in PRECISIONS}, device)
    except torch.cuda.OutOfMemoryError:
        return "bf16"
    return "bf16" if seconds["fp32"] >= WORTH_BF16 * seconds["bf16"] else "fp32"


def make_adam(
    parameters: Iterable[Tensor], rate: float, eps: float, device: torch.device
) -> torch.optim.Adam:
    """Fused Adam; its learning rate is a device tensor, so that a captured graph follows ``fill_()``."""
    rate_tensor = torch.tensor(rate, dtype=torch.float32, device=device)
    return torch.optim.Adam(list(parameters), lr=rate_tensor, eps=eps, fused=True, capturable=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Event(Protocol):
    """A point in a queue."""

    def synchronize(self) -> None:
        """Wait on the host until the queue has reached it."""


class Queue(Protocol):
    """Work that a device does in order; work of two queues overlaps unless one waits for the other."""

    def run(self, work: Callable[[], object]) -> None:
        """Append what ``work`` asks the device to do."""

    def record(self) -> Event:
        """A point after all work so far."""

    def wait(self, event: Event) -> None:
        """Let later work begin only when the other queue has reached ``event``; the host does not wait."""


def learner_queue(device: torch.device) -> Queue:
    """Where the learner's work goes: the stream that is current when something is appended."""
    return _CudaQueue(None) if device.type == "cuda" else _HostQueue()


def copy_queue(device: torch.device) -> Queue:
    """A queue for copies that overlap with the learner's work."""
    if device.type != "cuda":
        return _HostQueue()
    return _CudaQueue(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def host_memory(size_bytes: int, device: torch.device) -> Tensor:
    """Zeros [size_bytes] uint8 on the host, from which ``device`` copies without waiting (pinned on CUDA)."""
    return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class _HostQueue:
    """The CPU does at once what it is asked to do."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> Event:
        return _Reached()

    def wait(self, event: Event) -> None:
        return None


class _Reached:
    def synchronize(self) -> None:
        return None


class _CudaQueue:
    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._own = stream

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream()

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)  # type: ignore[arg-type]


class Step:
    """A function without arguments that the CPU calls and CUDA captures once and replays.

    The first :data:`WARM_UP_UPDATES` calls run it eagerly on the stream that is captured; then it is
    recorded, which computes nothing, and every later call replays it. So each call is one run of the
    function, and what it reads must stay where it is in memory.

    Args:
        function: one whole update; reads no device value on the host.
        device: where it runs.
        generators: whose random numbers it draws.
        in_pieces: the function calls :func:`beside_capture`.
    """

    def __init__(
        self,
        function: Callable[[], object],
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
        in_pieces: bool = False,
    ) -> None:
        self._function, self._generators = function, generators
        self._cuda, self._in_pieces = device.type == "cuda", in_pieces
        self._calls = 0
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pieces: list[Callable[[], object]] = []  # what a replay calls, in order

    def __call__(self) -> None:
        """Run the function once."""
        if not self._cuda:
            self._function()
        elif self._pieces:
            for piece in self._pieces:
                piece()
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
            recording = _Recording(self._stream, self._generators, self._in_pieces)
            with recording:
                self._function()  # records, computes nothing
            self._pieces = recording.pieces
        finally:
            gc.enable()


class _Recording:
    """A capture: graphs, and between them what :func:`beside_capture` was given.

    The graphs share one pool of memory: they are replayed in the order in which they were captured, and what
    one leaves for the next (gradients, say) is still referred to when the next is captured.
    """

    def __init__(
        self, stream: torch.cuda.Stream, generators: Sequence[torch.Generator], in_pieces: bool
    ) -> None:
        self._stream, self._generators, self._in_pieces = stream, generators, in_pieces
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.pieces: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        global _recording
        self._begin()
        _recording = self if self._in_pieces else None

    def __exit__(self, *error: Any) -> None:
        global _recording
        _recording = None
        self._context.__exit__(*error)

    def beside(self, work: Callable[[], object]) -> None:
        """End a graph, leave ``work`` for the replays, and begin another graph."""
        self._context.__exit__(None, None, None)
        self.pieces.append(work)
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            register = getattr(graph, "register_generator_state", None)
            if register is not None:
                register(generator)
        # A collective before has a thread that looks at its events: that must not break the capture.
        more: dict[str, Any] = {"capture_error_mode": "thread_local"} if self._in_pieces else {}
        if self._graphs:
            more["pool"] = self._graphs[0].pool()
        self._context = torch.cuda.graph(graph, stream=self._stream, **more)
        self._context.__enter__()
        self._graphs.append(graph)
        self.pieces.append(graph.replay)


def warm_up(work: Callable[[], object], device: torch.device) -> None:
    """Call ``work``, a :class:`Step` or what one would run, until a call is as fast as later ones."""
    for _ in range(WARM_UP_UPDATES + 1 if device.type == "cuda" else 1):
        work()


_recording: _Recording | None = None  # the capture in pieces that is going on


def beside_capture(work: Callable[[], object]) -> None:
    """Do ``work`` now; while a :class:`Step` is captured, leave it out and do it here at every replay.

    ``work`` is called on the host between two graphs, so what it appends to the current stream comes after
    the one and before the other. It has to work at the same addresses every time.
    """
    if _recording is None:
        work()
    else:
        _recording.beside(work)


def _fastest(steps: dict[Precision, Callable[[], None]], device: torch.device) -> dict[Precision, float]:
    """Seconds of each step's shortest call, taken in turns: other work on the machine only adds to it."""
    for step in steps.values():
        warm_up(step, device)
    shortest = dict.fromkeys(steps, math.inf)
    began = time.perf_counter()
    for _ in range(TIMED_ROUNDS):
        for precision, step in steps.items():
            shortest[precision] = min(shortest[precision], _seconds(step, device))
        if time.perf_counter() - began >= TIMING_SECONDS:
            break
    return shortest


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - started


def _keep_freed_memory() -> None:
    """Tell glibc's malloc to keep what is freed.

    It hands big blocks back to the kernel at every free, so each update's activations (14 MB the largest,
    at IMPALA and batch 32) are mapped and zeroed anew: 5,000 page faults, a sixth of the update's time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it accepts
    mallopt(_M_TRIM_THRESHOLD, -1)
