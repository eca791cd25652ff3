"""Decoded examples of a run: `evaluation.json`, and the text coloured by what each target call brought.

The file's form (all lengths include the bonus token):

    {"acceptance_length": 1.6, "tokens": 960, "target_calls": 600, "seconds": 21.0,
     "prompts": [{"prompt": "..", "chunks": [{"text": "The answer", "accepted": 1, "tokens": 2}, ...],
                  "acceptance_length": 1.6, "tokens": 96, "target_calls": 60,
                  "seconds": 2.1, "plain_seconds": 2.9}]}

A chunk is what one target call brought: `accepted` draft tokens and the bonus token.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import DataError

EVALUATION_NAME = "evaluation.json"
# Light to strong: one token (nothing accepted) is left plain, so that what the drafter brought stands out.
LEVELS = ("transparent", "#56B4E955", "#56B4E9AA", "#009E7388", "#009E73CC", "#E69F00AA", "#E69F00EE")


def example(
    prompt: str,
    chunks: Sequence[Sequence[int]],
    tokenizer: Any,
    seconds: float,
    plain_seconds: float | None = None,
) -> dict[str, Any]:
    """One prompt's entry from decoded chunks: `chunks[i]` holds the token ids that target call i brought."""
    texts, ids, shown = [], [], ""
    for chunk in chunks:  # decoded cumulatively: a token may only be readable together with its neighbour
        ids += list(chunk)
        text = tokenizer.decode(ids)
        texts.append(text[len(shown) :] if text.startswith(shown) else tokenizer.decode(list(chunk)))
        shown = text
    tokens = sum(len(chunk) for chunk in chunks)
    return {
        "prompt": prompt,
        "chunks": [
            {"text": text, "accepted": max(0, len(chunk) - 1), "tokens": len(chunk)}
            for text, chunk in zip(texts, chunks, strict=True)
        ],
        "acceptance_length": tokens / len(chunks) if chunks else None,
        "tokens": tokens,
        "target_calls": len(chunks),
        "seconds": seconds,
        "plain_seconds": plain_seconds,
    }


def write_evaluation(
    run_path: str | os.PathLike[str], prompts: Sequence[dict[str, Any]], **fields: Any
) -> Path:
    """Write `evaluation.json` with the sums over `prompts`; `fields` are kept beside them."""
    tokens = sum(entry["tokens"] for entry in prompts)
    calls = sum(entry["target_calls"] for entry in prompts)
    content = {
        "acceptance_length": tokens / calls if calls else None,
        "tokens": tokens,
        "target_calls": calls,
        "seconds": sum(entry["seconds"] for entry in prompts),
        **fields,
        "prompts": list(prompts),
    }
    path = Path(run_path) / EVALUATION_NAME
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1))
    return path


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


def examples_html(content: dict[str, Any], most: int = 6) -> str:
    """The prompts with their answers, each target call's text shaded by the tokens it brought."""
    widest = max((_tokens(c) for entry in content["prompts"] for c in entry["chunks"]), default=1)
    legend = "".join(
        f'<span style="background:{_level(count)};padding:1px 7px;margin-right:5px;border-radius:3px;'
        f'border:1px solid #8884">{count}</span>'
        for count in range(1, min(widest, len(LEVELS)) + 1)
    )
    parts = [f'<p class="legend">Tokens that one target call brought, bonus token included: {legend}</p>']
    for entry in content["prompts"][:most]:
        text = "".join(
            f'<span title="{_tokens(chunk)} tokens, {chunk.get("accepted", 0)} drafted" '
            f'style="background:{_level(_tokens(chunk))};border-right:1px solid #8886">'
            f"{html.escape(chunk['text'])}</span>"
            for chunk in entry["chunks"]
        )
        parts.append(
            f'<div class="example"><p class="prompt">{html.escape(entry["prompt"])}</p>'
            f'<p class="answer" style="white-space:pre-wrap;line-height:1.75">{text}</p>'
            f'<p class="facts">{html.escape(_facts(entry))}</p></div>'
        )
    left = len(content["prompts"]) - most
    if left > 0:
        parts.append(f'<p class="facts">{left} more in {EVALUATION_NAME}.</p>')
    return "".join(parts)


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
