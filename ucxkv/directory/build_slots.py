"""Builds `ucxkv.directory._slots` from slots.c and slots_reader.c.

Through setup.py's `cffi_modules`, or in place with `python ucxkv/directory/build_slots.py`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def declarations() -> str:
    """The structs and functions of slots.h, in the C subset that cffi reads."""
    text = re.sub(r"/\*.*?\*/", "", (HERE / "slots.h").read_text(), flags=re.S)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


ffi = FFI()
ffi.cdef(declarations())
ffi.set_source(
    "ucxkv.directory._slots",
    '#include "slots.h"\n#include "slots.c"\n#include "slots_reader.c"\n',
    include_dirs=[str(HERE), str(ROOT / "tiers")],
    extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra"],
    py_limited_api=True,
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:  # outside the repository: setuptools would read its pyproject.toml
        built = Path(ffi.compile(tmpdir=scratch))
        shutil.copy2(built, HERE / f"{built.name}.new")
        (HERE / f"{built.name}.new").replace(HERE / built.name)  # whole or not at all, also under a running process
