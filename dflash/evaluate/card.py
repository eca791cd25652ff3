"""An export's card: what the drafter was trained on, how, what it reached, its limits, and the lines that serve it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dflash.runs.record import read_metrics

_SHOWN = {
    "data": ("max_conversations", "pack_length"),
    "drafter": ("draft_vocab", "warm_start"),
    "train": ("packs_per_step", "lr", "gamma", "soft_labels", "dtype", "seed"),
}
_LIMITS = """Made for this target alone: its weights, its chat template and its thinking mode. With another, quantised or
fine-tuned target the text stays that target's own, and fewer drafts are accepted. Acceptance falls on text unlike the
training conversations, on sampled text, and past `pack_length` tokens. A server's counters read higher: they count drafts
behind the end of a text too."""


def write_card(path: Path, run: Path | None, checkpoint: Path, lines: Mapping[str, str]) -> None:
    """Complete the card at `path`, which describes the layout, with the run's facts and the lines that serve the drafter."""
    parts = ["---", "tags: [dflash, speculative-decoding, draft-model]", "---", path.read_text().rstrip()]
    if lines:
        parts += ["", "## Serve", ""]
        for server, line in lines.items():
            parts += [f"{server}:", "", "```", line, "```", ""]
        parts.append(
            "More drafts a call than the block has are not refused by vLLM, and never accepted; fewer make a call cheaper."
        )
    if run is not None:
        parts += _training(run, checkpoint)
    parts += ["", "## Limits", "", " ".join(_LIMITS.split())]
    path.write_text("\n".join(parts) + "\n")


def _training(run: Path, checkpoint: Path) -> list[str]:
    config = yaml.safe_load((run / "config.yaml").read_text()) or {}
    step = int(checkpoint.name.rpartition("-")[2]) if checkpoint.name.startswith("step-") else None
    data = Path(str((config.get("data") or {}).get("data", ""))).name
    parts = ["", "## Training", "", f"Conversations of `{data}`" + (f", {step} steps." if step is not None else ".")]
    shown = [
        f"{name} {config[section][name]}"
        for section, names in _SHOWN.items()
        for name in names
        if (config.get(section) or {}).get(name) is not None
    ]
    parts += ["", "Settings: " + ", ".join(shown) + "."] if shown else []
    records = [r for r in read_metrics(run)[0] if r["kind"] == "eval" and r.get("blocks")]
    record = next((r for r in reversed(records) if step is None or r.get("step", 0) <= step), None)
    return parts + (_acceptance(record) if record else ["", "Its acceptance was not measured."])


def _acceptance(record: Mapping[str, Any]) -> list[str]:
    blocks = record["blocks"]
    parts = [
        "",
        f"Held-out acceptance length {record['acceptance_length']:.3f} (tokens gained per target call, the bonus token "
        f"included), greedy, over {blocks} target calls at step {record.get('step')}.",
        "",
        "| slot | drafts accepted up to it | 95% interval over calls |",
        "|---|---|---|",
    ]
    for slot, share in enumerate(record["acceptance_by_slot"], 1):
        low, high = interval(share, blocks)
        parts.append(f"| {slot} | {100 * share:.1f}% | {100 * low:.1f} to {100 * high:.1f}% |")
    return parts


def interval(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share of `count` trials."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)
