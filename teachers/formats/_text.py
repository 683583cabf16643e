"""Text from a file, or about it, made fit for one line on a terminal."""

from __future__ import annotations


def one_line(text: str, length: int = 120) -> str:
    """At most ``length`` printable characters: no line breaks, no control sequences of somebody's making."""
    joined = " ".join(text.split("\n")).strip()
    shown = "".join(char if char.isprintable() else "?" for char in joined)
    return shown if len(shown) <= length else shown[:length] + "..."


def reason(error: Exception) -> str:
    """What an error of a library says, or at least its name."""
    return one_line(str(error)) or type(error).__name__
