"""A process that appends until it is killed, and says on standard output what was committed.

    python -m tests.journal.writer FOLDER DURABILITY CLIENTS

One line for each commit that a client saw: the lsn. Records say their lsn; a snapshot is made now and then."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from ucxkv.journal import Durability, Journal

FILE_BYTES = 1 << 20


def content(lsn: int) -> bytes:
    """The record with this lsn."""
    return b"%d:" % lsn + bytes([lsn % 251]) * (lsn * 31 % 700)


async def _main(folder: Path, durability: Durability, clients: int) -> None:
    journal, _ = await Journal.open(folder, durability=durability, identity=b"writer", file_bytes=FILE_BYTES)

    async def client() -> None:
        while True:
            lsn = journal.append(1, (content(journal.last_lsn + 1),))
            await journal.committed(lsn)
            os.write(1, b"%d\n" % lsn)

    async def snapshots() -> None:
        while True:
            await asyncio.sleep(0.05)
            lsn = journal.durable_lsn
            await journal.snapshot(1, lsn, [b"%d" % lsn, bytes(10_000)])

    await asyncio.gather(snapshots(), *(client() for _ in range(clients)))


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), Durability(sys.argv[2]), int(sys.argv[3])))
