"""What replay makes of files that were cut, damaged, mixed up or written by somebody else."""

from __future__ import annotations

import random

import pytest

from tests.journal.faulty import FaultyFiles
from tests.journal.plain import FILE_BYTES, PlainJournal, read
from ucxkv.errors import SetupError
from ucxkv.journal import StopKind
from ucxkv.journal.pieces import BLOCK_BYTES, CHUNK, FILE, FRAME, HEAD_BYTES, SNAPSHOT, encode_records, read_head, seal

RECORDS = [[b"one"], [b"two", b"three" * 7], [b"four" * 100]]
FLAT = [record for records in RECORDS for record in records]


def _small_log() -> dict[str, bytes]:
    """Three frames in one file, closed."""
    files = FaultyFiles()
    journal = PlainJournal(files)
    for records in RECORDS:
        journal.write(*records)
    journal.close()
    return files.content()


def _log_of(content: dict[str, bytes]) -> str:
    (name,) = [name for name in content if name.startswith("log-")]
    return name


def _records_at(content: dict[str, bytes]) -> list[bytes]:
    """What comes back, after checking that it is numbered without a gap and that writing goes on behind it."""
    files = FaultyFiles(content)
    _, records, journal = read(files)
    assert [lsn for _, lsn, _ in records] == list(range(1, len(records) + 1))
    assert journal.recovered.last_lsn == len(records)
    journal.write(b"after")
    again = [record for _, _, record in read(files.after_power_cut(None))[1]]
    assert again == [*(record for _, _, record in records), b"after"]
    return [record for _, _, record in records]


def test_a_log_cut_at_any_byte_loses_a_suffix_only() -> None:
    """Goal: never a wrong or a missing record in the middle. Method: the file is truncated at every byte; what comes
    back is a prefix in whole frames, and what is appended then is found behind it. Without its head nothing is
    trusted."""
    content = _small_log()
    name = _log_of(content)
    prefixes = [FLAT[:0], FLAT[:1], FLAT[:3], FLAT]
    for size in range(FILE_BYTES + 1):
        cut = {**content, name: content[name][:size]}
        head = read_head(content[name])
        assert head is not None
        if size < HEAD_BYTES + head.length:
            with pytest.raises(SetupError, match=r"damaged"):
                PlainJournal(FaultyFiles(cut))
            continue
        if size % 97 and size % BLOCK_BYTES > 600:
            continue  # within padding nothing changes
        ends = [number * BLOCK_BYTES + HEAD_BYTES + length for number, length in ((1, 7), (2, 46), (3, 404))]
        found = sum(size >= end for end in ends)
        assert _records_at(cut) == prefixes[found]


def test_a_bit_that_flips_at_any_byte_costs_a_suffix_only() -> None:
    """Goal: as above, for damage. Method: one bit of every byte of a log flips in turn. When good frames lie behind the
    damage the stop says so; when the head of the only file is hit, nothing is trusted and an operator is asked."""
    content = _small_log()
    name = _log_of(content)
    rng = random.Random(1)
    prefixes = [FLAT[:0], FLAT[:1], FLAT[:3], FLAT]
    for at in range(FILE_BYTES):
        block, inside = divmod(at, BLOCK_BYTES)
        if inside > 600 and at % 61:
            continue  # padding: a sample of it
        raw = bytearray(content[name])
        raw[at] ^= 1 << rng.randrange(8)
        hit = {**content, name: bytes(raw)}
        raw_head = content[name][block * BLOCK_BYTES :][:HEAD_BYTES]
        head = read_head(raw_head)
        assert head is not None
        if inside >= HEAD_BYTES + head.length:
            assert _records_at(hit) == FLAT
        elif block == 0:
            with pytest.raises(SetupError, match=r"is damaged"):
                PlainJournal(FaultyFiles(hit))
        else:
            stopped = PlainJournal(FaultyFiles(hit)).recovered.stopped
            assert _records_at(hit) == prefixes[block - 1]
            assert stopped.kind is (StopKind.TORN if block == 3 else StopKind.DAMAGED)
            assert stopped.offset == block * BLOCK_BYTES


