"""Make what qemu boots from Debian's kernel package: FOLDER/vmlinux (uncompressed ELF) and FOLDER/initrd.

usage: pack.py KERNEL.deb FOLDER INIT MODULE...

The initrd holds busybox, INIT and the modules with what they depend on, in loading order. Modules that this kernel does
not have are taken as built in, rdma_rxe excepted.
"""

from __future__ import annotations

import io
import lzma
import re
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

_FOLDERS = re.compile(
    r"/kernel/(drivers/(infiniband/(core|sw)|virtio|net|char)|net|lib|crypto|arch|fs/(9p|netfs|fscache|overlayfs|configfs))/"
)
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
_ELF = b"\x7fELF"


def read_package(path: str) -> tuple[bytes, dict[str, bytes]]:
    """The kernel image and the modules (by name, uncompressed) of a kernel package."""
    image, modules = b"", {}
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as tar,
    ):
        for member in tar:
            base = PurePosixPath(member.name).name
            if not member.isfile():
                continue
            if base.startswith("vmlinuz-"):
                image = _content(tar, member)
            elif ".ko" in base and _FOLDERS.search(member.name):
                data = _content(tar, member)
                modules[base.partition(".ko")[0].replace("-", "_")] = (
                    lzma.decompress(data) if base.endswith(".xz") else data
                )
    if not image:
        sys.exit(f"{path}: no kernel image in it")
    return image, modules


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    assert stream is not None
    return stream.read()


def in_order(modules: dict[str, bytes], wanted: list[str]) -> list[tuple[str, bytes]]:
    """The wanted modules, each after those it depends on."""
    order: dict[str, bytes] = {}
    seen: set[str] = set()

    def add(name: str) -> None:
        name = name.replace("-", "_")
        if name in seen or name not in modules:
            return
        seen.add(name)
        found = _DEPENDS.search(modules[name])
        for other in found.group(1).decode().split(",") if found else ():
            add(other)
        order[name] = modules[name]

    for name in wanted:
        add(name)
    if "rdma_rxe" not in order:
        sys.exit("this kernel package has no rdma_rxe; use linux-image-amd64, not the cloud flavour")
    return list(order.items())


def uncompressed(image: bytes) -> bytes:
    """The ELF inside of a bzImage: qemu starts it by its PVH entry, which spares a slow decompression in the guest."""
    for start in re.finditer(re.escape(b"\xfd7zXZ\0"), image):
        try:
            kernel = lzma.LZMADecompressor().decompress(image[start.start() :])
        except lzma.LZMAError:
            continue
        if kernel.startswith(_ELF):
            return kernel
    for start in re.finditer(re.escape(b"\x28\xb5\x2f\xfd"), image):
        done = subprocess.run(["zstd", "-dc"], input=image[start.start() :], capture_output=True, check=False)
        if done.stdout.startswith(_ELF):
            return done.stdout
    sys.exit("no compressed ELF in the kernel image")


class Archive:
    """A cpio archive (newc), as the kernel unpacks it."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._count = 0

    def add(self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        """One entry."""
        self._count += 1
        raw = name.encode() + b"\0"
        fields = (self._count, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(raw), 0)
        self._out.write(b"070701" + b"".join(b"%08X" % field for field in fields) + raw)
        self._pad()
        self._out.write(data)
        self._pad()

    def _pad(self) -> None:
        self._out.write(b"\0" * (-self._out.tell() % 4))

    def finish(self) -> bytes:
        """The whole archive."""
        self.add("TRAILER!!!", 0)
        return self._out.getvalue()


def main() -> None:
    """See the module."""
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    package, folder, init, *wanted = sys.argv[1:]
    image, modules = read_package(package)
    order = in_order(modules, wanted)
    archive = Archive()
    for directory in ("bin", "proc", "sys", "dev", "m", "lower", "rw", "merged"):
        archive.add(directory, 0o40755)
    archive.add("dev/console", 0o20600, device=(5, 1))
    archive.add("bin/busybox", 0o100755, Path("/bin/busybox").read_bytes())
    archive.add("init", 0o100755, Path(init).read_bytes())
    for number, (name, data) in enumerate(order):
        archive.add(f"m/{number:03d}-{name}.ko", 0o100644, data)
    Path(folder, "vmlinux").write_bytes(uncompressed(image))
    Path(folder, "initrd").write_bytes(archive.finish())
    print(*(name for name, _ in order))


if __name__ == "__main__":
    main()
