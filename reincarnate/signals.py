"""Ctrl-C and its like as a request to stop, which work heeds at its next safe point."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def stopping_on_signals(
    stop: threading.Event,
    again: Callable[[], None] = lambda: None,
    names: Sequence[str] = ("SIGINT", "SIGTERM"),
) -> Iterator[None]:
    """The first of the signals sets ``stop``; each further one calls ``again``, which may raise.

    Signals that this system does not have are left out; outside the main thread nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, frame: Any) -> None:
        if stop.is_set():
            again()
        stop.set()

    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    previous = {number: signal.signal(number, request) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
