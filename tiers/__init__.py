"""Bytes at rest: segments, slabs, grants, sums. Imports nothing else of ucxkv."""
