"""The asyncio client: `connect` gives a `Client`; `results` has what its calls answer."""

from __future__ import annotations

from ucxkv.client.client import Client
from ucxkv.client.connecting import Connect, connect
from ucxkv.client.explaining import Explanation, PastDecision
from ucxkv.client.holding import Lease, View
from ucxkv.client.results import (
    ConnectionInfo,
    DeleteStatus,
    GetResult,
    KeyInfo,
    Match,
    NodeStatus,
    Part,
    PathKind,
    PeerInfo,
    PutResult,
    PutStatus,
    ReadStatus,
)

__all__ = [
    "Client",
    "Connect",
    "ConnectionInfo",
    "DeleteStatus",
    "Explanation",
    "GetResult",
    "KeyInfo",
    "Lease",
    "Match",
    "NodeStatus",
    "Part",
    "PastDecision",
    "PathKind",
    "PeerInfo",
    "PutResult",
    "PutStatus",
    "ReadStatus",
    "View",
    "connect",
]
