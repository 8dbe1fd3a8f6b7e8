"""A reading process of the seqlock stress: `python -m tests.directory.stress_reader TABLE_FD SEGMENT_FD SEED ROUNDS`.

Checks every slot and every value it is given against what its generation says it must be; prints its counts as JSON.
Exit code 1 and a message: something torn was accepted.
"""

from __future__ import annotations

import json
import mmap
import os
import sys

import numpy as np

from tests.directory.arena import key_of
from ucxkv.directory.slots import ReadStatus, SlotReader

KEYS = 48
PLACES = 32
VALUE_BYTES = 4096
LOOKUP_KEYS = 4096


def word_of(generation: np.ndarray, key: np.ndarray) -> np.ndarray:
    """What every u64 of a value is: it names the generation and the key."""
    return generation * np.uint64(64) + key.astype(np.uint64)


def main() -> None:
    """Read until the rounds are over."""
    table_fd, segment_fd, seed, rounds = (int(arg) for arg in sys.argv[1:])
    table = mmap.mmap(table_fd, os.fstat(table_fd).st_size, prot=mmap.PROT_READ)
    segment = mmap.mmap(segment_fd, os.fstat(segment_fd).st_size, prot=mmap.PROT_READ)
    reader = SlotReader(table)
    base = np.frombuffer(segment, np.uint8).ctypes.data
    for region in range(KEYS):  # the region says which key it is; all are the one segment
        reader.map_region(region, base, len(segment))
    keys = np.frombuffer(b"".join(key_of(i) for i in range(KEYS)), "V16")
    rng = np.random.default_rng(seed)
    out = np.zeros((KEYS, VALUE_BYTES // 8), np.uint64)
    counts = dict.fromkeys(("lookups", "found", "reads", "hits", "stale"), 0)
    for _ in range(rounds):
        which = rng.integers(0, KEYS, LOOKUP_KEYS)
        records, found = reader.lookup(keys[which].tobytes())
        hit = found.astype(bool)
        check_slots(records[hit], which[hit])
        counts["lookups"] += LOOKUP_KEYS
        counts["found"] += int(hit.sum())
        which = rng.permutation(KEYS)
        cut = int(rng.integers(0, VALUE_BYTES))
        starts = out.ctypes.data + VALUE_BYTES * np.arange(KEYS, dtype=np.uint64)
        iov = np.empty((KEYS, 2, 2), np.uint64)
        iov[:, 0, 0], iov[:, 0, 1], iov[:, 1, 0], iov[:, 1, 1] = starts, cut, starts + np.uint64(cut), VALUE_BYTES - cut
        first = np.arange(0, 2 * KEYS + 1, 2, dtype=np.uint32)
        result = reader.read(keys[which].tobytes(), first, iov.reshape(-1, 2))
        hit = result.status == ReadStatus.HIT
        assert not (result.status == ReadStatus.CORRUPT).any(), "a value changed under an unchanged slot"
        assert (out[hit] == word_of(result.generation[hit], which[hit])[:, None]).all(), "torn value accepted"
        counts["reads"] += KEYS
        counts["hits"] += result.hits
        counts["stale"] += int((result.status == ReadStatus.STALE).sum())
    print(json.dumps(counts))


def check_slots(records: np.ndarray, which: np.ndarray) -> None:
    """Every field of a slot follows from its key and its generation."""
    generation = records["generation"]
    assert (records["region"] == which).all(), "torn slot: key and region"
    assert (records["offset"] == generation % np.uint64(PLACES) * np.uint64(VALUE_BYTES)).all(), "torn slot: offset"
    assert (records["flags"][:, 1] == generation & np.uint64(255)).all(), "torn slot: flags"
    assert (records["tier"] == generation >> np.uint64(8) & np.uint64(255)).all(), "torn slot: tier"
    assert (records["length"] == VALUE_BYTES).all() and (records["version"] % 2 == 0).all()


if __name__ == "__main__":
    main()
