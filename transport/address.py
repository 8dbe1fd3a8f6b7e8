"""Addresses of control connections, as text and as values.

    host:port            a name or an IPv4 address
    [ipv6]:port          an IPv6 address, with an optional zone: [fe80::1%eth0]:13337
    unix:@name           a Unix socket in the abstract namespace (Linux; no file, gone with its last owner)
    unix:/path           a Unix socket in the file system

`parse_address(format_address(a)) == a` for every address; `format_address(parse_address(t))` is `t` in canonical form.
Anything else is refused with the offending text in the message; nothing is resolved here.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from .base import UsageError

__all__ = ["Address", "AddressError", "TcpAddress", "UnixAddress", "format_address", "parse_address"]

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)\Z")
_ZONE = re.compile(r"[A-Za-z0-9_.:-]{1,15}\Z")  # interface names: IFNAMSIZ - 1
_UNIX_NAME_BYTES = 107  # sun_path is 108 bytes: one for the leading or closing NUL


class AddressError(UsageError, ValueError):
    """The text is no address; the message quotes it and says what is wrong."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP address. host: name, IPv4 or IPv6 (no brackets, zone kept); port: 0 asks the system for a free one."""

    host: str
    port: int

    def __post_init__(self) -> None:
        _check_host(self.host, self.host)
        if not 0 <= self.port <= 65535:
            raise AddressError(f"port {self.port} of host {self.host!r} is not within 0..65535")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True when the host is the loopback by its text (`localhost` counts, other names are not resolved)."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix stream socket. name: the abstract name without its `@`, or the path."""

    name: str
    is_abstract: bool = True

    def __post_init__(self) -> None:
        text = f"unix:{'@' if self.is_abstract else ''}{self.name}"
        size = len(self.name.encode("utf-8", "surrogateescape"))
        if not self.name:
            raise AddressError(f"{text!r} has an empty name")
        if "\0" in self.name:
            raise AddressError(f"{text!r} has a NUL in its name")
        if size > _UNIX_NAME_BYTES:
            raise AddressError(f"{text!r} is {size} bytes long, a Unix socket's name has at most {_UNIX_NAME_BYTES}")
        if not self.is_abstract and not self.name.startswith("/"):
            raise AddressError(f"{text!r} is a relative path: write unix:/absolute/path or unix:@name")

    def __str__(self) -> str:
        return f"unix:{'@' if self.is_abstract else ''}{self.name}"

    @property
    def sockaddr(self) -> str:
        """What `socket.bind` and `connect` take."""
        return f"\0{self.name}" if self.is_abstract else self.name


Address = TcpAddress | UnixAddress


def format_address(address: Address) -> str:
    """The canonical text of an address."""
    return str(address)


def parse_address(text: str, *, default_port: int | None = None) -> Address:
    """Read an address; with `default_port` a bare host, IPv4 or (unbracketed) IPv6 is accepted too.

    Raises AddressError with the offending text.
    """
    if not isinstance(text, str):
        raise AddressError(f"an address is a string such as '127.0.0.1:13337', not {type(text).__name__}")
    if text.startswith("unix:"):
        rest = text[len("unix:") :]
        return UnixAddress(rest[1:], True) if rest.startswith("@") else UnixAddress(rest, False)
    if "://" in text:
        raise AddressError(f"{text!r} is a URL: write host:port, [ipv6]:port or unix:@name")
    if text.startswith("["):
        host, closing, tail = text[1:].partition("]")
        if not closing:
            raise AddressError(f"{text!r} has no closing bracket")
        if ":" not in host:
            raise AddressError(f"{text!r} has no IPv6 address in its brackets")
        if tail and not tail.startswith(":"):
            raise AddressError(f"{text!r} has {tail!r} after the bracket where :port is expected")
        port_text = tail[1:] if tail else None
    elif text.count(":") > 1:
        if not _is_ipv6(text):
            raise AddressError(f"{text!r} is neither host:port nor an IPv6 address")
        if default_port is None:
            raise AddressError(f"{text!r} has no port: write [{text}]:port")
        host, port_text = text, None
    else:
        host, colon, tail = text.partition(":")
        port_text = tail if colon else None
    _check_host(host, text)
    if port_text is not None:
        return TcpAddress(host, _port(port_text, text))
    if default_port is None:
        raise AddressError(f"{text!r} has no port: write {text}:port")
    return TcpAddress(host, default_port)


def _port(digits: str, text: str) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5):
        raise AddressError(f"{text!r} has {digits!r} where a port (0..65535) is expected")
    port = int(digits)
    if port > 65535:
        raise AddressError(f"{text!r} has port {port}, the largest is 65535")
    return port


def _is_ipv6(host: str) -> bool:
    plain, percent, zone = host.partition("%")
    if percent and not _ZONE.match(zone):
        return False
    try:
        ipaddress.IPv6Address(plain)
    except ValueError:
        return False
    return True


def _check_host(host: str, text: str) -> None:
    if ":" in host or "%" in host:
        if not _is_ipv6(host):
            raise AddressError(f"{text!r}: {host!r} is not an IPv6 address")
        return
    if not host:
        raise AddressError(f"{text!r} has no host")
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError as exc:
            raise AddressError(f"{text!r}: {host!r} is not an IPv4 address") from exc
        return
    name = host.removesuffix(".")
    if not name or len(name) > 253 or not all(_LABEL.match(label) for label in name.split(".")):
        raise AddressError(f"{text!r}: {host!r} is not a host name")
