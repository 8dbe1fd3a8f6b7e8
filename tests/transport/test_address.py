"""Addresses: what is accepted, how it is written, what is refused and how it says so."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucxkv.transport.address import AddressError, TcpAddress, UnixAddress, format_address, parse_address

labels = st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)
names = st.lists(labels, min_size=1, max_size=4).map(".".join).filter(lambda name: not name.replace(".", "").isdigit())
hosts = st.one_of(
    names,
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.builds(lambda ip, zone: f"{ip}%{zone}", st.ip_addresses(v=6).map(str), labels.filter(lambda z: len(z) <= 15)),
)
tcp = st.builds(TcpAddress, hosts, st.integers(0, 65535))
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=26)
unix = st.one_of(
    st.builds(lambda name: UnixAddress(name, True), text),
    st.builds(lambda name: UnixAddress("/" + name, False), text),
)


@settings(deadline=None)
@given(st.one_of(tcp, unix))
def test_every_address_survives_its_text(address):
    """Goal: format and parse are inverse. Method: property over names, IPv4, IPv6 with zones, both kinds of Unix
    names.
    """
    assert parse_address(format_address(address)) == address


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_an_address_or_refused_with_the_text_in_the_message(any_text):
    """Goal: nothing but AddressError comes out. Method: arbitrary text; what is accepted has a stable canonical
    form.
    """
    try:
        address = parse_address(any_text)
    except AddressError as exc:
        assert repr(any_text) in str(exc) or repr(any_text)[1:-1] in str(exc)
    else:
        assert parse_address(format_address(address)) == address


@pytest.mark.parametrize(
    ("given_text", "host", "port"),
    [
        ("127.0.0.1:13337", "127.0.0.1", 13337),
        ("[::1]:13337", "::1", 13337),
        ("[fe80::1%eth0]:0", "fe80::1%eth0", 0),
        ("node-7.rack_2.example.org.:65535", "node-7.rack_2.example.org.", 65535),
    ],
)
def test_tcp_forms_are_read(given_text, host, port):
    """Goal: the documented forms. Method: one of each."""
    assert parse_address(given_text) == TcpAddress(host, port)


@pytest.mark.parametrize("given_text", ["::1", "fe80::1%eth0", "localhost", "10.0.0.7", "[::1]"])
def test_a_missing_port_is_the_default_one_when_there_is_one(given_text):
    """Goal: bare hosts work only with default_port. Method: with and without it."""
    assert parse_address(given_text, default_port=13337).port == 13337
    with pytest.raises(AddressError, match="no port"):
        parse_address(given_text)


@pytest.mark.parametrize(
    "bad",
    [
        "", ":1", "host:", "host:65536", "host:-1", "host: 1", "host:1x", "host:٣", "1.2.3:4", "256.1.1.1:4", "a..b:1",
        "-a:1", "[::1:4", "[::1]4", "[1.2.3.4]:5", "::1:zz:1", "tcp://a:1", "unix:", "unix:@", "unix:relative",
        "unix:/a\0b",
        "unix:@" + "x" * 108, "[fe80::1%]:1", "a" * 64 + ":1", "host:99999999999", "a b:1", "x%eth0:1",
    ],
)  # fmt: skip
def test_bad_addresses_are_refused(bad):
    """Goal: no half-right reading. Method: a list of near misses; the message quotes the text."""
    with pytest.raises(AddressError) as caught:
        parse_address(bad)
    assert repr(bad) in str(caught.value) or bad in str(caught.value)


def test_a_value_of_another_type_is_refused_by_name():
    """Goal: a helpful message for a port number given as an address. Method: an int."""
    with pytest.raises(AddressError, match="int"):
        parse_address(13337)


def test_loopback_is_known_by_its_text():
    """Goal: is_loopback needs no resolver. Method: both kinds."""
    assert [TcpAddress(h, 1).is_loopback for h in ("localhost", "127.0.0.9", "::1", "10.0.0.1", "node")] == [
        True, True, True, False, False,
    ]  # fmt: skip
