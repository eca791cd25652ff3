"""What a run ran on: interpreter, packages, devices, source state. Written once a run, shown by the report."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "safetensors",
    "accelerate",
    "gguf",
    "liger-kernel",
    "numpy",
    "papermill",
    "nbconvert",
    "jupyterlab",
    "ipykernel",
    "ipywidgets",
    "plotly",
    "matplotlib",
    "nvidia-ml-py",
)
VARIABLES = ("CUDA_VISIBLE", "PYTORCH_", "TORCH", "OMP_NUM", "NCCL_")


def environment_summary() -> dict[str, Any]:
    """A JSON-ready summary. Never raises for something that is absent: its value is None then."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count(), "usable": _usable_cores(), "memory": memory_total()},
        "packages": {name: package_version(name) for name in PACKAGES},
        "cuda": _cuda(),
        "source": _source(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [],
        "variables": {key: value for key, value in sorted(os.environ.items()) if key.startswith(VARIABLES)},
    }


def memory_total() -> int | None:
    """Bytes of main memory, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def package_version(name: str) -> str | None:
    """None where the package is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cuda() -> dict[str, Any]:
    import torch

    summary: dict[str, Any] = {"version": torch.version.cuda, "available": torch.cuda.is_available(), "devices": []}
    for index in range(torch.cuda.device_count() if summary["available"] else 0):
        properties = torch.cuda.get_device_properties(index)
        summary["devices"].append(
            {
                "name": properties.name,
                "memory": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return summary


def _source() -> dict[str, Any]:
    """Commit of the checkout that this package lies in, and whether it has local changes."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "--short=12", "HEAD"), "changed": None if status is None else bool(status)}
