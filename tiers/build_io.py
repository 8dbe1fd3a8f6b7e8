"""Builds `ucxkv.tiers._engine` from io.c, uring.c and workers.c: through setup.py, or in place with
`python tiers/build_io.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Run as a script, this folder is the first place to import from, and its modules would stand in for the library's.
sys.path[:] = [place for place in sys.path if not place or Path(place).resolve() != HERE]

from cffi import FFI  # noqa: E402

SOURCES = ("io.h", "uring.c", "workers.c", "io.c")

ffi = FFI()
ffi.cdef("""
    typedef struct { uint64_t address, offset; uint32_t length; uint16_t file, kind; } kv_io_op;
    typedef struct {
        uint32_t *done;
        int32_t fd, again;
        uint32_t pending, bad;
        int32_t bad_errno;
        uint32_t workers;
        uint64_t peak_bytes;
        uint64_t enters;
        uint32_t ask_at_most;
        int32_t sync_answer, transfer_answer;
    } kv_io_view;
    typedef struct kv_io kv_io;
    enum { KV_BUSY, KV_UNKNOWN_FILE, KV_UNKNOWN_KIND, KV_MISALIGNED, KV_BEYOND, KV_FENCED, KV_TOO_MANY, ... };
    enum { KV_READ, KV_WRITE, KV_CALM, KV_SOON, KV_LATER, KV_SYNCS, KV_FILES, KV_TRIES, KV_ALIGNMENT, ... };
    kv_io *kv_io_open_uring(uint32_t max_ops, uint64_t cap, uint32_t entries, int32_t *error);
    kv_io *kv_io_open_threads(uint32_t max_ops, uint64_t cap, uint32_t most, int32_t *error);
    int kv_io_close(kv_io *io);
    kv_io_view *kv_io_look(kv_io *io);
    int kv_io_attach(kv_io *io, int fd, int direct);
    int kv_io_detach(kv_io *io, uint32_t file);
    int kv_io_register(kv_io *io, uint64_t address, uint64_t nbytes);
    int kv_io_uses(const kv_io *io, uint64_t address, uint64_t nbytes);
    void kv_io_unregister(kv_io *io, uint64_t address, uint64_t nbytes);
    int kv_io_submit(kv_io *io, const kv_io_op *ops, uint32_t n, int64_t *results);
    int kv_io_sync(kv_io *io, uint32_t file, int64_t *results);
    uint32_t kv_io_drain(kv_io *io);
""")
ffi.set_source(
    "ucxkv.tiers._engine",
    "\n".join(f'#include "{name}"' for name in SOURCES),
    include_dirs=[str(HERE)],
    depends=[str(HERE / name) for name in SOURCES],
    extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra", "-pthread"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
)

if __name__ == "__main__":
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        built = Path(ffi.compile(tmpdir=scratch))
        fresh = Path(shutil.copy2(built, HERE / f"{built.name}.new"))
        print(fresh.replace(HERE / built.name))  # whole or not at all, also under a process that has it mapped