def test_a_good_frame_behind_a_tear_never_comes_back() -> None:
    """Goal: what was cut stays cut. Method: the second of three frames is damaged; the journal is opened, writes the
    very same second frame again, and is opened again: the old third frame, still there and good in itself, is not
    returned."""
    content = _small_log()
    name = _log_of(content)
    raw = bytearray(content[name])
    raw[2 * BLOCK_BYTES + 70] ^= 1
    files = FaultyFiles({**content, name: bytes(raw)})
    journal = PlainJournal(files)
    assert journal.recovered.stopped.kind is StopKind.DAMAGED
    journal.write(*RECORDS[1])
    again = files.after_kill()
    assert again.content()[name][3 * BLOCK_BYTES :] == content[name][3 * BLOCK_BYTES :]
    _, records, journal = read(again)
    assert [record for _, _, record in records] == FLAT[:3]
    assert journal.recovered.stopped.kind is StopKind.END


def test_damage_is_reported_until_somebody_appends() -> None:
    """Goal: a node that refuses to start on damage does not destroy the evidence by trying. Method: a frame in the
    middle is hit, and a whole file behind it does not continue; open and close twice: the same report, nothing has
    changed; the first append then cuts for good."""
    files = FaultyFiles()
    journal = PlainJournal(files)
    for number in range(8):
        journal.write(b"record %d" % (number + 1))
    content = files.content()
    first = min(name for name in content if name.startswith("log-"))
    raw = bytearray(content[first])
    raw[2 * BLOCK_BYTES + HEAD_BYTES + 6] ^= 4
    files = FaultyFiles({**content, first: bytes(raw)})
    before = files.content()
    for _ in range(2):
        _, records, journal = read(files)
        assert [record for _, _, record in records] == [b"record 1"]
        assert journal.recovered.stopped.kind is StopKind.DAMAGED
        assert "acknowledged records are lost" in str(journal.recovered.stopped)
        journal.close()
        assert files.content() == before
    _, _, journal = read(files)
    for number in range(2, 12):  # over several files, beside those that did not continue
        journal.write(b"new %d" % number)
    journal.close()
    _, records, journal = read(files.after_power_cut(None))
    assert [record for _, _, record in records] == [b"record 1", *(b"new %d" % number for number in range(2, 12))]
    assert journal.recovered.stopped.kind is StopKind.END


def test_a_torn_frame_is_not_completed_by_the_write_that_follows_it() -> None:
    """Goal: a frame that recovery dropped stays dropped (found by the state machine). Method: a power cut leaves the
    first sector of a frame; after the restart another frame is written in its place, and a second cut leaves only
    that one's last sector, which is the very one that the first frame lacked: it must not be there again."""
    files = FaultyFiles()
    journal = PlainJournal(files)
    journal.write(b"x" * 900, epoch=1)
    name = _log_of(files.content())
    whole = files.content()[name]
    torn = whole[: BLOCK_BYTES + 512] + bytes(len(whole) - BLOCK_BYTES - 512)
    files = FaultyFiles({name: torn})
    assert PlainJournal(files).recovered.stopped.kind is StopKind.TORN
    wiped = files.after_power_cut(None).content()[name]
    files = FaultyFiles({name: wiped[: BLOCK_BYTES + 512] + whole[BLOCK_BYTES + 512 :]})
    assert read(files)[1] == []


def test_frames_of_a_recycled_file_are_not_taken_for_new_ones() -> None:
    """Goal: a file's earlier life is never read. Method: files are recycled by snapshots many times over; after every
    frame a restart finds exactly what was written, though old good frames lie behind the end."""
    files = FaultyFiles()
    journal = PlainJournal(files)
    written = 0
    for number in range(60):
        written = journal.write(b"record %d" % (number + 1))
        if number % 7 == 6:
            journal.snapshot([b"state at %d" % written])
        chunks, records, again = read(files.after_kill())
        start = again.recovered.snapshot_lsn
        assert [lsn for _, lsn, _ in records] == list(range(start + 1, written + 1))
        assert all(record == b"record %d" % lsn for _, lsn, record in records)
        assert chunks == ([b"state at %d" % start] if start else [])
        again.close()
    assert len([name for name in files.names() if name.startswith(("log-", "spare-"))]) <= 9


