"""What a serve check found: the lines that must not be there, and the table."""

from __future__ import annotations

from typing import Any

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
    both, lines = summary["same_rounds"], []
    lines.append("acceptance (tokens per target call, bonus token included; then drafts that stand up to each slot)")
    for name, label in (("training", "training's view"), ("ours", "our decoding"), ("server", "the server, trimmed")):
        entry = summary[name]
        length = "-" if entry["acceptance_length"] is None else f"{entry['acceptance_length']:.3f}"
        shares = "  ".join(f"{100 * share:.1f}%" for share in entry["acceptance_by_slot"])
        lines.append(f"  {label:<20} {length}  over {entry['blocks']} calls   {shares}")
    lines.append(f"  {'its own counters':<20} {summary['untrimmed_length']:.3f}  they go on past the end of a text")
    lines.append(
        f"on the server's {both['rounds']} rounds: ours {both['length_ours']:.3f}, server {both['length_server']:.3f}; "
        f"{len(both['differing'])} rounds differ"
        + (f", logit gaps up to {both['largest_gap']:.2g}" if both["differing"] else "")
    )
    for name, passes in summary["servers"].items():
        for entry in passes:
            lines.append(
                f"server {name}, {entry['concurrency']} at a time: {entry['tokens_per_second']:.1f} tokens/s, "
                f"{entry['identical']} of {summary['prompts']} texts equal to our plain text"
            )
    return "\n".join(lines + [f"PROBLEM: {line}" for line in summary["problems"]])
