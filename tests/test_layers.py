"""Who may import whom: the layers of the source, read from the imports themselves.

shells -> cores -> values; shells -> legs (transport, tiers). The legs import neither the rest of ucxkv nor each other,
the cores hold no clock, no socket and no await, and each foreign library is imported in one place only.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module's layer is that of the longest prefix of its name in this table.
LAYERS = {
    "ucxkv.transport": "transport",
    "ucxkv.tiers": "tiers",
    "ucxkv.errors": "values",
    "ucxkv.ids": "values",
    "ucxkv.keys": "values",
    "ucxkv.foreign": "values",
    "ucxkv.layout": "values",
    "ucxkv.placement": "values",
    "ucxkv.sharding": "values",
    "ucxkv.walk": "values",
    "ucxkv.heads": "values",
    "ucxkv.buffers": "values",
    "ucxkv.paged": "values",
    "ucxkv.sizes": "values",
    "ucxkv.tokens": "values",
    "ucxkv.version": "values",
    "ucxkv.protocol": "cores",
    "ucxkv.directory": "cores",
    "ucxkv.replication": "cores",
    "ucxkv.policy": "cores",
    "ucxkv.loadsplit": "cores",
    "ucxkv.simulation": "simulation",
    "ucxkv.control": "control",
    "ucxkv.journal": "journal",
    "ucxkv.journal.pieces": "cores",
    "ucxkv.client": "client",
    "ucxkv.sequence": "client",
    "ucxkv.objects": "client",
    "ucxkv.objects.numbering": "values",
    "ucxkv.objects.records": "values",
    "ucxkv.objects.values": "values",
    "ucxkv.sessions": "client",
    "ucxkv.sessions.book": "cores",
    "ucxkv.sessions.records": "cores",
    "ucxkv.loading": "client",
    "ucxkv.splitting": "client",
    "ucxkv.sync": "client",
    "ucxkv.client.chunking": "link",  # one node's link and the paths to its memory: a node is a client of others too
    "ucxkv.client.grants": "link",
    "ucxkv.client.leading": "link",
    "ucxkv.client.link": "link",
    "ucxkv.client.loadcosts": "link",
    "ucxkv.client.mapped": "link",
    "ucxkv.client.message": "link",
    "ucxkv.client.networks": "link",
    "ucxkv.client.opening": "link",
    "ucxkv.client.path": "link",
    "ucxkv.client.putter": "link",
    "ucxkv.client.results": "link",
    "ucxkv.client.rma": "link",
    "ucxkv.dial": "link",
    "ucxkv.settings": "link",
    "ucxkv.whereabouts": "link",
    "ucxkv.memory": "values",
    "ucxkv.node": "node",
    "ucxkv.config": "node",
    "ucxkv.cli": "cli",
    "ucxkv.perf": "cli",
    "ucxkv.perf.peers": "peers",
    "ucxkv.__main__": "cli",
    "ucxkv": "face",
}

# What a layer may import of ucxkv besides itself.
BELOW = {
    "transport": set(),
    "tiers": set(),
    "values": set(),
    "cores": {"values"},
    "link": {"cores", "values", "transport", "tiers"},  # what both shells need: dialling, links to nodes
    "simulation": {"cores", "values"},  # the cores over a trace: it reads files, and draws from a seed
    "control": {"cores", "values"},  # the control plane's engines
    "journal": {"cores", "values"},  # the directory's log on disk
    "client": {"control", "link", "cores", "values", "transport", "tiers"},
    "node": {"control", "journal", "link", "cores", "values", "transport", "tiers"},
    "peers": set(),  # another interpreter may run it
    "cli": {
        "face",
        "client",
        "node",
        "control",
        "journal",
        "link",
        "cores",
        "values",
        "transport",
        "tiers",
        "peers",
        "simulation",
    },
    "face": {"client", "node", "values", "cores"},
}

# Foreign library -> the modules (by prefix) that may import it. What is not here is refused.
FOREIGN = {
    "numpy": ("ucxkv",),
    "xxhash": ("ucxkv",),
    "cffi": (
        "ucxkv.transport.build_ucx",
        "ucxkv.tiers.build_host",
        "ucxkv.tiers.build_io",
        "ucxkv.directory.build_slots",
    ),
    "pynvml": ("ucxkv.transport.nvml",),
    "libucx": ("ucxkv.transport.library", "ucxkv.transport.build_ucx"),
    "etcd3aio": ("ucxkv.control.etcd", "ucxkv.control.etcd_client"),
    "grpc": ("ucxkv.control.etcd_client",),
    "msgspec": (
        "ucxkv.replication.messages",
        "ucxkv.control.records",
        "ucxkv.protocol",
        "ucxkv.replication.messages",
        "ucxkv.config",
    ),
    "structlog": ("ucxkv.node", "ucxkv.cli"),
    "prometheus_client": ("ucxkv.node",),
    "typer": ("ucxkv.cli",),
    "rich": ("ucxkv.cli", "ucxkv.perf"),
    "matplotlib": ("ucxkv.perf.plot", "ucxkv.simulation.plot"),
    "torch": ("ucxkv.perf.peers.device",),
    "cupy": ("ucxkv.perf.peers.device",),
    "uvloop": ("ucxkv.node", "ucxkv.cli", "ucxkv.sync", "ucxkv.transport.submit"),
    "zstandard": ("ucxkv.tiers.codecs.lossless",),
    "typing_extensions": ("ucxkv",),  # for type checkers only
}

# Our own native modules -> the package that may import them.
NATIVE = {
    "ucxkv.transport._ucx": "ucxkv.transport",
    "ucxkv.tiers._engine": "ucxkv.tiers.engines",
    "ucxkv.tiers._host": "ucxkv.tiers",
    "ucxkv.directory._slots": "ucxkv.directory",
}

# What a sans-IO module never imports. A twin of native code and a build script are no part of the core's logic.
IMPURE = {"asyncio", "time", "random", "secrets", "socket", "select", "selectors", "threading", "subprocess", "signal"}
BUILD_SCRIPTS = {
    "ucxkv.transport.build_ucx",
    "ucxkv.tiers.build_host",
    "ucxkv.tiers.build_io",
    "ucxkv.directory.build_slots",
}
NO_CORE = BUILD_SCRIPTS | {"ucxkv.directory.slots_twin"}  # the C code that it stands for reads the clock


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name, its tree and everything that it imports, as dotted names."""

    name: str
    tree: ast.Module
    imports: tuple[str, ...]

    @property
    def layer(self) -> str:
        """Its layer; empty when the table does not know it (the entry "ucxkv" is the package's face alone)."""
        name = self.name
        while name not in LAYERS:
            name = name.rpartition(".")[0]
        return "" if name == "ucxkv" and self.name != name else LAYERS[name]