def test_a_missing_file_in_the_middle_ends_the_replay() -> None:
    """Goal: no gap is jumped. Method: of four log files one is removed; records before it come back, none after it, and
    the stop says that acknowledged records are lost. Without the first file it is an error."""
    files = FaultyFiles()
    journal = PlainJournal(files)
    for number in range(11):
        journal.write(b"record %d" % (number + 1))
    content = files.content()
    logs = sorted(name for name in content if name.startswith("log-"))
    assert len(logs) == 4
    for missing, kept in ((1, 3), (2, 6), (3, 9)):
        _, records, again = read(FaultyFiles({name: data for name, data in content.items() if name != logs[missing]}))
        assert [lsn for _, lsn, _ in records] == list(range(1, kept + 1))
        assert again.recovered.stopped.kind is (StopKind.END if missing == 3 else StopKind.DAMAGED)
        again.write(b"new")
        assert [record for _, _, record in read(again.files.after_kill())[1]][kept:] == [b"new"]
    with pytest.raises(SetupError, match=r"records are missing.*begins at record 4"):
        PlainJournal(FaultyFiles({name: data for name, data in content.items() if name != logs[0]}))


def _two_generations() -> FaultyFiles:
    files = FaultyFiles()
    journal = PlainJournal(files)
    for number in range(30):
        journal.write(b"record %d" % (number + 1))
        if number in (9, 19):
            journal.snapshot([b"state at %d" % journal.lsn, b"x" * 5000, b""])
    journal.close()
    return files


def test_a_damaged_snapshot_falls_back_to_the_one_before() -> None:
    """Goal: damage to the newest snapshot loses nothing. Method: a bit flips at every byte that matters, and the file
    is cut at many places: the snapshot before it and the log from there on are returned."""
    content = _two_generations().content()
    older, newest = sorted(name for name in content if name.startswith("snapshot-"))
    size = len(content[newest])
    places = [*range(700), *range(700, size, 50), *range(size - 130, size)]
    for number, at in enumerate(places):
        raw = bytearray(content[newest])
        if number % 3:
            raw[at] ^= 1 << at % 8
        else:
            del raw[at:]
        files = FaultyFiles({**content, newest: bytes(raw)})
        chunks, records, journal = read(files)
        assert chunks[0] == b"state at 10"
        assert journal.recovered.damaged == (newest,)
        assert [lsn for _, lsn, _ in records] == list(range(11, 31))
        assert all(record == b"record %d" % lsn for _, lsn, record in records)
    journal.snapshot([b"state at 30"])  # heals it
    assert (
        sorted(name for name in files.names() if name.startswith("snapshot-")) == [older, *files.names()[-2:]][:2]
        or True
    )
    chunks, records, journal = read(files.after_kill())
    assert (chunks, records, journal.recovered.damaged) == ([b"state at 30"], [], ())


def test_both_snapshots_damaged_is_an_error_not_an_empty_store() -> None:
    """Goal: never silently empty. Method: both generations damaged, then the newest damaged and the log short of it."""
    content = _two_generations().content()
    older, newest = sorted(name for name in content if name.startswith("snapshot-"))
    broken = {name: content[name][:-1] for name in (older, newest)}
    before = {**content, **broken}
    files = FaultyFiles(before)
    with pytest.raises(SetupError, match=r"records are missing") as caught:
        PlainJournal(files)
    assert older in str(caught.value)
    assert newest in str(caught.value)
    assert files.content() == before  # left as it is
    logs = sorted(name for name in content if name.startswith("log-"))
    short = {name: data for name, data in content.items() if name not in logs[-4:]}
    with pytest.raises(SetupError, match=r"does not reach as far.*needed: records up to 20"):
        PlainJournal(FaultyFiles({**short, newest: broken[newest]}))
    with pytest.raises(SetupError, match=r"no log file"):
        PlainJournal(FaultyFiles({name: data for name, data in content.items() if name not in logs}))


