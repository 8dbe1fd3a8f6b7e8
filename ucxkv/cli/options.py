"""Options that several commands share, and what they mean: addresses, the token, keys and sizes."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from ucxkv.errors import UsageError

__all__ = [
    "AddressOption",
    "JsonOption",
    "PathOption",
    "TimeoutOption",
    "TokenFileOption",
    "connected",
    "opened",
    "parse_key",
]

DEFAULT_ADDRESS = "127.0.0.1:13337"
_HEX_KEY = re.compile(r"[0-9a-fA-F]{32}\Z")
_NAME = "name:"

AddressOption = Annotated[
    list[str] | None,
    typer.Option(
        "--address", "-a", help=f"Node's host:port, or a cluster's URL; may be repeated. Default {DEFAULT_ADDRESS}."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON, one object a line.")]
TokenFileOption = Annotated[
    Path | None, typer.Option("--token-file", help="File with the shared token; else the environment's UCXKV_TOKEN.")
]
PathOption = Annotated[
    str | None,
    typer.Option("--path", help="auto, mapped, rma, message, network or rdma; else UCXKV_PATH, else auto."),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds until a call gives up.")]


def connected(address: list[str] | None, token_file: Path | None, timeout_s: float, path: str | None = None) -> Any:
    """The client that a command uses: an asynchronous context manager, connected when entered."""
    import ucxkv
    from ucxkv.cli.logs import log_to_stderr
    from ucxkv.config import token_from

    log_to_stderr("warning", as_json=not sys.stderr.isatty())
    token = token_from(token_file) or None
    return ucxkv.connect(*(address or [DEFAULT_ADDRESS]), token=token, timeout_s=timeout_s, path=path)


@contextlib.contextmanager
def opened(output: Path) -> Iterator[BinaryIO]:
    """The file of an --output, written anew. Raises UsageError that says why it cannot be."""
    try:
        with output.open("wb") as file:
            yield file
    except OSError as exc:
        raise UsageError(f"--output {output}: {exc.strerror}") from exc


def parse_key(text: str) -> bytes:
    """A block's 16 bytes: 32 hexadecimal digits as they are, or `name:TEXT`, the xxh3-128 of that text.

    Raises UsageError that quotes anything else.
    """
    if _HEX_KEY.match(text):
        key = bytes.fromhex(text)
        if not any(key):
            raise UsageError("the key of zeros is reserved: it means the root")
        return key
    if text.startswith(_NAME) and len(text) > len(_NAME):
        import xxhash

        return xxhash.xxh3_128_digest(b"ucxkv cli name\0" + text[len(_NAME) :].encode())
    raise UsageError(f"{text!r} is no key: write 32 hexadecimal digits, or {_NAME}TEXT for a key made from a name")
