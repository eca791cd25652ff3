"""What a recipe was measured to reach, as a band for the runs that have its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml

from dflash.train import recipes
from dflash.train.settings import RunConfig

# Settings that leave what a step learns as it is, but for chance and rounding.
_FREE = {"max_minutes", "eval_every", "checkpoint_every", "keep_checkpoints", "features", "cache_gib", "cache_dir", "seed"}
_FREE |= {"dtype", "target_dtype", "attention", "target_attention", "fast_capture", "max_dense_gib", "max_skipped"}


def expected_band(config: Mapping[str, Any], packs_per_step: int) -> dict[str, Any] | None:
    """Where the held-out acceptance length of a run of this config (`RunConfig.to_dict`) is expected: `steps`, `low`, `high`
    and `measured`, on what. None where its recipe has no measured curve, or where the run is not the recipe's.

    A recipe file has, written by `tools/expected_curve.py`:

        expected:
          margin: 0.06          # what seeds and machines differ by
          curves:
          - measured: two cores, torch 2.13.0
            acceptance: {0: 1.0, 100: 1.2}
    """
    name = config.get("recipe")
    if name not in recipes.recipe_names():
        return None
    expected = yaml.safe_load((recipes.FOLDER / f"{name}.yaml").read_text()).get(recipes.EXPECTED)
    if not expected:
        return None
    wanted = RunConfig.from_parameters(name).to_dict()
    sections = ("target", "data", "drafter", "train")
    same = all(
        config.get(section, {}).get(setting, value) == value or setting in _FREE
        for section in sections
        for setting, value in wanted[section].items()
    )
    if not same or packs_per_step != wanted["train"]["packs_per_step"]:
        return None
    curves = [curve["acceptance"] for curve in expected["curves"]]
    steps = sorted({step for curve in curves for step in curve})
    # a curve says nothing outside its own steps
    at = [np.interp(steps, list(curve), list(curve.values()), left=np.nan, right=np.nan) for curve in curves]
    low, high = np.nanmin(at, 0) - expected["margin"], np.nanmax(at, 0) + expected["margin"]
    measured = "; ".join(curve["measured"] for curve in expected["curves"])
    return {"steps": steps, "low": np.maximum(1.0, low).tolist(), "high": high.tolist(), "measured": measured}
