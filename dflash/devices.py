"""Devices: which there are, what they compute fast in, and how tensors get to them and back."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from dflash.errors import ConfigError

DEVICE_TYPES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def device_named(name: str | torch.device) -> torch.device:
    """The device of this name, "auto" being a GPU where there is one. Raises ConfigError for a name that torch does not
    know, a device of another type than cpu and cuda, or a GPU that is not here."""
    try:
        device = torch.device(default_device() if name == "auto" else name)
    except RuntimeError:
        raise ConfigError(f"there is no device {str(name)!r}; give cpu, cuda or cuda:0") from None
    if device.type not in DEVICE_TYPES:
        raise ConfigError(
            f"device {name} is of type {device.type!r}, and only {' and '.join(DEVICE_TYPES)} work here; give "
            "cpu, cuda or cuda:0"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} is not here, this machine has {torch.cuda.device_count()} GPUs; give one of them, or cpu"
        )
    return device


def on(device: torch.device) -> AbstractContextManager:
    """Make a CUDA device the current one for a block, as kernels that are launched by hand need it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for all work that was queued on a CUDA device; on the CPU it is done already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def default_device() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`. From the host to a GPU through pinned memory: a copy from pageable memory may wait for all the
    work that the stream has, and then the GPU waits for the host."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Readback:
    """A tensor on its way to the host. `read` waits for its copy alone, and not, as `tolist` would, for all that was queued
    on the stream since."""

    def __init__(self, values: torch.Tensor):
        self.event = None
        if values.device.type == "cuda":
            self.host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.host.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(values.device))
        else:
            self.host = values

    def read(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


@contextmanager
def one_host_thread(devices: Iterable[torch.device]) -> Iterator[None]:
    """Where nothing computes on the CPU, let torch use one thread for each operation there, until the end of the context.

    What is left for the host of a run on GPUs are small index tensors. Torch spreads some of those operations over as many
    threads as there are cores, in every worker thread anew, and the threads then spin for work that does not come: cores
    are taken from the workers that queue kernels. Entered before the warmup, because compiled code is guarded by the number.
    """
    before = torch.get_num_threads()
    if any(torch.device(device).type == "cpu" for device in devices) or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attention_without_plans() -> None:
    """Take cuDNN's kernels out of `scaled_dot_product_attention`, in this process.

    torch prefers them on Hopper and Blackwell, and they build an execution plan for every new shape, in every thread anew.
    Packs have documents of ever new lengths, so a target would spend its time on plans. The flash kernels have none.
    `torch.backends.cuda.enable_cudnn_sdp(True)` brings them back, for inputs of few shapes.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def dtype_named(name: str) -> torch.dtype:
    """The floating dtype of this name. Raises ConfigError for any other."""
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return getattr(torch, name)


def compute_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """The dtype for "auto", "float32" or "bfloat16": bfloat16 on a GPU, and on a CPU that has instructions for it."""
    if name != "auto":
        return getattr(torch, name)
    fast = torch.device(device).type != "cpu" or cpu_has_bfloat16()
    return torch.bfloat16 if fast else torch.float32


@functools.cache
def cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 by itself (AVX512-BF16 or AMX; on ARM, BF16), and torch may use that.

    Asked of the processor, not measured: the answer is the same every time. Where the system does not say, False.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags)) and torch.backends.mkldnn.is_available()
