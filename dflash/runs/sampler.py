"""Memory and utilisation of each device, sampled by one thread into `device` records (bytes; percent 0..100).

NVML sees every GPU of the machine whatever CUDA_VISIBLE_DEVICES says, so a torch device is matched to its
NVML handle by UUID, never by index. NVML is optional: without it, utilisation is null and the totals come
from CUDA.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from dflash.runs.environment import memory_total

if TYPE_CHECKING:
    from dflash.runs.record import MetricsWriter


class DeviceSampler:
    """Context manager: every `interval` seconds, one `device` record for each device in `devices`.

    `devices` are torch devices or their names; "cpu" reports this process (resident memory in `used`, its
    share of all usable cores in `utilization`). A device that cannot be read yields nulls, never an
    exception.
    """

    def __init__(self, metrics: MetricsWriter, devices: Iterable[str | torch.device], interval: float = 1.0) -> None:
        self.metrics = metrics
        self.interval = interval
        names = dict.fromkeys(str(torch.device(device)) for device in devices)
        self._probes = [CpuProbe() if name == "cpu" else CudaProbe(name) for name in names]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self) -> None:
        """Write one record a device now."""
        for probe in self._probes:
            self.metrics.write("device", **probe.read())

    def start(self) -> DeviceSampler:
        self._thread = threading.Thread(target=self._loop, name="device-sampler", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread and write a last sample, so that a short run has one too."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout=5)
        self._thread = None
        self.sample()

    def _loop(self) -> None:
        while True:
            self.sample()
            if self._stop.wait(self.interval):
                return

    def __enter__(self) -> DeviceSampler:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


class CpuProbe:
    """This process: resident bytes, the highest so far, and the share of the usable cores it keeps busy."""

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._total = memory_total()
        self._last = (time.monotonic(), time.process_time())
        self._peak = 0

    def read(self) -> dict[str, Any]:
        used = resident_bytes()
        self._peak = max(self._peak, used or 0)
        now = (time.monotonic(), time.process_time())
        wall, busy = now[0] - self._last[0], now[1] - self._last[1]
        utilization = None
        if wall > 0.05:
            self._last = now
            utilization = round(min(100.0, 100 * busy / wall / self._cores), 1)
        return {
            "device": "cpu",
            "allocated": None,
            "reserved": None,
            "peak": self._peak or None,
            "used": used,
            "total": self._total,
            "utilization": utilization,
        }


class CudaProbe:
    """One CUDA device: the allocator's numbers from torch, the whole device's from NVML or CUDA."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name if ":" in name else f"{name}:0")
        self._nvml = self._handle = None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(self.device).uuid)
            uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
        except Exception:  # absent package, absent driver, unknown UUID (MIG): all mean "no NVML here"
            self._nvml = None

    def read(self) -> dict[str, Any]:
        record: dict[str, Any] = dict.fromkeys(("allocated", "reserved", "peak", "used", "total", "utilization"))
        try:
            record["allocated"] = torch.cuda.memory_allocated(self.device)
            record["reserved"] = torch.cuda.memory_reserved(self.device)
            record["peak"] = torch.cuda.max_memory_allocated(self.device)
            record.update(self._whole_device())
        except Exception:  # a device lost mid-run must not take the sampler, and so the run, with it
            pass
        return {"device": str(self.device), **record}

    def _whole_device(self) -> dict[str, Any]:
        if self._nvml is None:
            free, total = torch.cuda.mem_get_info(self.device)
            return {"used": total - free, "total": total}
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        values = {"used": memory.used, "total": memory.total}
        try:
            values["utilization"] = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
        except self._nvml.NVMLError:
            pass
        return values


def resident_bytes() -> int | None:
    """Resident memory of this process in bytes; None where neither /proc nor psutil can say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import psutil
    except ImportError:
        return None
    return psutil.Process().memory_info().rss
