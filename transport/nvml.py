"""GPUs and their NVLinks as NVIDIA's driver tells them: the only module that imports `pynvml` (package nvidia-ml-py).

Nothing is imported before `probe` is called; without the package, a driver or a GPU the answer is None. No serial
number, UUID or process is asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["probe"]

_LINKS_MAX = 18
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_ENABLED = 1


def probe(library: Any = None) -> dict[str, Any] | None:
    """What NVML says, as values that JSON can hold, or None where there is no NVML, driver or GPU.

    {"driver": text, "gpus": [{"index": int, "name": text, "pci": "0000:1b:00.0", "memory_bytes": int,
    "numa": int (-1 unknown), "links": {"switch" or the other GPU's pci: count of active NVLinks}}]}.
    library: a module with pynvml's functions; default: pynvml.
    """
    if library is None:
        try:
            import pynvml
        except ImportError:
            return None
        library = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    try:
        count = library.nvmlDeviceGetCount()
        gpus = [_gpu(library, index) for index in range(count)]
        return {"driver": _text(library.nvmlSystemGetDriverVersion()), "gpus": gpus} if gpus else None
    except library.NVMLError:
        return None
    finally:
        library.nvmlShutdown()


def _gpu(library: Any, index: int) -> dict[str, Any]:
    device = library.nvmlDeviceGetHandleByIndex(index)
    return {
        "index": index,
        "name": _text(library.nvmlDeviceGetName(device)),
        "pci": pci_address(_text(library.nvmlDeviceGetPciInfo(device).busId)),
        "memory_bytes": int(_asked(library, library.nvmlDeviceGetMemoryInfo, device, default=_NoMemory).total),
        "numa": int(_asked(library, library.nvmlDeviceGetNumaNodeId, device, default=-1)),
        "links": _links(library, device),
    }


class _NoMemory:
    total = 0


def _links(library: Any, device: Any) -> dict[str, int]:
    """Active NVLinks by their other end."""
    found: dict[str, int] = {}
    for link in range(_LINKS_MAX):
        if _asked(library, library.nvmlDeviceGetNvLinkState, device, link, default=0) != _ENABLED:
            continue
        if _asked(library, library.nvmlDeviceGetNvLinkRemoteDeviceType, device, link, default=-1) == _SWITCH:
            end = "switch"
        else:
            remote = _asked(library, library.nvmlDeviceGetNvLinkRemotePciInfo, device, link, default=None)
            if remote is None:
                continue
            end = pci_address(_text(remote.busId))
        found[end] = found.get(end, 0) + 1
    return found


def _asked(library: Any, question: Any, *arguments: Any, default: Any) -> Any:
    """An answer, or the default where this GPU or driver does not know the question."""
    try:
        return question(*arguments)
    except library.NVMLError:
        return default


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def pci_address(bus_id: str) -> str:
    """The kernel's form of an address: NVML's 00000000:1B:00.0 is 0000:1b:00.0."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}" if rest else bus_id.lower()
