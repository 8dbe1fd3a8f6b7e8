"""The version of this package, also while it runs from a source tree that is not installed."""

from __future__ import annotations

VERSION = "0.1.0"
