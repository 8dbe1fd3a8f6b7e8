"""Recordings: the same topology again, nothing private in them, and clear words for what is none."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.transport.topology import recorded
from ucxkv.transport.base import SetupFailed
from ucxkv.transport.nvml import probe
from ucxkv.transport.recording import RecordingTree, record_machine
from ucxkv.transport.sysfs import HostTree, RecordedTree, open_tree
from ucxkv.transport.topology import read_topology


@pytest.mark.parametrize("name", recorded.NAMES)
def test_a_recording_of_a_recording_reads_the_same_twice(name: str) -> None:
    """Goal: nothing that matters is lost. Method: record each machine, read the recording, record that one: equal."""
    first = RecordingTree(recorded.tree(name))
    read = read_topology(first)
    assert read_topology(first.recorded()) == read
    second = RecordingTree(first.recorded())
    assert read_topology(second) == read
    assert second.files == first.files
    assert second.links == first.links


@pytest.mark.parametrize("name", recorded.NAMES)
def test_every_recorded_machine_says_where_its_facts_are_from(name: str) -> None:
    """Goal: no invented machine without a word about it. Method: the header and size of each file."""
    about = recorded.tree(name).about
    assert "ecorded" in about
    assert "From: " in about or "Recorded by" in about
    assert (recorded.MACHINES / f"{name}.json").stat().st_size < 200_000


def test_this_machine_is_recorded_and_read_back(tmp_path: Path) -> None:
    """Goal: `--record` works on a real /sys. Method: record, open the folder, compare; no host name, no MAC address."""
    path = record_machine(HostTree(), tmp_path / "machine")
    assert read_topology(open_tree(path.parent)) == read_topology(open_tree(path))
    text = path.read_text()
    recording = json.loads(text)
    assert not any(name.endswith(("/address", "/uevent", "node_guid")) for name in recording["files"])
    macs = [p.read_text().strip() for p in Path("/sys/class/net").glob("*/address")]
    assert not any(mac in text for mac in macs if mac and set(mac) - set("0:"))
    assert len(socket.gethostname()) < 4 or socket.gethostname() not in text
    assert {n.index: n.cpus for n in read_topology(open_tree(path)).numa} == {
        n.index: n.cpus for n in read_topology().numa
    }


def test_a_copied_folder_with_links_reads_like_its_recording(tmp_path: Path) -> None:
    """Goal: a user may send a tar of /sys too. Method: the dual-socket machine as real files and relative links."""
    machine = recorded.tree("dual_socket")
    for path, text in machine.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    for link, end in machine.links.items():
        (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / link).symlink_to(Path("../" * link.count("/")) / end)
    assert read_topology(open_tree(tmp_path)) == read_topology(machine)


def test_links_out_of_the_root_are_not_followed(tmp_path: Path) -> None:
    """Goal: a copied tree shows nothing of the machine it lies on. Method: absolute and climbing links."""
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys/a").symlink_to("/proc/version")
    (tmp_path / "sys/b").symlink_to("../../../../../../../../proc/version")
    (tmp_path / "sys/loop").symlink_to("loop")
    tree = HostTree(tmp_path)
    for path in ("sys/a", "sys/b", "sys/loop", "sys/none", "../../proc/version"):
        assert (tree.read(path), tree.resolve(path)) == ("", "")
    assert tree.names("sys/none") == []
    assert tree.nvml() is None  # another root: this machine's driver is not asked


def test_links_in_a_circle_read_as_empty() -> None:
    """Goal: a damaged recording hangs nothing. Method: two links that name each other."""
    tree = RecordedTree({}, {"a": "b/c", "b": "a/d"})
    assert tree.read("a/x") == ""


def test_gids_are_made_anonymous_and_stay_alike() -> None:
    """Goal: addresses are private, their kinds and equalities are facts. Method: one port with seven entries."""
    port = "sys/devices/pci0000:00/0000:00:01.0/infiniband/mlx5_0/ports/1"
    gids = [
        "fe80:0000:0000:0000:ba59:9fff:fe12:3456",
        "0000:0000:0000:0000:0000:ffff:c0a8:1742",
        "0000:0000:0000:0000:0000:ffff:c0a8:1742",
        "0000:0000:0000:0000:0000:ffff:c0a8:1743",
        "2a01:04f8:0173:1234:ba59:9fff:fe12:3456",
        "fec0:0000:0000:0007:ba59:9fff:fe12:9999",
        "0000:0000:0000:0000:0000:0000:0000:0000",
    ]
    files = {f"{port}/gids/{index}": gid for index, gid in enumerate(gids)}
    files |= {f"{port}/gid_attrs/types/{index}": "RoCE v2" for index in range(6)}
    files |= {f"{port}/state": "4: ACTIVE", f"{port}/link_layer": "Ethernet", f"{port}/rate": "100 Gb/sec (4X EDR)"}
    recording = RecordingTree(RecordedTree(files, {"sys/class/infiniband/mlx5_0": port.rpartition("/ports")[0]}))
    anonymous = read_topology(recording).rdma[0].ports[0]
    assert [gid.value for gid in anonymous.gids] == [
        "fe80:0000:0000:0000:0200:00ff:fe00:0001",
        "0000:0000:0000:0000:0000:ffff:0a00:0001",
        "0000:0000:0000:0000:0000:ffff:0a00:0001",
        "0000:0000:0000:0000:0000:ffff:0a00:0002",
        "2001:0db8:0000:0001:0200:00ff:fe00:0001",
        "fec0:0000:0000:0007:0200:00ff:fe00:0002",
    ]
    assert anonymous.gid_index == 1
    text = json.dumps(recording.files)
    assert not any(secret in text for secret in ("c0a8", "ba59", "2a01"))


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 1, "files": {"a": 1}, "links": {}}', "{}"])
def test_what_is_no_recording_is_refused_by_name(text: str, tmp_path: Path) -> None:
    """Goal: a clear error. Method: files that are no JSON, of another format or with other types."""
    path = tmp_path / "topology.json"
    path.write_text(text)
    with pytest.raises(SetupFailed, match=r"topology\.json is no recorded machine"):
        open_tree(path)
    shutil.rmtree(tmp_path / "empty", ignore_errors=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SetupFailed, match="neither a recording"):
        open_tree(tmp_path / "empty")


class _Driver:
    """pynvml's functions for two GPUs: the first has three links to a switch and two to the other, one of them down."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus: int, is_there: bool = True) -> None:
        self.gpus, self.is_there, self.is_open = gpus, is_there, 0

    def nvmlInit(self) -> None:
        if not self.is_there:
            raise self.NVMLError("library not found")
        self.is_open += 1

    def nvmlShutdown(self) -> None:
        self.is_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"550.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, device: int) -> str:
        return "A GPU"

    def nvmlDeviceGetPciInfo(self, device: int) -> Any:
        return type("Info", (), {"busId": f"00000000:{device + 10:02X}:00.0"})

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return type("Memory", (), {"total": 1 << 30})

    def nvmlDeviceGetNumaNodeId(self, device: int) -> int:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:
        if link > 4 or device:
            raise self.NVMLError("no such link")
        return int(link != 4)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, device: int, link: int) -> int:
        return 2 if link < 3 else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: int, link: int) -> Any:
        return type("Info", (), {"busId": b"00000000:0B:00.0"})


def test_nvml_answers_become_values_and_it_is_closed_again() -> None:
    """Goal: the translation of NVML's answers. Method: a stand-in driver, since no GPU is here."""
    driver = _Driver(2)
    found = probe(driver)
    assert found is not None
    assert driver.is_open == 0
    assert found["gpus"][0] == {
        "index": 0,
        "name": "A GPU",
        "pci": "0000:0a:00.0",
        "memory_bytes": 1 << 30,
        "numa": -1,
        "links": {"switch": 3, "0000:0b:00.0": 1},
    }
    assert found["gpus"][1]["links"] == {}
    assert probe(_Driver(0)) is None
    assert probe(_Driver(1, is_there=False)) is None


def test_the_stand_in_has_only_functions_that_pynvml_has() -> None:
    """Goal: the stand-in is no invention. Method: each of its names is looked up in the real package."""
    pynvml = pytest.importorskip("pynvml", reason="needs the package nvidia-ml-py")
    names = [name for name in vars(_Driver) if name.startswith("nvml")] + ["NVMLError"]
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert probe(pynvml) is None or probe(pynvml)
