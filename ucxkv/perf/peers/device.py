"""GPU buffers for the backends that can send them: an array of torch or cupy, whichever this interpreter has."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .base import Missing
from .blocks import Blocks

__all__ = ["Device", "why_no_device"]


def why_no_device() -> str:
    """Why this host has no CUDA device to measure with, by the driver's own word; empty when it has one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        return f"no CUDA driver here ({exc})"
    status = driver.cuInit(0)
    if status:
        return f"the CUDA driver does not start (cuInit: {status})"
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    return "" if not status and count.value else f"the CUDA driver sees {count.value} devices"


class Device:
    """Arrays on the first CUDA device. Raises Missing when neither torch nor cupy sees one."""

    def __init__(self) -> None:
        why = why_no_device()
        if why:
            raise Missing(why)
        self._torch: Any = None
        self._cupy: Any = None
        reasons = []
        try:
            import torch

            if torch.cuda.is_available():
                self._torch = torch
                return
            reasons.append("torch sees no device")
        except ImportError as exc:
            reasons.append(str(exc))
        try:
            import cupy

            self._cupy = cupy
        except ImportError as exc:
            reasons.append(str(exc))
            raise Missing(f"GPU buffers need torch or cupy: {'; '.join(reasons)}") from exc

    def upload(self, blocks: Blocks) -> Any:
        """The same bytes on the device; rows of it have `__cuda_array_interface__`."""
        if self._torch is not None:
            array = self._torch.from_numpy(blocks).cuda()
            self._torch.cuda.synchronize()
            return array
        array = self._cupy.asarray(blocks)
        self._cupy.cuda.runtime.deviceSynchronize()
        return array

    def download(self, message: Any) -> Blocks:
        """A message's bytes in host memory: torch's and cupy's arrays, or anything with `__cuda_array_interface__`."""
        if self._torch is not None:
            tensor = self._torch.as_tensor(message, device="cuda")
            host: Blocks = tensor.view(self._torch.uint8).flatten().cpu().numpy()
            return host
        copied: Blocks = self._cupy.asnumpy(self._cupy.asarray(message))
        return copied.view(np.uint8).ravel()