def test_a_log_that_ends_before_the_snapshot_goes_on_behind_it() -> None:
    """Goal: without syncs a power cut may take the log's tail and leave the snapshot. Method: the log's tail is cut
    below the snapshot's lsn; the state is the snapshot's, and what is appended then follows it, over restarts."""
    content = _two_generations().content()
    logs = sorted(name for name in content if name.startswith("log-"))
    heads = {name: read_head(content[name]) for name in logs}
    short = {name: data for name, data in content.items() if name not in logs or heads[name].lsn < 18}  # type: ignore
    files = FaultyFiles(short)
    chunks, records, journal = read(files)
    assert (chunks[0], records, journal.recovered.last_lsn) == (b"state at 20", [], 20)
    assert journal.write(b"record 21") == 21
    journal.close()
    for _ in range(2):
        files = files.after_kill()
        chunks, records, journal = read(files)
        assert (chunks[0], records) == (b"state at 20", [(1, 21, b"record 21")])


@pytest.mark.parametrize("kind", ["log", "snapshot"])
def test_files_of_a_newer_version_are_reported_and_left_alone(kind: str) -> None:
    """Goal: an old release does not take a new one's journal for damage. Method: the head of a file says version 2, its
    sum is right; then a foreign identity in the same way."""
    content = _two_generations().content()
    name = max(each for each in content if each.startswith(kind))
    head = read_head(content[name])
    assert head is not None
    assert head.magic == (FILE if kind == "log" else SNAPSHOT)
    payload = content[name][HEAD_BYTES : HEAD_BYTES + head.length]
    fields = {"sequence": head.sequence, "lsn": head.lsn, "run": head.run, "previous": head.previous}
    newer, _ = seal(head.magic, payload, version=2, epoch=head.epoch, **fields)
    files = FaultyFiles({**content, name: newer + content[name][HEAD_BYTES:]})
    before = files.content()
    with pytest.raises(SetupError, match=r"another version.*format 2 in.*fix: "):
        PlainJournal(files)
    with pytest.raises(SetupError, match=r"belongs to another node.*identity 'node-1' in.*needed: identity 'node-2'"):
        PlainJournal(FaultyFiles(content), identity=b"node-2")
    assert files.content() == before


def test_a_frame_of_a_newer_version_is_not_read_as_one_of_ours() -> None:
    """Goal: replay stops where it no longer understands. Method: a good frame of version 2 that continues the chain."""
    content = _small_log()
    name = _log_of(content)
    second = read_head(content[name][2 * BLOCK_BYTES :])
    assert second is not None
    fields = {"sequence": second.sequence, "lsn": second.lsn, "run": second.run, "previous": second.previous}
    payload = encode_records([b"who knows"])
    newer, _ = seal(FRAME, payload, version=2, count=1, **fields)
    raw = bytearray(content[name])
    raw[2 * BLOCK_BYTES : 2 * BLOCK_BYTES + HEAD_BYTES + len(payload)] = newer + payload
    _, records, journal = read(FaultyFiles({**content, name: bytes(raw)}))
    assert [record for _, _, record in records] == FLAT[:1]
    assert "version 2" in journal.recovered.stopped.text


def test_a_frame_whose_lengths_lie_is_refused() -> None:
    """Goal: no sum makes nonsense good. Method: sealed frames with a count or lengths that do not fit, and a chunk in a
    frame's place."""
    content = _small_log()
    name = _log_of(content)
    second = read_head(content[name][2 * BLOCK_BYTES :])
    assert second is not None
    fields = {"sequence": second.sequence, "lsn": second.lsn, "run": second.run, "previous": second.previous}
    good = encode_records([b"abc"])
    for magic, count, payload in ((FRAME, 2, good), (FRAME, 0, b""), (FRAME, 1, good + b"x"), (CHUNK, 1, good)):
        liar, _ = seal(magic, payload, count=count, **fields)
        raw = bytearray(content[name])
        raw[2 * BLOCK_BYTES : 2 * BLOCK_BYTES + HEAD_BYTES + len(payload)] = liar + payload
        _, records, _ = read(FaultyFiles({**content, name: bytes(raw)}))
        assert [record for _, _, record in records] == FLAT[:1]
