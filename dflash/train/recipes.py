"""Recipes: named settings, one YAML file each in `dflash/recipes/`, with the curve that was measured where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dflash.errors import ConfigError
from dflash.train.topology import available_gpus, is_cpu

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dflash" / "recipes"
AUTO = "auto"
EXPECTED = "expected"  # of a recipe file: measured curves, see `expected_band`
_FREE = ("max_minutes", "eval_every", "checkpoint_every", "keep_checkpoints", "features", "cache_gib", "cache_dir")


def recipe_names() -> list[str]:
    """Every recipe there is."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


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


def expected_band(config: Mapping[str, Any], packs_per_step: int) -> dict[str, Any] | None:
    """Where the held-out acceptance length of a run of this config is expected: `steps`, `low`, `high`, and `measured`, on
    what. None where its recipe has no measured curve, or where the run is not the recipe's.

    A recipe file has, written by `tools/expected_curve.py`:

        expected:
          margin: 0.06          # what seeds and machines differ by
          curves:
          - measured: two cores, torch 2.13.0
            acceptance: {0: 1.0, 100: 1.2}
    """
    name = config.get("recipe")
    if name not in recipe_names():
        return None
    expected = yaml.safe_load((FOLDER / f"{name}.yaml").read_text()).get(EXPECTED)
    recipe = read_recipe(name)
    same = all(
        config.get(section, {}).get(setting) == value or setting in _FREE
        for section, values in recipe.items()
        for setting, value in values.items()
    )
    if not expected or not same or packs_per_step != recipe["train"]["packs_per_step"]:
        return None
    curves = [curve["acceptance"] for curve in expected["curves"]]
    steps = sorted({step for curve in curves for step in curve})
    # a curve says nothing outside its own steps
    at = [np.interp(steps, list(curve), list(curve.values()), left=np.nan, right=np.nan) for curve in curves]
    low, high = np.nanmin(at, 0) - expected["margin"], np.nanmax(at, 0) + expected["margin"]
    measured = "; ".join(curve["measured"] for curve in expected["curves"])
    return {"steps": steps, "low": np.maximum(1.0, low).tolist(), "high": high.tolist(), "measured": measured}
