"""Sizes as people write them. `parse_size(format_size(n)) == n` for every n; nothing is ever rounded in silence."""

from __future__ import annotations

import re

from ucxkv.errors import UsageError

__all__ = ["format_size", "parse_size", "short_size"]

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*([0-9][0-9_]*)(?:\.([0-9]+))?\s*([A-Za-z]*)\s*\Z")


def parse_size(text: str | int) -> int:
    """Bytes of `1GiB`, `512 MiB`, `1.5GiB`, `10MB` (10^6), `4096` or an int.

    Binary units carry the i: 1 MiB = 2^20, 1 MB = 10^6; bare letters (`1G`) are refused, as tools disagree on them.
    Raises UsageError with the text when it is no size, negative, or no whole number of bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise UsageError(f"{text} is no size: it is negative")
        return text
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"{text!r} is no size: write 4096, 64KiB, 512MiB or 1.5GiB")
    whole, fraction, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise UsageError(f"{text!r} has the unit {unit!r}: use B, KiB to TiB (powers of 2^10) or KB to TB (of 10^3)")
    size = int(whole) * factor
    if fraction:
        part = int(fraction) * factor
        if part % 10 ** len(fraction):
            raise UsageError(f"{text!r} is no whole number of bytes")
        size += part // 10 ** len(fraction)
    return size


def format_size(size_bytes: int) -> str:
    """The exact size in its largest binary unit that divides it: 1GiB, 1536MiB, 4097B."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _UNITS[unit.lower()] == 0:
            return f"{size_bytes // _UNITS[unit.lower()]}{unit}"
    return f"{size_bytes}B"


def short_size(size_bytes: float) -> str:
    """The size for people, three digits: 1.46 GiB. Not for parsing."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.3g} {unit}"
