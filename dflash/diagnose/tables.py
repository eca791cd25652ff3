"""The devices and versions in a line, for the isolation notebooks; their tables are `dflash.runs.tables`."""

from __future__ import annotations

import os

import torch


def environment_line() -> str:
    """torch and devices in a line."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = ", ".join(f"cuda:{i} {name}" for i, name in enumerate(names)) or "no GPU"
    return f"torch {torch.__version__} · {devices} · {os.cpu_count()} cores"
