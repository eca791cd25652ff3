"""A notebook's parameters as what they name: refused at once, with the values there are, where they name nothing."""

from __future__ import annotations

import torch

from dflash.devices import device_named
from dflash.diagnose.probes import PROBES
from dflash.errors import one_of

COMPILERS = ("inductor", "eager")


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA device where there is one, else the CPU. Raises ConfigError for one that is not here."""
    return device_named(("cuda:0" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def choose_devices(names: str) -> list[str]:
    """Devices in a comma-separated list; `auto` as in `choose_device`."""
    return [str(choose_device(name.strip())) for name in names.split(",")]


def choose_compiler(name: str, device: torch.device | str) -> str:
    """`auto` generates kernels on a GPU alone; on a CPU that takes minutes and shows the same races."""
    if name == "auto":
        return "inductor" if torch.device(device).type == "cuda" else "eager"
    return one_of("backend", name, COMPILERS, "auto")


def choose_probes(names: str) -> tuple[str, ...]:
    """Probes in a comma-separated list; `all` is every known fault."""
    if names.strip() == "all":
        return PROBES
    return tuple(one_of("probes", name.strip(), PROBES, "all") for name in names.split(","))
