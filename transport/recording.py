"""Recording a machine: what was read of it, and nothing else, with its addresses made anonymous.

Invariants: a topology read from the recording equals the one read from the machine; no host name, serial number, MAC
address or UUID is in it (none of them is ever read); a GID keeps its kind (link-local, IPv4, global, subnet prefix of
InfiniBand) and equal GIDs stay equal, but its interface id, its IPv4 address and its global prefix are replaced by
numbers in the order in which they were met.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .sysfs import FORMAT, RECORDING_NAME, RecordedTree, SysTree
from .topology import read_topology

__all__ = ["RecordingTree", "record_machine"]

_GID_PATH = re.compile(r"/ports/\d+/gids/\d+\Z")
_GID = re.compile(r"([0-9a-f]{4}:){7}[0-9a-f]{4}\Z")
_EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


class RecordingTree:
    """A tree that hands on what another one says, anonymised, and keeps it."""

    def __init__(self, tree: SysTree) -> None:
        self._tree = tree
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self._nvml: Mapping[str, Any] | None = None
        self._seen: dict[str, dict[str, int]] = {}

    def read(self, path: str) -> str:
        """The file's text, as it will be in the recording."""
        text = self._tree.read(path)
        if not text:
            return ""
        real = self.resolve(path)
        if _GID_PATH.search(path):
            if text == _EMPTY:
                return text
            text = self._anonymous(text)
        elif path.endswith("/meminfo"):
            text = "\n".join(line for line in text.splitlines() if "MemTotal" in line)
        self.files[real] = text
        return text

    def names(self, path: str) -> list[str]:
        """The folder's entries; they are recorded when something below them is read."""
        self.resolve(path)
        return self._tree.names(path)

    def resolve(self, path: str) -> str:
        """The path with links followed; those on the way are recorded."""
        if not self._tree.resolve(path):
            return ""
        at = ""
        for part in path.split("/"):
            step = f"{at}/{part}" if at else part
            at = self._tree.resolve(step)
            if at != step:
                self.links[step] = at
        return at

    def nvml(self) -> Mapping[str, Any] | None:
        """NVML's answer."""
        self._nvml = self._tree.nvml()
        return self._nvml

    def recorded(self, about: str = "") -> RecordedTree:
        """The recording so far."""
        return RecordedTree(self.files, self.links, self._nvml, about)

    def save(self, path: Path, about: str) -> None:
        """Write the recording as JSON. Raises OSError."""
        found = {
            "format": FORMAT,
            "about": about,
            "files": dict(sorted(self.files.items())),
            "links": dict(sorted(self.links.items())),
            "nvml": self._nvml,
        }
        path.write_text(json.dumps(found, indent=1) + "\n")

    def _anonymous(self, text: str) -> str:
        """A GID with its numbers replaced; other text as it is."""
        if not _GID.match(text):
            return text
        prefix, interface = text[:19], text[20:]
        if text.startswith("0000:0000:0000:0000:0000:ffff:"):
            number = self._number("ipv4", text[30:])
            return f"{text[:30]}0a00:{number & 0xFFFF:04x}"  # 10.0.0.0/16
        if prefix[0] in "23":  # global unicast
            prefix = f"2001:0db8:0000:{self._number('prefix', prefix) & 0xFFFF:04x}"  # the prefix for documentation
        number = self._number("interface", interface)
        return f"{prefix}:0200:00ff:fe00:{number & 0xFFFF:04x}"

    def _number(self, kind: str, value: str) -> int:
        seen = self._seen.setdefault(kind, {})
        return seen.setdefault(value, len(seen) + 1)


def record_machine(tree: SysTree, folder: str | os.PathLike[str]) -> Path:
    """Write what `read_topology` reads of a machine to folder/topology.json; makes the folder. Raises OSError."""
    recording = RecordingTree(tree)
    read_topology(recording)
    path = Path(folder) / RECORDING_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    recording.save(path, "a machine, recorded by `ucxkv topo --record`; addresses are made up")
    return path
