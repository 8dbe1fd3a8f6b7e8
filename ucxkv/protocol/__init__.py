"""The control protocol between clients and nodes: messages, their type codes and the wire version. Sans-IO."""

from __future__ import annotations

from ucxkv.protocol.codec import WIRE_VERSION, MessageError, decode, encode
from ucxkv.protocol.messages import Message

__all__ = ["WIRE_VERSION", "Message", "MessageError", "decode", "encode"]
