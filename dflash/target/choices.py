"""Choices that a target's shape and tokenizer decide: which layers to capture, which token masks a slot."""

from __future__ import annotations

import re
from collections.abc import Collection

from dflash.errors import TargetError


def default_layer_ids(num_layers: int, count: int = 5) -> list[int]:
    """`count` layer ids evenly spread from 1 to `num_layers - 3`, as the published drafters choose them.

    64 layers and 5 ids give [1, 16, 31, 46, 61]. Fewer layers than that needs: spread over all of them.
    """
    if not 1 <= count <= num_layers:
        raise TargetError(f"asked for {count} captured layers of a target with {num_layers}; wanted 1 to {num_layers}")
    if count == 1:
        return [num_layers // 2]
    first, last = (1, num_layers - 3) if num_layers - 3 >= count else (0, num_layers - 1)
    return [round(first + index * (last - first) / (count - 1)) for index in range(count)]


def validate_layer_ids(layer_ids, num_layers: int) -> list[int]:
    """Layer ids as a list of distinct ints in `[0, num_layers)`, in the order given."""
    ids = list(layer_ids)
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TargetError(f"layer id {value!r} is not an integer")
        if not 0 <= value < num_layers:
            raise TargetError(
                f"layer id {value} is out of range: this target has layers 0 to {num_layers - 1} "
                "(an id means the output of that layer)"
            )
    if not ids or len(set(ids)) != len(ids):
        raise TargetError(f"layer ids {ids} must be a non-empty list without repeats")
    return ids


def choose_mask_token_id(tokenizer, vocab_size: int, end_ids=(), seen: Collection[int] = ()) -> int:
    """A token for the masked slots that never occurs in text.

    In this order: the tokenizer's own mask token; the first embedding row past the tokenizer's vocabulary (the published
    drafters' choice); another row that no token uses; a special token without a role, which the chat template does not
    write, the model would not (a thought's or a tool's), and the data does not hold (`seen`).
    """
    if tokenizer is None:
        return vocab_size - 1
    taken = {getattr(tokenizer, f"{role}_token_id", None) for role in ("pad", "eos", "bos", "unk")} | {*end_ids, *seen}
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is not None and mask not in taken and mask < vocab_size:
        return mask
    used = {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder, *seen}
    past, held = max(used, default=-1) + 1, used | taken
    free = next((index for index in [past, *range(vocab_size)] if index < vocab_size and index not in held), None)
    if free is not None:
        return free
    template = str(tokenizer.chat_template or "")
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        written = token.content in template or re.search("think|tool|call|response", token.content, re.IGNORECASE)
        if token.special and index not in taken and index < vocab_size and not written:
            return index
    raise TargetError(
        "no unused token was found for the masked slots: every embedding row has a token, and every special token has a "
        "role, stands in the chat template or occurs in the data. Name the least harmful one with mask_token_id"
    )


def validate_mask_token_id(mask_token_id: int, tokenizer, vocab_size: int, end_ids=()) -> int:
    """Refuse a mask token that the target reads as something else."""
    if isinstance(mask_token_id, bool) or not isinstance(mask_token_id, int):
        raise TargetError(f"mask_token_id is {mask_token_id!r}; wanted an integer")
    if not 0 <= mask_token_id < vocab_size:
        raise TargetError(f"mask_token_id {mask_token_id} is outside the embedding, which has {vocab_size} rows")
    roles = {f"end token {index}": index for index in end_ids}
    for role in ("pad", "eos", "bos"):
        roles[f"{role} token"] = getattr(tokenizer, f"{role}_token_id", None)
    for role, index in roles.items():
        if index == mask_token_id:
            raise TargetError(
                f"mask_token_id {mask_token_id} is also the {role}; wanted a token that never occurs "
                "in text, for instance the one `choose_mask_token_id` finds"
            )
    return mask_token_id
