"""The product's policies and placement over a trace of requests: what a cluster of a given size would save.

`traces` reads traces, `workload` lays one out for replay, `cluster` describes the hardware, `belady` is the policy that
knows the future, `replay` runs one policy over a workload, `plot` draws a sweep. `ucxkv simulate` is its command.
"""

from __future__ import annotations

__all__: list[str] = []
