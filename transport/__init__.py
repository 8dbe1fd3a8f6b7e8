"""Bytes over the wire: UCX, control connections, addresses. Imports nothing else of ucxkv."""
