"""A same-host writer that is told step by step what to do: run as a process, so that it can be stopped and killed.

    python -m tests.writer ADDRESS     reads one command a line from standard input, answers each with one line

grant LENGTH COUNT | scribble | put KEYHEX | close | exit. It maps the node's memory as a client does; `close` ends its
connection without Bye, `scribble` writes into what it was granted, also afterwards.
"""

from __future__ import annotations

import sys

from tests.wire import RawPeer
from ucxkv.protocol import messages as m
from ucxkv.tiers import copy as tier_copy
from ucxkv.tiers.segments import MappedSegment

__all__ = ["main"]


def main() -> None:
    """Entry point."""
    with RawPeer(sys.argv[1]) as outside:
        local_name = outside.open().local_name
    peer = RawPeer(f"unix:@{local_name}")
    welcome = peer.open(want_memory=True)
    segment = MappedSegment(peer.fds[1], welcome.regions[0].size_bytes, writable=True)
    offsets: list[int] = []
    length = 0
    print("ready", flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        match command:
            case "grant":
                length = int(words[0])
                granted = peer.ask(m.Grant(length, int(words[1])))
                assert isinstance(granted, m.Granted)
                raw = granted.offsets
                offsets += [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
                print(len(offsets), flush=True)
            case "scribble":
                for offset in offsets:
                    segment.view[offset : offset + length] = b"\xee" * length
                print("done", flush=True)
            case "put":
                offset = offsets.pop()
                value = segment.view[offset : offset + length]
                done = peer.ask(
                    m.Put(
                        bytes.fromhex(words[0]),
                        bytes(16),
                        bytes(2),
                        offset.to_bytes(8, "little"),
                        length.to_bytes(4, "little"),
                        tier_copy.sum_bytes(value).to_bytes(8, "little"),
                    )
                )
                print(done.status[0] if isinstance(done, m.PutDone) else "refused", flush=True)
            case "close":
                peer.close()
                print("closed", flush=True)
            case "exit":
                return


if __name__ == "__main__":
    main()
