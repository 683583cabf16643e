"""Numbers, times and other people's text as a terminal or a log shows them."""

from __future__ import annotations

import unicodedata


def number_text(value: float) -> str:
    """About three digits, never an exponent a reader must decode where it can be avoided."""
    size = abs(value)
    if size >= 1_000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 or value == 0 else f"{value:.2g}"


def clock_text(seconds: float) -> str:
    """``0.4 s``, ``42 s``, ``12:30``, ``3:05:00``, ``2d 04:10``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 and isinstance(seconds, float) else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{hours // 24}d {hours % 24:02d}:{minutes:02d}"


def printable(text: str) -> str:
    """Without control characters, but for line ends: names out of other people's files land on a terminal."""
    kept = text.replace("\t", " ")
    return "".join(c for c in kept if c == "\n" or not unicodedata.category(c).startswith("C"))


def encodable(text: str) -> str:
    """With a backslash in place of the lone surrogates by which Python reads paths that are no UTF-8."""
    return text.encode(errors="backslashreplace").decode()
