"""ucxkv: an asyncio service on UCX that stores the attention KV cache of LLM inference.

    async with ucxkv.connect("127.0.0.1:13337") as kv:
        await kv.put_many(keys, blocks, parents="chain")
        result = await kv.get_many(keys, into=blocks)

Importing this sets no environment variable, starts no thread and loads neither libucp nor torch.
"""

from __future__ import annotations

from ucxkv import sync
from ucxkv.client import (
    Client,
    ConnectionInfo,
    DeleteStatus,
    Explanation,
    GetResult,
    KeyInfo,
    Lease,
    Match,
    NodeStatus,
    Part,
    PastDecision,
    PathKind,
    PeerInfo,
    PutResult,
    PutStatus,
    ReadStatus,
    View,
    connect,
)
from ucxkv.errors import (
    ClientClosed,
    DeadlineExceeded,
    ForkError,
    IntegrityError,
    Overloaded,
    SetupError,
    StaleError,
    UcxKvError,
    Unavailable,
    UsageError,
    ValueTooLarge,
    VersionConflict,
    VersionMismatch,
)
from ucxkv.foreign import ForeignKeys, Namespace
from ucxkv.ids import ROOT_KEY
from ucxkv.keys import block_keys
from ucxkv.layout import Layout
from ucxkv.policy.cost import PrefillCost
from ucxkv.sessions import PrefetchResult, Session
from ucxkv.tokens import Token
from ucxkv.version import VERSION as __version__

__all__ = [
    "ROOT_KEY",
    "Client",
    "ClientClosed",
    "ConnectionInfo",
    "DeadlineExceeded",
    "DeleteStatus",
    "Explanation",
    "ForeignKeys",
    "ForkError",
    "GetResult",
    "IntegrityError",
    "KeyInfo",
    "Layout",
    "Lease",
    "Match",
    "Namespace",
    "NodeStatus",
    "Overloaded",
    "Part",
    "PastDecision",
    "PathKind",
    "PeerInfo",
    "PrefetchResult",
    "PrefillCost",
    "PutResult",
    "PutStatus",
    "ReadStatus",
    "Session",
    "SetupError",
    "StaleError",
    "Token",
    "UcxKvError",
    "Unavailable",
    "UsageError",
    "ValueTooLarge",
    "VersionConflict",
    "VersionMismatch",
    "View",
    "__version__",
    "block_keys",
    "connect",
    "sync",
]
