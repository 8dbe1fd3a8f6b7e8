"""The control plane: members, shard map, epochs, in-sync sets and leases behind four calls, with two engines."""

from ucxkv.control.base import (
    Change,
    ChangeKind,
    Clock,
    Conflict,
    ControlClosed,
    ControlPlane,
    Entry,
    LeaseLost,
    OutcomeUnknown,
    SystemClock,
)
from ucxkv.control.lease import Lease
from ucxkv.control.opening import open_control

__all__ = [
    "Change",
    "ChangeKind",
    "Clock",
    "Conflict",
    "ControlClosed",
    "ControlPlane",
    "Entry",
    "Lease",
    "LeaseLost",
    "OutcomeUnknown",
    "SystemClock",
    "open_control",
]
