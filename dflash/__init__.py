"""DFlash workbook: train a block-diffusion drafter for a frozen target model, and find out why a run fails."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["DFlashDrafter", "RunConfig", "create_drafter_config"]

_HOMES = {
    "DFlashDrafter": "dflash.drafter.model",
    "RunConfig": "dflash.train.settings",
    "create_drafter_config": "dflash.drafter.config",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: `import dflash` alone loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dflash' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
