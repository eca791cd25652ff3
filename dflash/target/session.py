"""A target with its cache over one growing text, which can take back the tail of what it was just given.

Attention layers that keep every key and value are cut to the accepted length. Other layers cannot be cut: a
recurrent or convolution state has already taken in the rejected tokens, and a sliding window has already dropped
old ones (z-lab/dflash#172, huggingface/transformers#49036). Their state is saved before a block and put back after
a rejection; the accepted tokens are then fed again in front of the next block, in the same call.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from dflash.errors import TargetError
from dflash.target.capture import Target

_CHUNK_SAFE: weakref.WeakKeyDictionary[Target, bool] = weakref.WeakKeyDictionary()


class TargetSession:
    """One text on one target.

    Args:
        target: its hooks give the features, exactly as in training capture.
        max_pending: accepted tokens that may wait to be fed again; more than that get a call of their own.

    `calls` counts forward passes, `length` the tokens that stand (prompt and accepted ones).
    """

    def __init__(self, target: Target, max_pending: int = 64):
        self.target = target
        self.max_pending = max_pending
        self.cache: Any = None
        self.length = 0
        self.calls = 0
        self._cache_name = cache_argument(target.decoder)
        self._pending: list[int] = []
        self._last: list[int] = []
        self._saved: Any = None
        self._stepwise = target.is_hybrid and not chunks_continue(target)

    def prefill(self, prompt_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Feed the prompt. Returns its features [1, n, N*H] and the logits [V] after its last token."""
        features, last = self._forward(prompt_ids)
        self.length = len(prompt_ids)
        return features, target_logits(self.target, last[:, -1:])[0]

    def advance(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Feed tokens that may be taken back. Returns their features [1, n, N*H] and logits [n, V].

        The tokens count only after `keep`.
        """
        if len(self._pending) > self.max_pending:
            self._forward(self._pending)
            self._pending = []
        fed = self._pending + list(ids)
        if len(ids) > 1 and not self._croppable():
            self._saved = save_state(self.cache)
        features, last = self._forward(fed)
        self._last = list(ids)
        rows = len(ids)
        return features[:, -rows:], target_logits(self.target, last[:, -rows:])

    def keep(self, count: int) -> None:
        """Accept the first `count` tokens of the last `advance` and forget the others."""
        if not 1 <= count <= len(self._last):
            raise ValueError(f"cannot keep {count} of the {len(self._last)} tokens fed last")
        self.length += count
        if count == len(self._last):
            self._pending = []
        elif self._saved is None:
            for layer in self.cache.layers:
                layer.keys = layer.keys[..., : self.length, :]
                layer.values = layer.values[..., : self.length, :]
        else:
            self.cache = restore_state(self.cache, self._saved)
            self._pending = self._pending + self._last[:count]
        self._last, self._saved = [], None

    def _croppable(self) -> bool:
        from transformers.cache_utils import DynamicLayer

        layers = getattr(self.cache, "layers", None)
        return layers is not None and all(type(layer) is DynamicLayer for layer in layers)

    @torch.no_grad()
    def _forward(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        if not self._stepwise or self.cache is None or len(ids) == 1:
            return self._run(ids)
        parts = [self._run([token]) for token in ids]
        return torch.cat([features for features, _ in parts], 1), torch.cat([last for _, last in parts], 1)

    def _run(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        tokens = torch.tensor([ids], dtype=torch.int64, device=self.target.device)
        layers, last, self.cache = run_cached(self.target, tokens, self.cache, self._cache_name)
        return torch.cat(layers, -1), last


@torch.no_grad()
def run_cached(target: Target, ids: Tensor, cache: Any, name: str, **how: Any) -> tuple[list[Tensor], Tensor, Any]:
    """One forward of `ids` [batch, n] on top of a cache (None starts one): layer outputs, last states, the cache.

    Goes through the hooks that training capture uses, so a feature means the same in both.
    """
    store: dict[int, Tensor] = {}
    target._captured.store = store
    try:
        output = target.decoder(input_ids=ids, use_cache=True, **{name: cache}, **how)
    finally:
        target._captured.store = None
    last = output.last_hidden_state
    rows = {last.shape[1], *(states.shape[1] for states in store.values())}
    if rows != {ids.shape[1]}:
        raise TargetError(f"the target gave states for {sorted(rows)} positions and was given {ids.shape[1]} tokens")
    cache = getattr(output, name, None)
    if cache is None:
        raise TargetError(f"{type(target.decoder).__name__} returned no cache under '{name}'; it cannot decode")
    return [store[index] for index in target.layer_ids], last, cache


@torch.no_grad()
def target_logits(target: Target, last: Tensor) -> Tensor:
    """The target's logits [n, V] of final-normed states [1, n, H], by its own head."""
    return target.logits(last)[0]


def cache_argument(decoder: torch.nn.Module) -> str:
    """How this transformers version names the cache: `cache` since 5.23 or so, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def save_state(cache: Any) -> Any:
    """A copy of everything in a cache that a later forward may overwrite."""
    from transformers.cache_utils import DynamicLayer

    layers = getattr(cache, "layers", None)
    if layers is None:  # a model's own cache class
        return {key: _copy(value) for key, value in vars(cache).items()}
    saved = []
    for layer in layers:
        grown = ("keys", "values") if isinstance(layer, DynamicLayer) else ()  # replaced by a forward, never written
        saved.append({key: value if key in grown else _copy(value) for key, value in vars(layer).items()})
    return saved


def restore_state(cache: Any, saved: Any) -> Any:
    """Put a saved state back; the same state may not be used twice."""
    if isinstance(saved, dict):
        vars(cache).update(saved)
    else:
        for layer, state in zip(cache.layers, saved, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
    return cache


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def chunks_continue(target: Target, tolerance: float | None = None) -> bool:
    """Whether several tokens on top of a cache give what they give in one go. Tried once per target.

    Some versions of hybrid models start the recurrent state from zero when they get more than one token at once;
    such a target is fed token by token, which is slow and right.
    """
    if target not in _CHUNK_SAFE:
        name = cache_argument(target.decoder)
        vocabulary = target.embed_weight.shape[0]
        ids = torch.arange(1, 13, device=target.device)[None] * 7919 % vocabulary  # [1, 12]
        _, whole, _ = run_cached(target, ids, None, name)
        _, _, cache = run_cached(target, ids[:, :6], None, name)
        _, tail, _ = run_cached(target, ids[:, 6:], cache, name)
        difference = (tail - whole[:, 6:]).float().abs().max() / whole.float().std().clamp_min(1e-6)
        limit = tolerance or (0.01 if target.dtype in (torch.float32, torch.float64) else 0.3)
        _CHUNK_SAFE[target] = bool(difference <= limit)
        if not _CHUNK_SAFE[target]:
            warnings.warn(
                f"target '{target.source}' does not continue its recurrent state over several tokens in this "
                f"transformers version (off by {float(difference):.2g} standard deviations): it is fed token by "
                "token, so decoding is right but not faster. Upgrade transformers",
                stacklevel=3,
            )
    return _CHUNK_SAFE[target]
