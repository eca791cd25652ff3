"""Decoded examples of a run: `evaluation.json` as text coloured by what each target call brought.

The part of that file which is read here (evaluate.py writes it; all lengths include the bonus token):

    {"acceptance_length": 1.6, "acceptance_interval": [1.5, 1.7], "speedup": 1.2, "exact": 8, "compared": 8,
     "warnings": [], "prompts": [{"prompt": "..", "chunks": [{"text": "The answer", "accepted": 1}, ...],
         "acceptance_length": 1.6, "tokens": 96, "target_calls": 60, "seconds": 2.1, "plain_seconds": 2.9}]}

A chunk is what one target call brought: `accepted` draft tokens and the bonus token. Only `prompts` with `prompt`
and `chunks` must be there; the rest is shown where it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from dflash.errors import DataError
from dflash.views import style
from dflash.views.templates import render

EVALUATION_NAME = "evaluation.json"
# Light to strong: one token (nothing accepted) is left plain, so that what the drafter brought stands out.
LEVELS = ("transparent", "#56B4E955", "#56B4E9AA", "#009E7388", "#009E73CC", "#E69F00AA", "#E69F00EE")


def read_evaluation(run_path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The run's examples, None if it has none; DataError for a file of another form."""
    path = Path(run_path) / EVALUATION_NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        for entry in content["prompts"]:
            entry["prompt"], [chunk["text"] for chunk in entry["chunks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no evaluation record ({error}); evaluate the run again") from error
    return content


def examples_html(content: dict[str, Any], most: int = 6) -> Markup:
    """The prompts with their answers, each target call's text shaded by the tokens it brought."""
    widest = max((_tokens(c) for entry in content["prompts"] for c in entry["chunks"]), default=1)
    entries = [
        {
            "prompt": readable(entry["prompt"]),
            "facts": _facts(entry),
            "chunks": [
                {"text": c["text"], "tokens": _tokens(c), "accepted": c.get("accepted", 0), "colour": _level(_tokens(c))}
                for c in entry["chunks"]
            ],
        }
        for entry in content["prompts"][:most]
    ]
    return render(
        "examples.html",
        overall=_overall(content),
        warnings=content.get("warnings") or [],
        legend=[(count, _level(count)) for count in range(1, min(widest, len(LEVELS)) + 1)],
        entries=entries,
        left=len(content["prompts"]) - most,
    )


def samples_html(samples: Sequence[tuple[int, dict[str, Any]]], most: int = 4) -> Markup | None:
    """One held-out answer as evaluations saw it, by (step, entry): the first, the newest, and some between."""
    if not samples:
        return None
    shown = sorted({round(i * (len(samples) - 1) / max(1, most - 1)) for i in range(most)}) if most > 1 else [-1]
    prompt = style.clip(readable(samples[0][1]["prompt"]), 300)
    content = {
        "about": f"A held-out prompt, its answer replayed with the drafter of that step: {prompt}",
        "prompts": [{**samples[i][1], "prompt": f"step {samples[i][0]}"} for i in shown],
    }
    return examples_html(content)


def readable(prompt: str) -> str:
    """A rendered chat prompt without its template marks: what was asked, the system part left out."""
    turns = re.split(r"<\|im_start\|>(\w+)\n", prompt)
    if len(turns) >= 3:
        asked = [text for role, text in zip(turns[1::2], turns[2::2], strict=True) if role == "user"]
        prompt = asked[-1] if asked else prompt
    return re.sub(r"<\|[^|>]{1,40}\|>", " ", prompt).strip()


def _overall(content: dict[str, Any]) -> str:
    facts = [content["about"]] if content.get("about") else []
    if content.get("acceptance_length") is not None:
        spread = content.get("acceptance_interval")
        between = f" (95% interval {spread[0]:.2f} to {spread[1]:.2f} over prompts)" if spread else ""
        facts.append(f"acceptance length {content['acceptance_length']:.2f}, bonus token included{between}")
    if content.get("speedup"):
        spread = content.get("speedup_spread")
        between = f" (median; {spread[0]:.2f} to {spread[1]:.2f} over prompts)" if spread else ""
        facts.append(f"{content['speedup']:.2f} times as fast as plain decoding{between}")
    if content.get("compared"):
        facts.append(f"{content.get('exact')} of {content['compared']} answers equal to plain greedy token for token")
    return " · ".join(facts)


def _facts(entry: dict[str, Any]) -> str:
    facts = []
    if entry.get("acceptance_length") is not None:
        facts.append(f"acceptance length {entry['acceptance_length']:.2f} (bonus token included)")
    if entry.get("tokens") and entry.get("target_calls"):
        facts.append(f"{entry['tokens']} tokens in {entry['target_calls']} target calls")
    seconds, plain = entry.get("seconds"), entry.get("plain_seconds")
    if seconds and plain:
        facts.append(f"{seconds:.2f} s, plain decoding {plain:.2f} s ({plain / seconds:.2f} times)")
    elif seconds:
        facts.append(f"{seconds:.2f} s")
    return " · ".join(facts)


def _tokens(chunk: dict[str, Any]) -> int:
    return int(chunk.get("tokens") or chunk.get("accepted", 0) + 1)


def _level(tokens: int) -> str:
    return LEVELS[min(max(tokens, 1), len(LEVELS)) - 1]