def _source_files() -> Iterator[tuple[str, bool, Path]]:
    for top, package in (("ucxkv", "ucxkv"), ("transport", "ucxkv.transport"), ("tiers", "ucxkv.tiers")):
        for folder, folders, files in os.walk(ROOT / top, followlinks=False):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            inner = Path(folder).relative_to(ROOT / top).parts
            for file in sorted(files):
                if file.endswith(".py"):
                    stem = () if file == "__init__.py" else (file[:-3],)
                    yield ".".join((package, *inner, *stem)), file == "__init__.py", Path(folder) / file


def _imports(name: str, is_package: bool, tree: ast.Module, known: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".") if is_package else name.split(".")[:-1]
                parts = parts[: len(parts) - (node.level - 1)]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in known or full in NATIVE else base


def _modules() -> list[Module]:
    files = list(_source_files())
    known = {name for name, _, _ in files}
    found = []
    for name, is_package, path in files:
        tree = ast.parse(path.read_text(), str(path))
        found.append(Module(name, tree, tuple(_imports(name, is_package, tree, known))))
    return found


MODULES = _modules()


def _inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def test_every_module_stands_in_a_layer() -> None:
    """Goal: no file escapes the rules below. Method: each module's name is looked up in the table of layers."""
    assert len(MODULES) > 10
    assert [module.name for module in MODULES if not module.layer] == []


