"""Training text for a target that need not understand any: `data="random:24"` is 24 packs of random token ids.

Each pack is full to the last token, with documents of about 2,000 tokens. So a run on it has the sizes of a real one
without a tokenizer, and two runs of the same seed train on the same ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from dflash.data.packing import Conversation
from dflash.data.report import DataReport
from dflash.errors import DataError

PREFIX = "random:"
DOCUMENT = 2000  # tokens, on average
MOST_TOKENS = 50_000_000  # of all packs; they are kept in memory, at about 50 bytes each
PROMPT = 16  # tokens at the start of a document that are not learnt


def random_packs(data: str) -> int | None:
    """How many packs of random ids `data` asks for; None where it names a file. Raises DataError for `random:x`."""
    if not str(data).lower().startswith(PREFIX):
        return None
    count = str(data)[len(PREFIX) :]
    if not re.fullmatch("[0-9]{1,6}", count) or int(count) == 0:
        raise DataError(f"data is '{data}'; wanted {PREFIX}N with the number of packs, for instance {PREFIX}24")
    return int(count)


def random_conversations(
    packs: int, pack_length: int, vocab_size: int, avoid: Iterable[int] = (), seed: int = 0
) -> tuple[list[Conversation], DataReport]:
    """Documents that fill `packs` packs one after another, when packed in order.

    Args:
        avoid: ids that are never drawn: the mask token and those that end a text.

    Raises: DataError for more than MOST_TOKENS.
    """
    generator = torch.Generator().manual_seed(seed)
    if packs * pack_length > MOST_TOKENS:
        raise DataError(
            f"data is '{PREFIX}{packs}' with pack_length {pack_length}, {packs * pack_length:,} tokens; wanted "
            f"at most {MOST_TOKENS:,}, here {PREFIX}{max(1, MOST_TOKENS // pack_length)}: a run takes the same "
            "packs again and again"
        )
    report = DataReport(f"{PREFIX}{packs} (random ids, no text)")
    banned = sorted({token for token in avoid if 0 <= token < vocab_size})
    conversations = []
    for _ in range(packs):
        for length in _lengths(pack_length, generator):
            ids = torch.randint(0, vocab_size - len(banned), (length,), generator=generator)
            for token in banned:
                ids += ids >= token
            prompt = min(PROMPT, length // 4)
            conversations.append(
                Conversation(ids.tolist(), [False] * prompt + [True] * (length - prompt), len(conversations))
            )
            report.rows += 1
            report.kept_ids += 1
            report.add(length, length - prompt)
    return conversations, report


def _lengths(total: int, generator: torch.Generator) -> list[int]:
    """Document lengths within a quarter of their mean, which sum to `total`; a short pack has up to four."""
    count = round(total / DOCUMENT) if total >= 2 * DOCUMENT else max(1, min(4, total // 16))
    shares = 0.75 + 0.5 * torch.rand(count, generator=generator, dtype=torch.float64)
    ends = (shares.cumsum(0) * (total / shares.sum())).round().long()
    ends[-1] = total
    return ends.diff(prepend=ends.new_zeros(1)).tolist()
