"""Files that describe a machine, read through one seam: this machine, a copied tree, or a recording of another one.

Invariants: reading changes nothing; what is not there or not readable reads as empty, never as an error; every path is
relative to the root, with `/` between its parts; no answer names anything outside of the root.

A recording is one JSON file (format 1):

    {"format": 1, "about": "one line: which machine, where the facts come from",
     "files": {"sys/devices/system/node/online": "0-1", ...},
     "links": {"sys/class/net/eth0": "sys/devices/pci0000:00/0000:00:03.0/net/eth0", ...},
     "nvml": null | {"driver": "...", "gpus": [...]}}

`links` hold a symbolic link's resolved end, `nvml` what `ucxkv.transport.nvml.probe` answered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .base import SetupFailed

__all__ = ["FORMAT", "RECORDING_NAME", "HostTree", "RecordedTree", "SysTree", "open_tree"]

FORMAT = 1
RECORDING_NAME = "topology.json"
_LINKS_MAX = 16
_FILE_BYTES_MAX = 64 << 10


class SysTree(Protocol):
    """Where the facts come from."""

    def read(self, path: str) -> str:
        """The stripped text of a file; empty when there is none."""

    def names(self, path: str) -> list[str]:
        """The entries of a folder, sorted; empty when there is none."""

    def resolve(self, path: str) -> str:
        """The path with all symbolic links followed; empty when nothing is there or it leads out of the root."""

    def nvml(self) -> Mapping[str, Any] | None:
        """What NVML says of the GPUs (see `ucxkv.transport.nvml.probe`), or None."""


@dataclass(frozen=True, slots=True)
class HostTree:
    """A real folder: `/`, or a copy of another machine's /sys below some root.

    use_nvml: ask NVIDIA's driver about GPUs; only ever done when the root is `/`.
    """

    root: Path = field(default=Path("/"))
    use_nvml: bool = True

    def read(self, path: str) -> str:
        """The stripped text of a file; empty when there is none."""
        real = self.resolve(path)
        if not real:
            return ""
        try:
            with open(self.root / real, "rb") as file:
                return file.read(_FILE_BYTES_MAX).decode(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """The entries of a folder, sorted; empty when there is none."""
        real = self.resolve(path)
        try:
            return sorted(os.listdir(self.root / real)) if real else []
        except OSError:
            return []

    def resolve(self, path: str) -> str:
        """The path with all symbolic links followed; empty when nothing is there or it leads out of the root."""
        root = os.path.realpath(self.root)
        try:
            real = os.path.realpath(os.path.join(root, path), strict=True)
        except OSError:
            return ""
        relative = os.path.relpath(real, root)
        return "" if relative.startswith("..") else relative

    def nvml(self) -> Mapping[str, Any] | None:
        """NVML's answer on this machine, or None."""
        if not self.use_nvml or os.path.realpath(self.root) != "/":
            return None
        from .nvml import probe

        return probe()


class RecordedTree:
    """A recording in memory. files, links: as in the module's format; nvml: what NVML had said."""

    def __init__(
        self,
        files: Mapping[str, str],
        links: Mapping[str, str] | None = None,
        nvml: Mapping[str, Any] | None = None,
        about: str = "",
    ) -> None:
        self.files = dict(files)
        self.links = dict(links or {})
        self.about = about
        self._nvml = nvml
        self._folders: dict[str, set[str]] = {}
        self._there = {*self.files, *self.links.values()}
        for path in (*self.files, *self.links, *self.links.values()):
            parts = path.split("/")
            for depth in range(len(parts)):
                self._folders.setdefault("/".join(parts[:depth]), set()).add(parts[depth])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RecordedTree:
        """Read a recording. Raises SetupFailed when the file is none of format 1."""
        try:
            found = json.loads(Path(path).read_text())
        except (OSError, ValueError) as exc:
            raise _no_recording(path, str(exc)) from exc
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise _no_recording(path, "another format")
        files, links, nvml = found.get("files"), found.get("links"), found.get("nvml")
        if not (isinstance(files, dict) and isinstance(links, dict) and (nvml is None or isinstance(nvml, dict))):
            raise _no_recording(path, "files, links or nvml is no object")
        if not _is_texts(files) or not _is_texts(links):
            raise _no_recording(path, "files and links are not texts by path")
        return cls(files, links, nvml, str(found.get("about", "")))

    def read(self, path: str) -> str:
        """The stripped text of a file; empty when there is none."""
        return self.files.get(self._real(path), "").strip()

    def names(self, path: str) -> list[str]:
        """The entries of a folder, sorted; empty when there is none."""
        return sorted(self._folders.get(self._real(path), ()))

    def resolve(self, path: str) -> str:
        """The path with all links followed; empty when nothing is there."""
        real = self._real(path)
        return real if real in self._there or real in self._folders else ""

    def nvml(self) -> Mapping[str, Any] | None:
        """What NVML had said."""
        return self._nvml

    def _real(self, path: str) -> str:
        at = [part for part in path.split("/") if part and part != "."]
        for _ in range(_LINKS_MAX):
            for depth in range(1, len(at) + 1):
                end = self.links.get("/".join(at[:depth]))
                if end is not None:
                    at = [*end.split("/"), *at[depth:]]
                    break
            else:
                return "/".join(at)
        return ""


def open_tree(root: str | os.PathLike[str], *, use_nvml: bool = True) -> SysTree:
    """The tree at `root`: a recording (a JSON file, or a folder with one named topology.json), else a folder like `/`.

    Raises SetupFailed when there is nothing, or a recording that cannot be read.
    """
    path = Path(root)
    if path.is_file():
        return RecordedTree.load(path)
    if (path / RECORDING_NAME).is_file():
        return RecordedTree.load(path / RECORDING_NAME)
    if not (path / "sys").is_dir():
        raise _no_recording(path, "neither a recording nor a folder with sys/ in it")
    return HostTree(path, use_nvml)


def _is_texts(value: Mapping[object, object]) -> bool:
    return all(isinstance(key, str) and isinstance(text, str) for key, text in value.items())


def _no_recording(path: object, found: str) -> SetupFailed:
    return SetupFailed(f"{path} is no recorded machine: {found}; `ucxkv topo --record DIR` writes one")
