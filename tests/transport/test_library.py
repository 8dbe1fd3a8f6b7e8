"""Which libucp is found, and that nothing is loaded or changed before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ucxkv.transport import library
from ucxkv.transport.base import PeerLost, SetupFailed, TransportError, UcxError, UsageError
from ucxkv.transport.ucx import Context, error_from_status

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, env={**os.environ, **env}
    )


def test_importing_the_transport_loads_nothing_and_changes_nothing():
    """Goal: import has no side effect. Method: a fresh interpreter; environment, mapped libraries, threads
    before/after.
    """
    done = run(
        "import os, threading, sys\n"
        "import numpy\n"
        "before = dict(os.environ), threading.active_count()\n"
        "import ucxkv.transport as t\n"
        "assert (dict(os.environ), threading.active_count()) == before\n"
        "assert t.loaded() is None and t.mapped_libucp() == () and 'ucxkv.transport._ucx' not in sys.modules\n"
        "t.load()\n"
        "assert dict(os.environ) == before[0] and len(t.mapped_libucp()) == 1\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_library_in_use_is_described():
    """Goal: doctor can say what is loaded. Method: load, look at every field, load again."""
    found = library.load()
    assert found is library.load() is library.loaded()
    assert found.version[:2] >= library.OLDEST and found.source in ("explicit", "system", "wheel")
    assert (found.directory / "libucp.so.0").exists()
    assert found.has_verbs == ("ib" in found.modules)
    assert any(str(found.directory) in path or Path(path).exists() for path in library.mapped_libucp())


def test_an_explicit_path_is_used_and_a_wrong_one_is_named():
    """Goal: the operator's choice wins. Method: fresh interpreters with the wheel's directory and with an empty one."""
    directory = library.load().directory
    done = run(
        "from ucxkv.transport import load, UsageError\n"
        f"assert load({str(directory)!r}).source == 'explicit'\n"
        f"assert load({str(directory / 'libucp.so.0')!r}).source == 'explicit'\n"
        "try: load('/usr')\n"
        "except UsageError as exc: assert 'loaded already' in str(exc)\n"
        "else: raise SystemExit(3)\n"
    )
    assert done.returncode == 0, done.stderr
    done = run(
        "from ucxkv.transport import load, SetupFailed\n"
        "try: load('/nonexistent')\n"
        "except SetupFailed as exc: assert '/nonexistent' in str(exc) or 'no libucp' in str(exc)\n"
        "else: raise SystemExit(3)\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("device", "versions", "modules", "wanted"),
    [
        (True, {"a": (1, 13, 1)}, {"a": "ib"}, "a"),  # Debian 12 with a card: older, but the only one with verbs
        (False, {"a": (1, 13, 1)}, {"a": "ib"}, "wheel"),  # the same packages without a card
        (True, {"a": (1, 13, 1)}, {}, "wheel"),  # a card, and no UCX that could use it
        (True, {"a": (1, 12, 0)}, {"a": "ib"}, "wheel"),  # too old
        (True, {"a": (1, 13, 1), "b": (1, 18, 0)}, {"a": "ib", "b": "ib"}, "a"),  # the folders' order stands
        (False, {"a": (1, 13, 1), "b": (9, 0, 0)}, {"a": "ib"}, "b"),  # newer than the wheel
        (False, {"a": ()}, {}, "wheel"),  # does not load
        (False, {}, {}, "wheel"),
    ],
)
def test_a_system_ucx_with_verbs_is_used_beside_an_rdma_device_else_the_newest(
    tmp_path, monkeypatch, device, versions, modules, wanted
):
    """Goal: an old UCX is used for its verbs only. Method: folders of each kind, with and without a device."""
    folders = []
    for name in versions:
        (tmp_path / name / "ucx").mkdir(parents=True)
        (tmp_path / name / "libucp.so.0").touch()
        if name in modules:
            (tmp_path / name / "ucx" / f"libuct_{modules[name]}.so.0").touch()
        folders.append(str(tmp_path / name))
    (tmp_path / "infiniband").mkdir()
    if device:
        (tmp_path / "infiniband" / "mlx5_0").touch()
    real = library._probe
    monkeypatch.setattr(library, "_SYSTEM_DIRECTORIES", tuple(folders))
    monkeypatch.setattr(library, "_RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(library, "_probe", lambda path: versions[path.name] if str(path) in folders else real(path))
    directory, source = library._find(None)
    if wanted == "wheel":
        assert source == "wheel" and directory.parent.name == "libucx"
    else:
        assert (directory, source) == (tmp_path / wanted, "system")


def test_a_system_ucx_is_asked_for_its_version_in_another_process(tmp_path, monkeypatch):
    """Goal: a rejected library is not mapped here. Method: a copy of the wheel's as the system's: equal, so unused."""
    wheel = library._wheel_directory()
    assert wheel is not None
    for name in ("libucs.so.0", "libuct.so.0", "libucp.so.0", "libucm.so.0"):
        (tmp_path / name).write_bytes((wheel / name).read_bytes())
    monkeypatch.setattr(library, "_SYSTEM_DIRECTORIES", (str(tmp_path),))
    assert library._probe(tmp_path) == library._probe(wheel) >= library.OLDEST
    assert library._find(None) == (wheel, "wheel")
    assert not any(str(tmp_path) in path for path in library.mapped_libucp())


def test_a_second_libucp_in_the_process_is_reported(tmp_path):
    """Goal: vLLM + NIXL + us is detected. Method: map a copy of libucp under another path before ours."""
    directory = library.load().directory
    for name in ("libucs.so.0", "libuct.so.0", "libucp.so.0", "libucm.so.0"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    done = run(
        "import mmap\n"
        f"file = open({str(tmp_path / 'libucp.so.0')!r}, 'rb')\n"
        "other = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "from ucxkv.transport import load\n"
        f"assert load().others == ({str(tmp_path / 'libucp.so.0')!r},), load().others\n"
    )
    assert done.returncode == 0, done.stderr


def test_our_settings_yield_to_the_users_variables():
    """Goal: UCX_ variables of the user win, and ours never reach the environment. Method: fresh interpreter."""
    done = run(
        "import os\n"
        "from ucxkv.transport import Context\n"
        "with Context(transports='tcp,self') as context:\n"
        "    assert 'KEEPALIVE_INTERVAL' not in context.settings\n"
        "    assert context.settings['TCP_TX_SEG_SIZE'] == '256k' and context.unknown_settings_count == 0\n"
        "assert 'UCX_TCP_TX_SEG_SIZE' not in os.environ and 'UCX_TLS' not in os.environ\n",
        UCX_KEEPALIVE_INTERVAL="3s",
    )
    assert done.returncode == 0, done.stderr


def test_the_segment_size_that_crashes_receivers_is_refused():
    """Goal: UCX_POSIX_SEG_SIZE >= 64k never runs. Method: as a setting, and as the user's variable."""
    for value in ("64k", "65536", "1M"):
        with pytest.raises(SetupFailed, match="crashes"):
            Context(transports="posix,self", settings={"POSIX_SEG_SIZE": value})
    done = run(
        "from ucxkv.transport import Context, SetupFailed\n"
        "try: Context()\n"
        "except SetupFailed: pass\n"
        "else: raise SystemExit(3)\n",
        UCX_POSIX_SEG_SIZE="128k",
    )
    assert done.returncode == 0, done.stderr


def test_transports_that_do_not_exist_are_a_setup_error():
    """Goal: the message names what was asked for. Method: a nonsense transport."""
    with pytest.raises(SetupFailed, match="nosuch"):
        Context(transports="nosuch").close()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (-25, PeerLost),
        (-80, PeerLost),
        (-6, PeerLost),
        (-3, PeerLost),
        (-16, TransportError),
        (-1000, UsageError),
        (-22, UcxError),
    ],
)
def test_statuses_become_the_errors_their_readers_act_on(status, kind):
    """Goal: the tree splits by what to do next. Method: one status of each class; the text has UCX's words."""
    error = error_from_status(status, "doing it")
    assert type(error) is kind or isinstance(error, kind)
    assert str(error).startswith("doing it: ")
