"""What a node says of the memory that it hands out is checked before any of it is used."""

from __future__ import annotations

import os

import pytest

from ucxkv.client.mapped import MappedPath
from ucxkv.directory import SlotTable, SlotTableError
from ucxkv.protocol import WIRE_VERSION
from ucxkv.protocol import messages as m
from ucxkv.tiers.segments import HostSegment


def _welcome(table_bytes: int, regions: list[m.SegmentInfo]) -> m.Welcome:
    return m.Welcome(WIRE_VERSION, "0", 5, "liar", "h:1", 1, "host", "", 9, table_bytes, 16, 1 << 20, regions, [])


@pytest.mark.parametrize(
    "named", [[], [0, 1], [1024], [1 << 40]], ids=["one too many", "one too few", "past", "far past"]
)
def test_descriptors_and_regions_that_do_not_fit_are_a_typed_error_and_leave_nothing_open(named: list[int]) -> None:
    """Method: a real slot table and one segment, announced as none, as two, and as regions that no reader has."""
    with HostSegment.create(1 << 14, "table") as table, HostSegment.create(1 << 14, "values") as values:
        SlotTable(table.view, 16, epoch=1, lines=8)
        before = len(os.listdir("/proc/self/fd"))
        fds = [os.dup(table.fd), os.dup(values.fd)]
        regions = [m.SegmentInfo(region, 5, 1, 0, 1 << 14) for region in named]
        with pytest.raises(SlotTableError):
            MappedPath(_welcome(1 << 14, regions), fds)
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(SlotTableError):
        MappedPath(_welcome(1 << 14, []), [])
