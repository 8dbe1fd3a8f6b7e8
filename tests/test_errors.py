"""The tree of errors: what callers catch, what messages carry, and that errors cross process borders."""

from __future__ import annotations

import inspect
import pickle

import pytest

import ucxkv.errors as errors
from ucxkv.errors import (
    ClientClosed,
    DeadlineExceeded,
    ForkError,
    IntegrityError,
    JournalFailed,
    NotLeader,
    Overloaded,
    SetupError,
    StaleError,
    UcxKvError,
    Unavailable,
    UsageError,
    ValueTooLarge,
    VersionConflict,
    VersionMismatch,
)

EVERY = [getattr(errors, name) for name in errors.__all__]


def test_every_error_is_in_one_tree_and_says_what_to_do_next() -> None:
    """Goal: one base catches all, each class documents its remedy. Method: walk the module's public names."""
    for kind in EVERY:
        assert issubclass(kind, UcxKvError)
        assert len(inspect.getdoc(kind) or "") > 40
    defined = [x for x in vars(errors).values() if inspect.isclass(x) and issubclass(x, UcxKvError)]
    assert set(defined) == set(EVERY)


def test_branches_of_the_tree_follow_what_the_caller_does_next() -> None:
    """Goal: catching a branch catches exactly its leaves. Method: the subclass relation, in full."""
    branches = {UsageError, Unavailable, StaleError, IntegrityError, SetupError}
    parent = {
        ValueTooLarge: UsageError,
        ClientClosed: UsageError,
        ForkError: UsageError,
        DeadlineExceeded: Unavailable,
        Overloaded: Unavailable,
        NotLeader: Unavailable,
        VersionConflict: StaleError,
        VersionMismatch: SetupError,
        JournalFailed: SetupError,
    }
    for kind in EVERY:
        above = {branch for branch in branches if issubclass(kind, branch)}
        assert above == ({parent.get(kind, kind)} & branches)


def test_errors_are_also_the_builtin_that_fits() -> None:
    """Goal: plain Python code catches them naturally. Method: raise, then catch as ValueError and TimeoutError."""
    with pytest.raises(ValueError, match="fix it"):
        raise UsageError("fix it")
    with pytest.raises(TimeoutError, match="late"):
        raise DeadlineExceeded("late")


def test_a_message_carries_key_node_and_epoch_when_they_are_known() -> None:
    """Goal: a log line is enough to find the block. Method: str() with all, some and none of the facts."""
    full = Unavailable("node died", key=b"\x01" * 16, node="n1", epoch=7)
    assert str(full) == f"node died (key={'01' * 16}, node=n1, epoch=7)"
    assert full.message == "node died"
    assert str(Unavailable("node died", node="n1")) == "node died (node=n1)"
    assert str(Unavailable("node died")) == "node died"


def test_a_setup_error_names_what_was_found_needed_and_the_fix() -> None:
    """Goal: an operator can act on the text alone. Method: str() holds all three parts."""
    error = SetupError("cannot lock memory", found="64 KiB", needed="4 GiB", fix="ulimit -l unlimited")
    assert str(error) == "cannot lock memory; found: 64 KiB; needed: 4 GiB; fix: ulimit -l unlimited"


@pytest.mark.parametrize("kind", EVERY)
def test_errors_survive_pickling(kind: type[UcxKvError]) -> None:
    """Goal: an error raised in a worker process reaches its parent whole. Method: pickle round trip of every class."""
    error = (
        kind("what happened", key=b"k" * 16) if "key" in inspect.signature(kind).parameters else kind("what happened")
    )
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_the_numbers_of_specific_errors_are_kept() -> None:
    """Goal: callers can compute with them. Method: attributes, also after pickling."""
    large = pickle.loads(pickle.dumps(ValueTooLarge("too large", size_bytes=10, limit_bytes=4)))
    assert (large.size_bytes, large.limit_bytes) == (10, 4)
    assert pickle.loads(pickle.dumps(Overloaded("busy", retry_after_s=0.5))).retry_after_s == 0.5
