"""A target over many growing texts at once: one call takes some new tokens of each, wherever each of them stands.

Keys and values lie in buffers of one size (`drafter.rows`), so rejected tokens need no taking back: the next ones overwrite
them. That holds for attention layers alone. A recurrent state takes in what it is given, so such targets, and those
spread over several devices, decode one text at a time (`session`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash.drafter.rows import attend_rows, flat_places, fold_bias, range_bias, write
from dflash.target.capture import Target, group_documents
from dflash.target.session import cache_argument, run_cached

_ATTENTION = "dflash_rows"
_WHY_NOT: weakref.WeakKeyDictionary[Target, str] = weakref.WeakKeyDictionary()


def why_one_by_one(target: Target) -> str:
    """Why this target cannot decode texts side by side; empty where it can. Tried once per target, on two short texts."""
    if target not in _WHY_NOT:
        found = _windows(target.config)
        if isinstance(found, str):
            _WHY_NOT[target] = found
        elif len({weight.device for weight in target.model.parameters()}) > 1:
            _WHY_NOT[target] = "it is spread over several devices"
        else:
            _WHY_NOT[target] = _trial(target)
        if _WHY_NOT[target]:
            warnings.warn(f"target '{target.source}' decodes one text at a time: {_WHY_NOT[target]}", stacklevel=3)
    return _WHY_NOT[target]


def _windows(config: Any) -> dict[str, int | None] | str:
    """The sliding window of each kind of layer, or why there is no mask for one of them."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "layer_types", None):
        return {"full_attention": window if getattr(config, "use_sliding_window", True) else None}
    kinds = dict.fromkeys(config.layer_types)
    strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if strange:
        return f"it has {strange[0]} layers"
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


class _RowLayer(CacheLayerMixin):
    """One layer's keys and values, each [R, P, Nkv, D]; `cache.at` says where a call's tokens belong."""

    is_sliding = False

    def __init__(self, cache: RowCache):
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room for states [.., Nkv, n, D]."""
        shape = (self._cache.rows, self._cache.places)
        self.keys, self.values = (x.new_zeros(*shape, x.shape[1], x.shape[3]) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        at = self._cache.at
        return write(self.keys, at, key_states), write(self.values, at, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.places, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._cache.places

    get_max_cache_shape = get_max_length  # its name before transformers 5.20 or so


class RowCache(Cache):
    """What a transformers decoder is given as its cache."""

    def __init__(self, layers: int, rows: int, places: int):
        self.rows, self.places, self.at = rows, places, None
        super().__init__(layers=[_RowLayer(self) for _ in range(layers)])


class RowSession:
    """Up to `rows` texts of at most `places` tokens on one target."""

    def __init__(self, target: Target, rows: int, places: int):
        self.target, self.rows, self.places = target, rows, places
        self.windows = _windows(target.config)
        self.cache: RowCache | None = None
        self._name = cache_argument(target.decoder)

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Feed prompts, those of similar length together: rows [g], their features [g, n, N*H] padded on the right, and the
        final-normed states [g, H] of their last tokens."""
        sizes, device = [len(prompt) for prompt in prompts], self.target.device
        for group in group_documents(sizes, self.target.max_batch_tokens):
            longest = max(sizes[index] for index in group)
            padded = [prompts[index] + [0] * (longest - sizes[index]) for index in group]
            ids, rows = torch.tensor(padded, device=device), torch.tensor(group, device=device)
            features, last, made = run_cached(self.target, ids, DynamicCache(), self._name)
            if self.cache is None:
                self.cache = RowCache(len(made.layers), self.rows, self.places)
            for own, new in zip(self.cache.layers, made.layers, strict=True):
                if not own.is_initialized:
                    own.lazy_initialization(new.keys, new.values)
                own.keys[rows, :longest], own.values[rows, :longest] = (x.transpose(1, 2) for x in (new.keys, new.values))
            ends = torch.tensor([sizes[index] - 1 for index in group], device=device)
            yield rows, torch.cat(features, -1), last[torch.arange(len(group), device=device), ends]

    @torch.no_grad()
    def advance(self, ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Feed ids [R, n] that follow the first `starts` [R] tokens of each text: features [R, n, N*H] and final-normed
        states [R, n, H]. Reads nothing on the host."""
        config, count = self.target.config, ids.shape[1]
        positions = starts[:, None] + torch.arange(count, device=starts.device)  # [R, n]
        self.cache.at = flat_places(starts, count, self.places)
        with _attending(self.target) as folds:
            group = config.num_attention_heads // config.num_key_value_heads if folds else 1
            masks = {kind: fold_bias(self._bias(positions, window), group) for kind, window in self.windows.items()}
            mask = masks if len(masks) > 1 else next(iter(masks.values()))
            how = {"attention_mask": mask, "position_ids": positions}
            features, last, _ = run_cached(self.target, ids, self.cache, self._name, **how)
        return torch.cat(features, -1), last

    def _bias(self, positions: Tensor, window: int | None) -> Tensor:
        low = torch.zeros_like(positions) if window is None else positions + 1 - window
        return range_bias(low, positions + 1, self.places, self.target.dtype)

    def keep(self, rows: Tensor) -> None:
        """Forget all texts but these."""
        self.rows = self.cache.rows = rows.shape[0]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **how: Any) -> tuple:
    """`attend_rows` as transformers calls an attention."""
    special = [name for name in ("softcap", "s_aux", "position_bias") if how.get(name) is not None]
    if special:
        raise ValueError(f"attention with {special[0]}")
    found = attend_rows(query, key, value, attention_mask, how.get("scaling"))
    return found.transpose(1, 2).contiguous(), None


@contextmanager
def _attending(target: Target) -> Iterator[bool]:
    """The decoder with `attend_rows` in the place of transformers' `sdpa`, and whether it is; another one stays."""
    config = target.decoder.config
    before = config._attn_implementation
    if before == "sdpa":
        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
        config._attn_implementation = _ATTENTION
    try:
        yield before == "sdpa"
    finally:
        config._attn_implementation = before


@torch.no_grad()
def _trial(target: Target) -> str:
    """What is wrong with this target's rows: two texts against their whole forward; empty where nothing is."""
    vocabulary = target.embed_weight.shape[0]
    ids = torch.arange(1, 29, device=target.device).view(2, 14) * 7919 % vocabulary
    session, starts = RowSession(target, 2, 16), torch.tensor([9, 5], device=target.device)
    try:
        for _ in session.prefill([row[:start].tolist() for row, start in zip(ids, starts.tolist(), strict=True)]):
            pass
        new = torch.stack([row[start : start + 5] for row, start in zip(ids, starts.tolist(), strict=True)])
        _, found = session.advance(new, starts)
    except Exception as error:  # whatever a model's own code says to a mask or a cache that it does not know
        return f"its decoder does not take rows ({type(error).__name__}: {error})"
    _, whole = target._run(ids)
    wanted = torch.stack([row[start : start + 5] for row, start in zip(whole, starts.tolist(), strict=True)])
    difference = float((found - wanted).float().abs().max() / whole.float().std().clamp_min(1e-6))
    limit = 0.01 if target.dtype in (torch.float32, torch.float64) else 0.3
    return "" if difference <= limit else f"its states are off by {difference:.2g} standard deviations in rows"
