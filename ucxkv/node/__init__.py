"""A node of ucxkv: `Node(NodeConfig(...))`, or `ucxkv node` on the command line."""

from __future__ import annotations

from ucxkv.node.config import NodeConfig
from ucxkv.node.node import Node

__all__ = ["Node", "NodeConfig"]
