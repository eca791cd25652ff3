"""The devices and versions in a line, for the isolation notebooks; their tables are `dflash.runs.tables`."""

from __future__ import annotations

import os

import torch

from dflash.runs.environment import interpreter


def environment_line() -> str:
    """Interpreter, torch and devices in two lines."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = ", ".join(f"cuda:{i} {name}" for i, name in enumerate(names)) or "no GPU"
    return f"{interpreter()}\ntorch {torch.__version__} · {devices} · {os.cpu_count()} cores"
