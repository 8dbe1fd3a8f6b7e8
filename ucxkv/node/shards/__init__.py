"""The shards of a cluster's directory on one node: the shell around `ucxkv.replication`.

Reading order: records (the journal), standby (what is not led), values, shard (one shard), answering (reads by
token), feeding (messages with
values), journaling, writes (durable puts), wishing (who is to hold what), shards (all of them), recovery.
"""

from ucxkv.node.shards.shards import Shards

__all__ = ["Shards"]
