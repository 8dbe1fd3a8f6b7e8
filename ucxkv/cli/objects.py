"""`ucxkv object put | get | list | delete | stat | sweep`: values under names, for people and shell scripts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ucxkv.cli.options import AddressOption, JsonOption, PathOption, TimeoutOption, TokenFileOption, connected, opened
from ucxkv.sizes import short_size

if TYPE_CHECKING:
    from ucxkv.objects import Absent, ObjectInfo, Objects, Version

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Values under names: put, get, list, delete them (docs/objects.md).")

T = TypeVar("T")
NameArgument = Annotated[str, typer.Argument(help="The object's name.")]
IfVersionOption = Annotated[
    str | None, typer.Option("--if-version", help="Only where this is the current version; `absent`: there is none.")
]


def _run(
    call: Callable[[Objects], Awaitable[T]],
    address: list[str] | None,
    token_file: Path | None,
    timeout: float,
    path: str | None,
) -> T:
    async def with_client() -> T:
        async with connected(address, token_file, timeout, path) as kv:
            return await call(kv.objects)

    return asyncio.run(with_client())


@app.command("put")
def put(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(help="File whose bytes to store; - reads standard input.")] = Path("-"),
    npy: Annotated[bool, typer.Option("--npy", help="The file is a .npy file: store its array.")] = False,
    if_version: IfVersionOption = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Keep it when the node's process ends; not evicted.")
    ] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """Store a file under a name, in place of what was there. Exit code 1 when another version is there."""
    value: Any = _array_of(file) if npy else _bytes_of(file)
    expected = _expected(if_version)
    version = _run(
        lambda objects: objects.put(name, value, if_version=expected, durable=durable),
        address, token_file, timeout, path,
    )  # fmt: skip
    nbytes = value.nbytes if npy else len(value)
    if as_json:
        print(json.dumps({"name": name, "version": str(version), "bytes": nbytes}))
    else:
        print(f"{name} {version} {nbytes} bytes")


@app.command("get")
def get(
    name: NameArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; - is standard output.")] = Path("-"),
    npy: Annotated[bool, typer.Option("--npy", help="Write an array as a .npy file.")] = False,
    address: AddressOption = None,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """Write an object's bytes to a file or standard output. Exit code 1 when it is not there."""
    found = _run(lambda objects: _read(objects, name, npy), address, token_file, timeout, path)
    if found is None:
        print(f"ucxkv: {name} is not stored", file=sys.stderr)
        raise typer.Exit(1)
    info, value = found
    if str(output) == "-":
        _write(sys.stdout.buffer, value, npy)
        sys.stdout.buffer.flush()
        return
    with opened(output) as file:
        _write(file, value, npy)
    print(f"{name} {info.version} {info.nbytes} bytes, sums verified, written to {output}", file=sys.stderr)


async def _read(objects: Objects, name: str, npy: bool) -> tuple[ObjectInfo, object] | None:
    """As an array, or, whatever it is, as bytes."""
    from ucxkv.errors import UsageError

    while True:
        info = await objects.stat(name)
        if info is None:
            return None
        if npy and info.kind != "numpy":
            raise UsageError(f"{name!r} is of kind {info.kind}; get it without --npy")
        try:
            found = await objects.get(name, None if npy else bytearray(info.nbytes))
        except UsageError:
            if await objects.stat(name) == info:
                raise
            continue  # it was overwritten by one of another size
        return None if found is None else (found.info, found.value)


@app.command("list")
def list_(
    prefix: Annotated[str, typer.Argument(help="Only names that begin so.")] = "",
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """List objects by name: version, bytes, kind, when they were put. Looks through the keys of all blocks."""
    for info in _run(lambda objects: objects.list(prefix), address, token_file, timeout, path):
        _print_info(info, as_json)


@app.command("stat")
def stat(
    name: NameArgument,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """Say what is known of an object. Exit code 1 when it is not there."""
    info = _run(lambda objects: objects.stat(name), address, token_file, timeout, path)
    if info is None:
        print(f"ucxkv: {name} is not stored", file=sys.stderr)
        raise typer.Exit(1)
    _print_info(info, as_json)


@app.command("delete")
def delete(
    name: NameArgument,
    if_version: IfVersionOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 5.0,
    path: PathOption = None,
) -> None:
    """Delete an object. Exit code 1 when it was not there, or another version is."""
    from ucxkv.errors import UsageError
    from ucxkv.objects import Version

    expected = _expected(if_version)
    if not (expected is None or isinstance(expected, Version)):
        raise UsageError("--if-version absent: there is nothing to delete then")
    was_there = _run(lambda objects: objects.delete(name, if_version=expected), address, token_file, timeout, path)
    print(
        json.dumps({"name": name, "deleted": was_there}) if as_json else f"{name} {'DELETED' if was_there else 'MISS'}"
    )
    if not was_there:
        raise typer.Exit(1)


@app.command("sweep")
def sweep(
    older_than: Annotated[
        float, typer.Option("--older-than", min=0, help="Seconds; only what was put before that.")
    ] = 3600.0,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token_file: TokenFileOption = None,
    timeout: TimeoutOption = 60.0,
    path: PathOption = None,
) -> None:
    """Remove values that writers left which were killed in the middle of a put or delete."""
    removed = _run(lambda objects: objects.sweep(older_than_s=older_than), address, token_file, timeout, path)
    print(json.dumps({"removed": removed}) if as_json else f"{removed} values removed")


def _expected(text: str | None) -> Version | Absent | None:
    from ucxkv.objects import ABSENT, Version

    return None if text is None else ABSENT if text == "absent" else Version.parse(text)


def _bytes_of(file: Path) -> bytes:
    from ucxkv.errors import UsageError

    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as exc:
        raise UsageError(f"{file}: {exc.strerror}") from exc


def _array_of(file: Path) -> Any:
    import io
    import zipfile

    import numpy as np

    from ucxkv.errors import UsageError

    try:
        found = np.load(io.BytesIO(_bytes_of(file)), allow_pickle=False)
    except (ValueError, EOFError, MemoryError, zipfile.BadZipFile) as exc:
        raise UsageError(f"{file} is no .npy file of plain data: {exc}") from exc
    if not isinstance(found, np.ndarray):
        raise UsageError(f"{file} is an archive of arrays; put them one by one")
    return np.asarray(found, order="C")  # ascontiguousarray would give an array without axes one


def _write(file: Any, value: object, npy: bool) -> None:
    if npy:
        import numpy as np

        # an object that can only write: of a real file numpy asks the position, and a pipe has none
        np.save(SimpleNamespace(write=file.write), value, allow_pickle=False)  # type: ignore[arg-type]
    else:
        file.write(value)


def _print_info(info: ObjectInfo, as_json: bool) -> None:
    if as_json:
        fields = {
            "name": info.name,
            "version": str(info.version),
            "kind": info.kind,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "bytes": info.nbytes,
            "durable": info.is_durable,
            "time_ns": info.time_ns,
        }
        print(json.dumps(fields))
        return
    when = datetime.fromtimestamp(info.time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    what = f"{info.kind} {info.dtype}{list(info.shape)}" if info.kind != "bytes" else "bytes"
    durable = "durable" if info.is_durable else "cache"
    print(f"{info.name}  {info.version}  {short_size(info.nbytes):>10}  {durable:<7}  {when}  {what}")
