"""The write-ahead log of a node's directory, on disk: the one package of the control plane that touches files.

Reading order: pieces (bytes), files (the disk), walk (reading), log (writing), snapshots, recovery, committer,
values, journal."""

from ucxkv.journal.files import Files, FolderFiles
from ucxkv.journal.journal import RECORD_BYTES_MAX, Durability, Journal, JournalStats
from ucxkv.journal.recovery import Recovered
from ucxkv.journal.values import ValueFile
from ucxkv.journal.walk import StopKind, Stopped

__all__ = [
    "RECORD_BYTES_MAX",
    "Durability",
    "Files",
    "FolderFiles",
    "Journal",
    "JournalStats",
    "Recovered",
    "StopKind",
    "Stopped",
    "ValueFile",
]
