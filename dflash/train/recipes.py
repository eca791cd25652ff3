"""Recipes: named settings, one YAML file each in `dflash/recipes/`, with the curve that was measured where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dflash.errors import ConfigError
from dflash.train.topology import available_gpus, is_cpu

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dflash" / "recipes"
AUTO = "auto"
EXPECTED = "expected"  # of a recipe file: measured curves (`train.expected`)


def recipe_names() -> list[str]:
    """Every recipe there is."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def is_recipe_file(path: str | Path) -> bool:
    """Whether this is the file of one of them, and not a copy."""
    return Path(path).resolve().parent == FOLDER and Path(path).stem in recipe_names()


def choose_recipe(packaged: bool, gpus: Any) -> str:
    """The recipe for "auto": `cpu` where the drafters run on the CPU, `gpu` for the packaged target, `large` for others."""
    if is_cpu(gpus) or not available_gpus():
        return "cpu"
    return "gpu" if packaged else "large"


def read_recipe(name: str) -> dict[str, dict[str, Any]]:
    """Settings by section; data files of this repository are found from every folder. ConfigError for an unknown name."""
    if name not in recipe_names():
        raise ConfigError(f"there is no recipe {name!r}; give {AUTO}, {', '.join(recipe_names())}")
    sections = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    sections.pop(EXPECTED, None)
    for setting in ("data", "held_out_data"):
        path = sections["data"].get(setting)
        if path and not Path(path).exists() and (ROOT / path).exists():
            sections["data"][setting] = str(ROOT / path)
    return sections


def recipe_value(name: str | None, section: str, setting: str) -> Any:
    """What a recipe has for a setting; `cpu` speaks for runs from before there were recipes."""
    return read_recipe(name or "cpu")[section].get(setting)
