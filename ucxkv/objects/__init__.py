"""Objects: bytes, numpy arrays and torch tensors under names of the user's, overwritable and versioned.

    version = await kv.objects.put("index/shard-3", vectors)
    found = await kv.objects.get("index/shard-3")              # None, or .value and .info
    await kv.objects.put("index/shard-3", more, if_version=found.info.version)

They lie in the same tiers as the KV blocks, with the same sums. What holds is in docs/objects.md.
"""

from __future__ import annotations

from ucxkv.objects.blocking import BlockingObjects
from ucxkv.objects.records import Version
from ucxkv.objects.store import ABSENT, Absent, ObjectInfo, Objects, StoredObject

__all__ = ["ABSENT", "Absent", "BlockingObjects", "ObjectInfo", "Objects", "StoredObject", "Version"]
