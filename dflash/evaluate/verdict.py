"""What a serve check found: the lines that must not be there, and the table."""

from __future__ import annotations

from typing import Any

from dflash.runs.tables import Table

LENGTH_SHARE = 0.01  # float32: lengths on the same rounds may be this far apart
SLOT_POINTS = 2.0  # and the shares of a slot this many points
GAP = 0.1  # logits; a draft that differs by more than that is no rounding


def problems(summary: dict[str, Any]) -> list[str]:
    """What a float32 check must not show, a line each; in another dtype differences are only reported."""
    if summary["options"]["dtype"] != "float32":
        return []
    found = []
    if summary["ours_exact"] < summary["prompts"]:
        found.append(f"our own decoding gives another text for {summary['prompts'] - summary['ours_exact']} prompts")
    for name, passes in summary["servers"].items():
        for entry in passes:
            wide = [item for item in entry["differing"] if item["wide"] or entry["concurrency"] == 1]
            if wide:
                found.append(
                    f"the server {name} gives another text for {len(wide)} of {summary['prompts']} prompts at concurrency "
                    f"{entry['concurrency']}, first prompt {wide[0]['prompt']} at token {wide[0]['index']}"
                )
    both = summary["same_rounds"]
    if not both["rounds"]:
        return [*found, "no text agrees, so no rounds could be compared"]
    apart = abs(both["length_server"] / both["length_ours"] - 1)
    if apart > LENGTH_SHARE:
        found.append(f"acceptance lengths on the same rounds are {100 * apart:.1f}% apart, wanted {100 * LENGTH_SHARE:.0f}%")
    for slot, (a, b) in enumerate(zip(both["by_slot_ours"], both["by_slot_server"], strict=True), 1):
        if 100 * abs(a - b) > SLOT_POINTS:
            found.append(f"slot {slot} stands {100 * abs(a - b):.1f} points apart, wanted {SLOT_POINTS:.0f}")
    if both["largest_gap"] > GAP:
        found.append(f"a draft differs though our logits prefer ours by {both['largest_gap']:.2g}; rounding explains {GAP}")
    return found


def table(summary: dict[str, Any]) -> str:
    """The figures as text, the same that `check.json` holds."""
    both, rows = summary["same_rounds"], []
    for label, key in (("training's view", "training"), ("our decoding", "ours"), ("the server, trimmed", "server")):
        entry = summary[key]
        shares = [100 * share for share in entry["acceptance_by_slot"]]
        rows.append([label, entry["blocks"], entry["acceptance_length"], *shares])
    slots = [f"slot {slot}, %" for slot in range(1, summary["block_size"])]
    rows.append(["its own counters", None, summary["untrimmed_length"], *[None] * len(slots)])
    speeds = [
        {
            "server": name,
            "at a time": entry["concurrency"],
            "tokens/s": entry["tokens_per_second"],
            "texts equal": entry["identical"],
        }
        for name, passes in summary["servers"].items()
        for entry in passes
    ]
    gaps = f", logit gaps up to {both['largest_gap']:.2g}" if both["differing"] else ""
    parts = [
        "Acceptance: tokens per target call (bonus token included), and drafts accepted up to each slot.",
        str(Table(rows, ["seen by", "calls", "length", *slots])),
        f"Its counters go on past the end of a text. On its {both['rounds']} rounds: ours {both['length_ours']:.3f}, server "
        f"{both['length_server']:.3f}; {len(both['differing'])} rounds differ{gaps}.",
        "",
        f"Greedy text of {summary['prompts']} prompts ({summary['options']['dtype']}), beside our plain text.",
        str(Table(speeds, ["server", "at a time", "tokens/s", "texts equal"])),
    ]
    return "\n".join(parts + [f"PROBLEM: {line}" for line in summary["problems"]])
