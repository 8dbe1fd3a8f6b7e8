"""Builds `ucxkv.tiers._host` from host.c: through setup.py, or in place with `python tiers/build_host.py`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Run as a script, this folder is the first place to import from, and its copy.py would stand in for the library's.
sys.path[:] = [place for place in sys.path if not place or Path(place).resolve() != HERE]

from cffi import FFI  # noqa: E402

ffi = FFI()
ffi.cdef("""
    uint64_t kv_sum(uint64_t addr, size_t n);
    uint64_t kv_copy_sum(uint64_t dst, uint64_t src, size_t n);
    size_t kv_gather(size_t n, uint64_t first_addr, uint64_t iov_addr, uint64_t dst_addr, uint64_t sums_addr,
                     uint64_t cancel_addr);
    uint64_t kv_copy_times(uint64_t dst, uint64_t src, uint64_t working_set, size_t n, size_t count, uint64_t ns_addr,
                           int summed);
""")
ffi.set_source(
    "ucxkv.tiers._host",
    (HERE / "host.c").read_text(),
    include_dirs=[str(HERE)],
    depends=[str(HERE / "host.c"), str(HERE / "xxh3.h")],
    extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra"],
    py_limited_api=True,
)

if __name__ == "__main__":
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        built = Path(ffi.compile(tmpdir=scratch))
        fresh = Path(shutil.copy2(built, HERE / f"{built.name}.new"))
        print(fresh.replace(HERE / built.name))  # whole or not at all, also under a process that has it mapped
