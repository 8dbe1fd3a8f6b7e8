"""Sizes as text: exact round trips, clear refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucxkv.errors import UsageError
from ucxkv.sizes import format_size, parse_size, short_size


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_formatted_size_parses_back_to_itself(size: int) -> None:
    """Goal: no rounding. Method: round trip of arbitrary sizes."""
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1GiB", 1 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("10MB", 10**7),
        (" 64KiB ", 64 << 10),
        ("1_000", 1000),
    ],
)
def test_sizes_mean_what_their_units_say(text: str, size: int) -> None:
    """Goal: MiB is 2^20 and MB is 10^6. Method: a table of texts and bytes."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "1G", "-1", "1.3B", "0x10", "one", "1 GiB GiB", "1.GiB", "nan"])
def test_what_is_no_size_is_refused_with_its_text(text: str) -> None:
    """Goal: no guess. Method: each bad text raises UsageError that quotes it."""
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value) or text in str(caught.value)


def test_a_short_size_has_three_digits() -> None:
    """Goal: readable tables. Method: examples around the borders of the units."""
    assert [short_size(n) for n in (0, 999, 1024, 1536 << 20, 180 << 20)] == [
        "0 B",
        "999 B",
        "1 KiB",
        "1.5 GiB",
        "180 MiB",
    ]
