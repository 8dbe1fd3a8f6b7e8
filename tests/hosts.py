"""Several hosts on one machine: network namespaces on a bridge, and what goes wrong between real hosts.

Promises
  - Every host is a namespace of its own with `eth0`; the addresses 10.77.0.x exist inside of these namespaces only.
  - `with Hosts(...)` ends every process that still runs in its namespaces and removes them, whatever the test did.
    What a killed test run left behind is removed by the next one (namespaces carry the pid and the start of their
    maker).
  - Faults act on the receiver's side, so that a sender sees what a real network shows: silence, never a local error.
  - A test body decorated with `in_host("b")` runs in a process inside of host b. It gets a copy of the fixture
  that owns
    nothing and can do everything else: cause faults, heal them, start nodes on other hosts.

netem is missing from many kernels, so loss is nftables (numgen), rate is tbf and delay is a relay between two TUN
devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import importlib
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from tests.harness import ROOT, NodeProcess

__all__ = ["Hosts", "in_host", "why_not"]

_PREFIX = "ukv"
_NETNS = Path("/run/netns")
_NETWORK = "10.77.0"
_BODY_S = 100.0
_RELAY_TABLE = "77"
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001
_PACKETS_MAX = 20_000
"""What the relay holds at once; more is dropped, as a router does."""


def why_not() -> str:
    """Why no namespaces can be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            return f"{tool} is missing (Debian: apt-get install {package})"
    probe = f"{_PREFIX}-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no namespaces here: {made.stderr.strip()}"
    rules = subprocess.run(
        ["ip", "netns", "exec", probe, "nft", "add", "table", "ip", "probe"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return f"no nftables here: {rules.stderr.strip()}" if rules.returncode else ""


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _call(*argv: str, stdin: str | None = None, timeout_s: float = 30.0) -> str:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Hosts by name, each with one address; `with Hosts("a", "b") as hosts`. See the module for `in_host`."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._tag = f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}"
        self._owner = os.getpid()

    # ---- making and removing

    def __enter__(self) -> Self:
        _remove_stale()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _build(self) -> None:
        switch = self.namespace("switch")
        _call("ip", "netns", "add", switch)
        self.ip("switch", "link", "add", "bridge", "type", "bridge")
        self.ip("switch", "link", "set", "bridge", "up")
        for name in self.names:
            space = self.namespace(name)
            _call("ip", "netns", "add", space)
            self.ip(
                "switch", "link", "add", "name", f"port-{name}", "type", "veth", "peer", "name", "eth0", "netns", space
            )
            self.ip("switch", "link", "set", f"port-{name}", "master", "bridge", "up")
            self.ip(name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self.ip(name, "link", "set", "lo", "up")
            self.ip(name, "link", "set", "eth0", "up")
            for where in ("all", "eth0"):
                self.sysctl(name, f"net/ipv4/conf/{where}/rp_filter", "0")
            self.heal_rules(name)

    def close(self) -> None:
        """End what runs in the namespaces and remove them. Idempotent."""
        if os.getpid() == self._owner:
            for name in (*self.names, "switch"):
                _remove(self.namespace(name))

    # ---- what a host is

    def namespace(self, name: str) -> str:
        """The network namespace's name."""
        return f"{self._tag}-{name}"

    def address(self, name: str) -> str:
        """The host's IPv4 address, 10.77.0.x."""
        return f"{_NETWORK}.{self.names.index(name) + 1}"

    def argv(self, name: str, *command: str) -> list[str]:
        """The command that runs `command` inside of a host."""
        return ["ip", "netns", "exec", self.namespace(name), *command]

    def run(self, name: str, *command: str, stdin: str | None = None, timeout_s: float = 30.0) -> str:
        """Run a command inside of a host; its output. Raises RuntimeError with what it wrote when it fails."""
        return _call(*self.argv(name, *command), stdin=stdin, timeout_s=timeout_s)

    def ip(self, name: str, *command: str) -> str:
        """The `ip` command inside of a host or the switch."""
        return _call("ip", "-n", self.namespace(name), *command)

    def sysctl(self, name: str, key: str, value: str) -> None:
        """Set a kernel setting (its path below /proc/sys) of a host."""
        self.run(name, "sh", "-c", f"echo {value} > /proc/sys/{key}")

    def node(
        self, name: str, node_name: str | None = None, *, port: int = 0, listen: str = "", **options: str | bool
    ) -> NodeProcess:
        """A node inside of a host, listening on the host's address, or on `listen`."""
        prefix, listen = tuple(self.argv(name)), listen or f"{self.address(name)}:{port}"
        flags: dict[str, Any] = options
        return NodeProcess(node_name or f"n-{name}", listen=listen, prefix=prefix, **flags)

    # ---- faults

    def drop(self, source: str, target: str) -> None:
        """What `source` sends is lost before `target`; the other direction works."""
        self._rule(target, f"ip saddr {self.address(source)} drop")

    def partition(self, one: str, other: str) -> None:
        """Nothing passes between two hosts; both stay up and nobody is told."""
        self.drop(one, other)
        self.drop(other, one)

    def lose(self, source: str, target: str, percent: int) -> None:
        """This share of the packets from `source` to `target` is lost, at random."""
        self._rule(target, f"ip saddr {self.address(source)} numgen random mod 100 < {percent} drop")

    def refuse_new(self, name: str) -> None:
        """New TCP connections to this host vanish, as with a full backlog; the ones it has go on."""
        self._rule(name, "tcp flags & (syn|ack) == syn drop")

    def unplug(self, name: str) -> None:
        """The host's cable is out: nothing of it, no reset and no goodbye, reaches anybody."""
        self.ip("switch", "link", "set", f"port-{name}", "down")

    def plug(self, name: str) -> None:
        """The cable is back."""
        self.ip("switch", "link", "set", f"port-{name}", "up")

    def limit_rate(self, name: str, megabit_s: int) -> None:
        """The host sends at most this much."""
        self.run(
            name, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf",
            "rate", f"{megabit_s}mbit", "burst", "128kb", "latency", "100ms",
        )  # fmt: skip

    def delay(self, one: str, other: str, seconds: float) -> Relay:
        """Packets between two hosts take this much longer each way, until the relay is closed."""
        return Relay(self, one, other, seconds)

    def _rule(self, name: str, text: str) -> None:
        self.run(name, "nft", "add", "rule", "ip", "faults", "input", *text.split())

    def heal_rules(self, name: str) -> None:
        """Remove this host's drops and losses."""
        table = "table ip faults\ndelete table ip faults\n"
        chain = "table ip faults {\n chain input {\n  type filter hook input priority 0;\n }\n}\n"
        self.run(name, "nft", "-f", "-", stdin=table + chain)

    def heal(self) -> None:
        """Undo every fault but the relays."""
        for name in self.names:
            self.plug(name)
            self.heal_rules(name)
            with contextlib.suppress(RuntimeError):
                self.run(name, "tc", "qdisc", "del", "dev", "eth0", "root")


def _remove(space: str) -> None:
    """End the processes of one namespace and remove it."""
    if not (_NETNS / space).exists():
        return
    for _ in range(50):
        pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
        mine = [int(pid) for pid in pids.split() if int(pid) != os.getpid()]
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not mine:
            break
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _remove_stale() -> None:
    """Remove the namespaces of test runs that are gone."""
    for space in list(_NETNS.glob(f"{_PREFIX}-*")):
        _, pid, start, *_ = [*space.name.split("-"), "", "", ""]
        if pid.isdigit() and _started(int(pid)) != start:
            _remove(space.name)


# ---- delay


class Relay:
    """Two TUN devices, one in each host, and a process that carries packets between them after a while."""

    def __init__(self, hosts: Hosts, one: str, other: str, seconds: float) -> None:
        self._hosts = hosts
        self._ends = ((one, other), (other, one))
        argv = [sys.executable, "-c", "from tests.hosts import relay_main; relay_main()"]
        argv += [hosts.namespace(one), hosts.namespace(other), str(seconds)]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the relay did not start")
        for here, there in self._ends:
            hosts.sysctl(here, "net/ipv6/conf/relay/disable_ipv6", "1")
            hosts.ip(here, "link", "set", "relay", "up")
            # UCX takes a host for unreachable when the most specific route in any table leads over a device without an
            # address: a default route in a table of its own, chosen by a rule.
            hosts.ip(
                here, "route", "replace", "default", "dev", "relay", "src", hosts.address(here), "table", _RELAY_TABLE
            )
            hosts.ip(here, "rule", "add", "to", hosts.address(there), "lookup", _RELAY_TABLE)
            hosts.sysctl(here, "net/ipv4/conf/relay/rp_filter", "0")

    def close(self) -> None:
        """Packets take the direct way again; those on their way are lost. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None and not self._process.stdout.closed:
            self._process.stdout.close()
            for here, there in self._ends:
                self._hosts.ip(here, "rule", "del", "to", self._hosts.address(there), "lookup", _RELAY_TABLE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def relay_main() -> None:
    """The relay's process: namespace, namespace, seconds. Ends when its starter closes the pipe or kills it."""
    import ctypes
    import select

    libc = ctypes.CDLL(None, use_errno=True)
    ends = []
    for space in sys.argv[1:3]:
        with open(_NETNS / space) as handle:
            if libc.setns(handle.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"relay", _IFF_TUN_NO_PI))
        ends.append(tun)
    seconds = float(sys.argv[3])
    print("ready", flush=True)
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for tun in select.select(ends, [], [], pause)[0]:
            other = ends[1 - ends.index(tun)]
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(tun, 65536)
                    if len(waiting) < _PACKETS_MAX:
                        waiting.append((time.monotonic() + seconds, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, other, packet = waiting.popleft()
            with contextlib.suppress(OSError):
                os.write(other, packet)


# ---- test bodies inside of a host

_CHILD = "from tests.hosts import child_main; child_main()"


def in_host(name: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run an async test's body in a process inside of host `name`; its fixtures and parameters are to be picklable."""

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            hosts: Hosts = arguments["hosts"]
            call = pickle.dumps((body.__module__, body.__name__, arguments))
            argv = hosts.argv(name, sys.executable, "-W", "error", "-X", "dev", "-c", _CHILD)
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
            )
            try:
                out, err = process.communicate(call, timeout=_BODY_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # faulthandler says where it hangs
                _, err = process.communicate(timeout=10)
                pytest.fail(f"the body did not end within {_BODY_S:.0f} s\n{err.decode()[-6000:]}")
            text = err.decode(errors="replace")
            if process.returncode:
                pytest.fail(f"in host {name} (exit {process.returncode}):\n{text[-8000:]}", pytrace=False)
            noise = [line for line in text.splitlines() if "Exception ignored" in line or "never retrieved" in line]
            assert not noise, text[-4000:]
            assert out.endswith(b"done\n"), out

        return test

    return decorate


def child_main() -> None:
    """The process of one test body."""
    module, name, arguments = pickle.loads(sys.stdin.buffer.read())
    body = getattr(importlib.import_module(module), name).__wrapped__
    try:
        asyncio.run(body(**arguments))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    print("done", flush=True)
