"""The control plane's one file: an SQLite database in WAL mode that the processes of one machine share. Blocking calls.

Invariants
  - Every change is one transaction, synced to disk (synchronous=FULL) before it is answered, and takes the next
    revision; `changes` holds the last HISTORY of them, so that a watcher can be shown each one or be told of the gap.
  - Leases are judged by CLOCK_BOOTTIME, which all processes of the machine share and which counts its sleep. A row of
    another boot is over. Whoever looks ends what is over, so that no process has to live for it.
  - The file under the path is the one that was opened: a replaced or deleted file is refused, never written on.

    meta     one row: revision, and the revision up to which history was dropped
    entries  key (UTF-8), value, revision, lease or null
    leases   id, seconds granted, end (CLOCK_BOOTTIME ns), the machine's boot id
    changes  revision, key, value (null: deleted)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ucxkv import errors
from ucxkv.control.base import Change, ChangeKind, Conflict, Entry, LeaseLost, OutcomeUnknown, prefix_end

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["SqliteFile"]

APPLICATION_ID: Final = 0x75637876
SCHEMA_VERSION: Final = 1
HISTORY: Final = 4096
"""Changes kept: a cluster changes its configuration a few times a second at worst, watchers look 20 times a second."""
_TRIM_EVERY = 256
_BUSY_S = 3.0
_BATCH = 500

_SCHEMA = """
CREATE TABLE meta (revision INTEGER NOT NULL, dropped INTEGER NOT NULL);
CREATE TABLE leases (id INTEGER PRIMARY KEY, ttl_s REAL NOT NULL, until_ns INTEGER NOT NULL, boot TEXT NOT NULL);
CREATE TABLE entries (key BLOB PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL, lease INTEGER)
  WITHOUT ROWID;
