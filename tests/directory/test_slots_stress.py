"""One writing process and three reading ones on one slot table and one segment whose extents are used over and over."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.directory.arena import key_of
from tests.directory.stress_reader import KEYS, PLACES, VALUE_BYTES
from ucxkv.directory.slots import ROOT_KEY, PutStatus, SlotTable, table_bytes

READERS, ROUNDS = 3, 300


class Churn:
    """The writer: takes a place, hides what lies there, writes another value over it, publishes it under a free key."""

    def __init__(self, table: SlotTable, segment: mmap.mmap) -> None:
        self.table = table
        self.words = np.frombuffer(segment, np.uint64).reshape(PLACES, -1)
        self.at: list[tuple[int, int] | None] = [None] * PLACES  # (slot, key) by place
        self.free = list(range(KEYS))
        self.turn = self.published = 0
        self.rng = np.random.default_rng(7)

    def step(self) -> None:
        place = int(self.rng.integers(PLACES))
        held = self.at[place]
        if held is not None:
            assert self.table.hide(np.array([held[0]], np.int32)) == 1
            self.free.append(held[1])
        key = self.free.pop(int(self.rng.integers(len(self.free))))
        self.turn += 1
        generation = self.turn * PLACES + place
        self.words[place] = generation * 64 + key
        status, slots, _, _ = self.table.put(
            key_of(key),
            ROOT_KEY,
            key.to_bytes(2, "little"),
            (place * VALUE_BYTES).to_bytes(8, "little"),
            VALUE_BYTES.to_bytes(4, "little"),
            xxhash.xxh3_64_intdigest(self.words[place]).to_bytes(8, "little"),
            generation=generation,
            tier=generation >> 8 & 255,
            flag=generation & 255,
        )
        assert status[0] == PutStatus.STORED
        self.at[place] = (int(slots[0]), key)
        self.published += 1


def test_no_torn_slot_or_value_is_accepted_in_millions_of_reads(request: pytest.FixtureRequest) -> None:
    """Goal: the seqlock and the sums hold between processes. Method: readers derive every field and every word of
    a value
    from the generation and compare, while the writer keeps replacing all of it; reads are counted, time is not.
    """
    table_fd, segment_fd = os.memfd_create("table"), os.memfd_create("segment")
    os.ftruncate(table_fd, table_bytes(PLACES))
    os.ftruncate(segment_fd, PLACES * VALUE_BYTES)
    churn = Churn(
        SlotTable(mmap.mmap(table_fd, table_bytes(PLACES)), PLACES, epoch=1, seed=3),
        mmap.mmap(segment_fd, PLACES * VALUE_BYTES),
    )
    for _ in range(200):
        churn.step()
    readers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.directory.stress_reader",
                str(table_fd),
                str(segment_fd),
                str(i),
                str(ROUNDS),
            ],
            cwd=Path(request.config.rootpath),
            pass_fds=(table_fd, segment_fd),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(READERS)
    ]
    try:
        while any(reader.poll() is None for reader in readers):
            for _ in range(200):
                churn.step()
        counts = []
        for reader in readers:
            out, err = reader.communicate()
            assert reader.returncode == 0, err
            counts.append(json.loads(out))
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
            for pipe in (reader.stdout, reader.stderr):
                assert pipe is not None
                pipe.close()
        os.close(table_fd)
        os.close(segment_fd)
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    print(f"published {churn.published}, {total}")
    assert total["lookups"] == READERS * ROUNDS * 4096 > 3_000_000
    assert total["found"] > total["lookups"] // 4 and total["hits"] > total["reads"] // 4
    assert churn.published > 5_000
