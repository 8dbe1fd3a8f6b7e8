"""What the fork server imports once for all processes of these tests. It does not load UCX: each process does."""

from __future__ import annotations

import ucxkv
import ucxkv.client.message
import ucxkv.client.rma
import ucxkv.node
import ucxkv.transport.endpoint
import ucxkv.transport.memory
import ucxkv.transport.progress
import ucxkv.transport.service
import ucxkv.transport.ucx

__all__ = ["ucxkv"]