CREATE INDEX entries_by_lease ON entries (lease) WHERE lease IS NOT NULL;
CREATE TABLE changes (revision INTEGER PRIMARY KEY, key BLOB NOT NULL, value BLOB);
INSERT INTO meta VALUES (0, 0);
"""


class SqliteFile:
    """One connection; every call from the thread that made it.

    Raises SetupError when the file is none of ours, damaged, read-only, of a newer version or on a full disk,
    Unavailable when another process holds it for longer than _BUSY_S.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._revision = 0
        self._data_version = -1
        self._first_end_ns: int | None = None
        try:
            if not path.exists():  # never open what is there: closing it ends this process's locks on it, SQLite's too
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._inode = self._inode_now()
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        except OSError as exc:
            raise _cannot_open(path, exc.strerror or str(exc)) from exc
        except sqlite3.Error as exc:
            raise _cannot_open(path, str(exc)) from exc
        try:
            with self._mapped():
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._db.close()

    # ---- the calls

    def get(self, key: str) -> Entry | None:
        """The key's state."""
        with self._mapped():
            self._end_what_is_over()
            row = self._db.execute("SELECT value, revision FROM entries WHERE key = ?", (key.encode(),)).fetchone()
        return None if row is None else Entry(key, row[0], row[1])

    def list(self, prefix: str) -> tuple[list[Entry], int]:
        """The entries of a prefix, and the revision of the picture."""
        with self._mapped():
            self._end_what_is_over()
            with self._transaction("DEFERRED"):
                where, bounds = _range_of(prefix)
                rows = self._db.execute(
                    f"SELECT key, value, revision FROM entries WHERE {where} ORDER BY key", bounds
                ).fetchall()
                (revision,) = self._db.execute("SELECT revision FROM meta").fetchone()
        return [Entry(row[0].decode(), row[1], row[2]) for row in rows], revision

    def compare_and_set(self, key: str, expected_revision: int, value: bytes | None, lease_id: int) -> Entry | None:
        """See `ControlPlane.compare_and_set`; lease_id 0: none."""
        with self._mapped(), self._transaction("IMMEDIATE"):
            self._end_leases(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
            row = self._db.execute("SELECT value, revision FROM entries WHERE key = ?", (key.encode(),)).fetchone()
            if (row[1] if row else 0) != expected_revision:
                current = Entry(key, row[0], row[1]) if row else None
                raise Conflict(f"{key} is not at revision {expected_revision}", current=current)
            if lease_id and not self._db.execute("SELECT 1 FROM leases WHERE id = ?", (lease_id,)).fetchone():
                raise LeaseLost(f"the lease {lease_id:#x} for {key} is over")
            revision = self._change(key.encode(), value, lease_id)
        return None if value is None else Entry(key, value, revision)

    def grant(self, ttl_s: float) -> int:
        """A new lease's id."""
        lease_id = secrets.randbits(62) | 1
        with self._mapped(), self._transaction("IMMEDIATE"):
            now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            row = (lease_id, ttl_s, now_ns + int(ttl_s * 1e9), self._boot)
            self._db.execute("INSERT INTO leases VALUES (?, ?, ?, ?)", row)
            self._first_end_ns = min(self._first_end_ns or row[2], row[2])
        return lease_id

    def renew(self, lease_id: int) -> float | None:
        """Its time anew; None when it is over."""
        with self._mapped(), self._transaction("IMMEDIATE"):
            now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            self._end_leases(now_ns)
            row = self._db.execute("SELECT ttl_s FROM leases WHERE id = ?", (lease_id,)).fetchone()
            if row is None:
                return None
            self._db.execute("UPDATE leases SET until_ns = ? WHERE id = ?", (now_ns + int(row[0] * 1e9), lease_id))
        return float(row[0])

    def end_lease(self, lease_id: int) -> None:
        """End it with its keys."""
        with self._mapped(), self._transaction("IMMEDIATE"):
            self._end_lease(lease_id)

    # ---- for watches

    def poll(self) -> int:
        """The newest revision; ends what is over. Costs one PRAGMA when nothing happened since the last call."""
        with self._mapped():
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            if version != self._data_version or (self._first_end_ns is not None and now_ns >= self._first_end_ns):
                self._end_what_is_over()
                (self._revision,) = self._db.execute("SELECT revision FROM meta").fetchone()
                (self._first_end_ns,) = self._db.execute("SELECT min(until_ns) FROM leases").fetchone()
                self._data_version = version
        return self._revision

    def changes_after(self, prefix: str, revision: int) -> tuple[Sequence[Change] | None, int]:
        """A batch of the prefix's changes after `revision` and the revision that it reaches; None: history is gone."""
        with self._mapped(), self._transaction("DEFERRED"):
            newest, dropped = self._db.execute("SELECT revision, dropped FROM meta").fetchone()
            if not dropped <= revision <= newest:
                return None, newest
            where, bounds = _range_of(prefix)
            rows = self._db.execute(
                f"SELECT revision, key, value FROM changes WHERE revision > ? AND {where} ORDER BY revision LIMIT ?",
                (revision, *bounds, _BATCH),
            ).fetchall()
        changes = [
            Change(ChangeKind.DELETE if value is None else ChangeKind.PUT, Entry(key.decode(), value or b"", at))
            for at, key, value in rows
        ]
        return changes, rows[-1][0] if len(rows) == _BATCH else newest

    def drop_history(self, revision: int) -> None:
        """Forget the changes up to `revision`."""
        with self._mapped(), self._transaction("IMMEDIATE"):
            self._drop(min(revision, self._newest()))

    # ---- inside a transaction

    def _change(self, key: bytes, value: bytes | None, lease_id: int) -> int:
        revision = self._newest() + 1
        self._db.execute("UPDATE meta SET revision = ?", (revision,))
        self._db.execute("INSERT INTO changes VALUES (?, ?, ?)", (revision, key, value))
        if value is None:
            self._db.execute("DELETE FROM entries WHERE key = ?", (key,))
        else:
            row = (key, value, revision, lease_id or None)
            self._db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", row)
        if revision % _TRIM_EVERY == 0 and revision > HISTORY:
            self._drop(revision - HISTORY)
        self._data_version = -1  # one's own changes do not move PRAGMA data_version
        return revision

    def _newest(self) -> int:
        (revision,) = self._db.execute("SELECT revision FROM meta").fetchone()
        return int(revision)

    def _drop(self, revision: int) -> None:
        self._db.execute("DELETE FROM changes WHERE revision <= ?", (revision,))
        self._db.execute("UPDATE meta SET dropped = max(dropped, ?)", (revision,))

    def _end_lease(self, lease_id: int) -> None:
        keys = self._db.execute("SELECT key FROM entries WHERE lease = ? ORDER BY key", (lease_id,)).fetchall()
        for (key,) in keys:
            self._change(key, None, 0)
        self._db.execute("DELETE FROM leases WHERE id = ?", (lease_id,))

    def _end_leases(self, now_ns: int) -> None:
        over = self._db.execute("SELECT id FROM leases WHERE until_ns <= ? OR boot <> ?", (now_ns, self._boot))
        for (lease_id,) in over.fetchall():
            self._end_lease(lease_id)

    def _end_what_is_over(self) -> None:
        """Outside a transaction: opens one only when a lease is over."""
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        over = "SELECT EXISTS (SELECT 1 FROM leases WHERE until_ns <= ? OR boot <> ?)"
        if self._db.execute(over, (now_ns, self._boot)).fetchone()[0]:
            with self._transaction("IMMEDIATE"):
                self._end_leases(now_ns)

    # ---- the file

    def _prepare(self) -> None:
        (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise _cannot_open(self.path, f"its file system allows journal mode {mode} only, not WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        if not self._is_ours():
            with self._transaction("IMMEDIATE"):
                if not self._is_ours():
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        problems = self._db.execute("PRAGMA quick_check(1)").fetchall()
        if problems != [("ok",)]:
            raise _damaged(self.path, str(problems[0][0]))

    def _is_ours(self) -> bool:
        """False for an empty file. Raises SetupError for anybody else's, or one of a newer ucxkv."""
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if application == APPLICATION_ID:
            if version > SCHEMA_VERSION:
                raise errors.SetupError(
                    f"the control file {self.path} was made by a newer ucxkv",
                    found=f"schema version {version}",
                    needed=f"at most {SCHEMA_VERSION}",
                    fix="upgrade ucxkv on this machine to the release that made it",
                )
            return True
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application or version or tables:
            raise errors.SetupError(
                f"{self.path} is another program's database",
                found=f"application id {application:#x}",
                needed="an absent or empty file, or one that ucxkv made",
                fix="name another file in --cluster sqlite:///PATH",
            )
        return False

    def _inode_now(self) -> tuple[int, int]:
        found = os.stat(self.path)
        return found.st_dev, found.st_ino

    @contextlib.contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        if kind == "IMMEDIATE":
            try:
                same = self._inode_now() == self._inode
            except OSError:
                same = False
            if not same:
                raise errors.SetupError(
                    f"the control file {self.path} was deleted or replaced while it was in use",
                    fix="put it back, or restart every process of the cluster on the new one",
                )
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as exc:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            if kind == "IMMEDIATE" and _code_of(exc) == sqlite3.SQLITE_IOERR:
                raise OutcomeUnknown(f"the control file {self.path} could not be synced: {exc}") from exc
            raise

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            code = _code_of(exc)
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise _damaged(self.path, str(exc)) from exc
            if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
                raise _cannot_open(self.path, str(exc)) from exc
            if code == sqlite3.SQLITE_FULL:
                raise errors.SetupError(
                    f"no space left for the control file {self.path}",
                    fix=f"free space on the disk of {self.path.parent}",
                ) from exc
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise errors.Unavailable(
                    f"another process holds the control file {self.path} for more than {_BUSY_S:.0f} s"
                ) from exc
            raise errors.Unavailable(f"the control file {self.path} can't be used now: {exc}") from exc


def _range_of(prefix: str) -> tuple[str, tuple[bytes, ...]]:
    first = prefix.encode()
    end = prefix_end(first)
    return ("key >= ?", (first,)) if end is None else ("key >= ? AND key < ?", (first, end))


def _code_of(exc: sqlite3.Error) -> int:
    """The primary result code, 0 when SQLite gave none."""
    return int(getattr(exc, "sqlite_errorcode", 0)) & 0xFF


def _cannot_open(path: Path, why: str) -> errors.SetupError:
    return errors.SetupError(
        f"the control file {path} can't be used: {why}",
        needed="a file on a local disk that this user may write, in a folder that this user may write",
        fix=f"mkdir -p {path.parent} && touch {path} && chown $USER {path.parent} {path}, or name another path",
    )


def _damaged(path: Path, why: str) -> errors.SetupError:
    return errors.SetupError(
        f"the control file {path} is damaged: {why}",
        needed="an SQLite database that ucxkv made",
        fix=f"stop the cluster's processes, move {path} and its -wal and -shm files away, start them again: members "
        "register anew, shards start with new epochs",
    )
