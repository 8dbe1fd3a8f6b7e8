"""The replicated log of one directory shard: a leader and its in-sync replicas, decided without I/O (see `replica`)."""

from ucxkv.replication.config import Member, Role, ShardConfig, Timing
from ucxkv.replication.log import Entry, Kind
from ucxkv.replication.replica import Recovered, Replica

__all__ = ["Entry", "Kind", "Member", "Recovered", "Replica", "Role", "ShardConfig", "Timing"]
