"""Addresses of interfaces: this machine's, asked of the kernel, and those of a made-up one."""

from __future__ import annotations

import ipaddress
import json
import shutil
import socket
import subprocess

import pytest

from ucxkv.transport.netlink import Network, interface_addresses, interface_of

MACHINE: dict[str, tuple[Network, ...]] = {
    "lo": (ipaddress.IPv4Interface("127.0.0.1/8"), ipaddress.IPv6Interface("::1/128")),
    "eth0": (ipaddress.IPv4Interface("10.0.0.5/24"), ipaddress.IPv6Interface("fe80::1/64")),
    "eth1": (ipaddress.IPv4Interface("10.0.1.5/24"), ipaddress.IPv6Interface("fe80::1/64")),
}


def test_the_kernel_answers_as_it_answers_ip() -> None:
    """Goal: every address with its prefix. Method: `ip -json addr` beside it."""
    if shutil.which("ip") is None:
        pytest.skip("ip is missing (Debian: apt-get install iproute2)")
    shown = json.loads(subprocess.run(["ip", "-json", "addr"], capture_output=True, check=True).stdout)
    wanted = {
        link["ifname"]: {f"{address['local']}/{address['prefixlen']}" for address in link["addr_info"]}
        for link in shown
        if link["addr_info"]
    }
    found = interface_addresses()
    assert {name: {str(address) for address in addresses} for name, addresses in found.items()} == wanted


def test_the_loopback_is_found_by_a_real_connection() -> None:
    """Goal: from a socket to its interface. Method: both ends of a connection over 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert interface_of(client.getsockname()[0], interface_addresses()) == "lo"


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1", "lo"),
        ("127.8.8.8", "lo"),
        ("::1", "lo"),
        ("10.0.0.5", "eth0"),
        ("::ffff:10.0.1.5", "eth1"),
        ("fe80::1%eth1", "eth1"),
        ("fe80::1%eth0", "eth0"),
        ("10.0.0.6", ""),
        ("node-1", ""),
        ("", ""),
    ],
)
def test_an_address_names_its_interface(host: str, name: str) -> None:
    """Goal: nothing is guessed. Method: own, foreign, mapped, link-local and no addresses."""
    assert interface_of(host, MACHINE) == name
    assert interface_of(host, {}) == ""
