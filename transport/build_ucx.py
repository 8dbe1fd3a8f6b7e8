"""Builds `ucxkv.transport._ucx` from the C files here: through setup.py, or in place with `python
transport/build_ucx.py`.

Compiled against the headers of the libucx wheel, linked by soname only: at run time `library.py` has already mapped the
libucp to use, which may be another one (UCX >= 1.13).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
SOURCES = ("ucx.c", "ops.c", "service.c", "accept.c", "serve.c", "fetch.c", "receive.c")
HEADERS = ("ucx.h", "wire.h", "service.h", "fetch.h")


def wheel_directory() -> Path:
    """Where the libucx wheel lies (include/, lib/)."""
    spec = find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package libucx-cu12 is not installed: pip install 'libucx-cu12>=1.17'")
    return Path(next(iter(spec.submodule_search_locations)))


def _declarations() -> str:
    """What Python sees."""
    return (HERE / "cdef.h").read_text()


wheel = wheel_directory()
ffi = FFI()
ffi.cdef(_declarations())
ffi.set_source(
    "ucxkv.transport._ucx",
    "\n".join(f'#include "{name}"' for name in SOURCES if (HERE / name).exists()),
    include_dirs=[str(HERE)],
    library_dirs=[str(wheel / "lib")],
    libraries=["ucp", "ucs"],
    depends=[str(HERE / name) for name in (*SOURCES, *HEADERS, "cdef.h", "../tiers/xxh3.h")],
    extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra", "-isystem", str(wheel / "include")],
    py_limited_api=True,
)

if __name__ == "__main__":
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        built = Path(ffi.compile(tmpdir=scratch))
        fresh = Path(shutil.copy2(built, HERE / f"{built.name}.new"))
        print(fresh.replace(HERE / built.name))  # whole or not at all, also under a process that has it mapped
