"""Numbers, clocks and foreign text as the user reads them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reincarnate.wording import clock_text, number_text, printable


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (69.84, "69.8"), (-7.0, "-7.00"), (0.0123, "0.012"), (12345.6, "12,346"), (1e-4, "0.0001")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4 s"), (59.4, "59 s"), (61, "1:01"), (11_100, "3:05:00"), (187_800, "2d 04:10")],
)
def test_clocks_are_short(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


@settings(deadline=None)  # a busy machine may take its time
@given(st.text())
def test_printable_never_holds_control_characters(text: str) -> None:
    kept = printable(text)
    assert "\x1b" not in kept
    assert all(character == "\n" or character.isprintable() or character.isspace() for character in kept)
