"""Blocks on disk in recycled datafiles: store, striping over drives, scrub. The bytes: `..datafile_format`."""

from .folder import Folder, RealFolder
from .recovery import RecoveredBlocks
from .scrubbing import Scrubbed, scrub
from .store import Datafiles
from .striped import StripedDatafiles
from .values import Block, Durability, Hooks, Place, Problem, ProblemKind, Recovered, Stats

__all__ = [
    "Block",
    "Datafiles",
    "Durability",
    "Folder",
    "Hooks",
    "Place",
    "Problem",
    "ProblemKind",
    "RealFolder",
    "Recovered",
    "RecoveredBlocks",
    "Scrubbed",
    "Stats",
    "StripedDatafiles",
    "scrub",
]