def test_imports_point_down_only() -> None:
    """Goal: shell -> core -> values, legs alone. Method: every import of ucxkv, also in functions, against BELOW."""
    wrong = []
    layer_of = {module.name: module.layer for module in MODULES}
    for module in MODULES:
        allowed = BELOW[module.layer] | {module.layer}
        for target in module.imports:
            if not _inside(target, "ucxkv") or target in NATIVE:
                continue
            layer = layer_of.get(target)
            assert layer is not None, f"{module.name} imports {target}, which is no module here"
            if layer not in allowed:
                wrong.append(f"{module.name} ({module.layer}) imports {target} ({layer})")
    assert wrong == []


def test_each_foreign_library_is_imported_in_its_own_place() -> None:
    """Goal: the rest imports and tests without GPU, RDMA or torch. Method: every import outside the standard library
    and ucxkv is looked up in FOREIGN; our native modules are imported only by the package that owns them."""
    wrong = []
    for module in MODULES:
        for target in module.imports:
            top = target.split(".")[0]
            if target in NATIVE:
                allowed: tuple[str, ...] = (NATIVE[target],)
            elif top == "ucxkv" or top in sys.stdlib_module_names:
                continue
            else:
                allowed = FOREIGN.get(top, ())
            if not any(_inside(module.name, prefix) for prefix in allowed):
                wrong.append(f"{module.name} imports {target}")
    assert wrong == []


def test_values_import_only_the_standard_library_numpy_and_xxhash() -> None:
    """Goal: values are usable anywhere. Method: their imports against that short list."""
    for module in MODULES:
        if module.layer == "values":
            tops = {target.split(".")[0] for target in module.imports}
            assert tops <= sys.stdlib_module_names | {"ucxkv", "numpy", "xxhash", "__future__"}, module.name


def test_cores_and_values_hold_no_clock_no_socket_and_no_await() -> None:
    """Goal: the core is sans-IO. Method: no import of IMPURE, no `async`, no `await`, no call of open()."""
    wrong = []
    for module in MODULES:
        if module.layer not in {"cores", "values"} or module.name in NO_CORE:
            continue
        wrong += [f"{module.name} imports {name}" for name in module.imports if name.split(".")[0] in IMPURE]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
                wrong.append(f"{module.name}:{node.lineno} awaits")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
                wrong.append(f"{module.name}:{node.lineno} opens a file")
    assert wrong == []


def test_the_environment_is_set_nowhere() -> None:
    """Goal: no constructor or import changes its process's environment. Method: no assignment to os.environ, no call of
    os.putenv or of environ's mutating methods anywhere in the source."""
    wrong = []
    for module in MODULES:
        for node in ast.walk(module.tree):
            for target in node.targets if isinstance(node, ast.Assign | ast.Delete) else []:
                if isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("environ"):
                    wrong.append(f"{module.name}:{target.lineno}")
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called.endswith(("environ.setdefault", "environ.update", "environ.pop", "os.putenv", "os.unsetenv")):
                    wrong.append(f"{module.name}:{node.lineno}")
    assert wrong == []


PROBE = """
import ctypes, json, os, sys, threading
import numpy  # its BLAS may start threads of its own: they are counted before

def c_environment():
    pointer = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found, at = [], 0
    while pointer and pointer[at] is not None:
        found.append(pointer[at].decode(errors="replace"))
        at += 1
    return sorted(found)

def facts():
    return {"native": len(os.listdir("/proc/self/task")), "python": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")), "environment": c_environment(), "os": dict(os.environ)}

before = facts()
import MODULE
after = facts()
maps = open("/proc/self/maps").read()
print(json.dumps({"before": before, "after": after, "torch": "torch" in sys.modules, "libucp": "libucp" in maps,
                  "cuda": "libcuda" in maps, "rich": "rich" in sys.modules, "typer": "typer" in sys.modules}))
"""


@pytest.mark.parametrize("module", ["ucxkv", "ucxkv.transport", "ucxkv.tiers"])
def test_importing_changes_nothing_in_the_process(module: str) -> None:
    """Goal: `import ucxkv` is free of side effects. Method: a fresh interpreter compares threads, descriptors and the
    environment (also C's) before and after, and looks for torch, libucp and CUDA among what got loaded."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.replace("MODULE", module)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["after"] == seen["before"]
    assert not any(seen[name] for name in ("torch", "libucp", "cuda", "rich", "typer")), seen
