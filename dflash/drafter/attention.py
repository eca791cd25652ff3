"""Attention of draft queries over [context | draft slots], by one of four backends, each chosen by name.

  flex          block-sparse and compiled; the only backend that scales to full packs. CUDA.
  triton        kernels of our own for this mask (`kernels.attention`), launched without torch.compile. CUDA.
  sdpa          dense `scaled_dot_product_attention`; refuses above a memory bound instead of running out of memory.
  sdpa_chunked  dense over runs of neighbouring anchors, each against its own slice of the context. Same result as
                `sdpa`, far fewer masked products; memory follows the data, so it is for CPU and for comparison.

All of them read the same rule (`masks.visibility`); `triton` has it in the form of ranges and is tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash.drafter import kernels
from dflash.drafter.config import DrafterConfig
from dflash.drafter.masks import AnchorSet, MaskMod, dense_mask, pack_ranges, seen_context, visibility
from dflash.errors import ConfigError

BACKENDS = ("flex", "triton", "sdpa", "sdpa_chunked")
DEFAULT_MAX_DENSE_BYTES = 2 << 30
ANCHORS_PER_CHUNK = 16


class DenseAttentionTooLarge(ConfigError):
    """Dense attention would need more memory than the bound allows."""


def default_backend(device: torch.device | str) -> str:
    """`flex` where it compiles with a backward (CUDA), `sdpa_chunked` elsewhere."""
    return "flex" if torch.device(device).type == "cuda" else "sdpa_chunked"


def automatic_backend(device: torch.device, config: DrafterConfig, block_size: int) -> tuple[str, str | None]:
    """What "auto" comes to for drafters on `device`, and on a GPU why: `triton`, which is faster and compiles nothing, where
    it takes the sizes, else `default_backend`."""
    default = default_backend(device)
    if default != "flex":
        return default, None
    try:
        refuse_backend("triton", device, config.num_attention_heads, config.num_key_value_heads, config.head_dim, block_size)
    except ConfigError as error:
        return default, f"attention is {default}: {str(error).partition('; use ')[0]}"
    return "triton", "attention is triton: its kernels take this drafter's sizes, and nothing has to be compiled first"


def dense_attention_bytes(num_heads: int, queries: int, keys: int, element_size: int) -> int:
    """Bytes of the dense scores [Nq, Q, K] and of the boolean mask [Q, K]."""
    return num_heads * queries * keys * element_size + queries * keys


def _gib(size: int) -> str:
    """Bytes in GiB; small ones with the digits that tell them from nothing."""
    gib = size / 2**30
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib:.2g}"


def check_dense_bytes(num_heads: int, queries: int, keys: int, element_size: int, bound: int) -> None:
    """Raise DenseAttentionTooLarge where dense scores and mask would exceed `bound` bytes."""
    need = dense_attention_bytes(num_heads, queries, keys, element_size)
    if need > bound:
        raise DenseAttentionTooLarge(
            f"dense attention over {queries} queries x {keys} keys x {num_heads} heads needs {_gib(need)} GiB for scores "
            f"and mask, above the bound of {_gib(bound)} GiB (a run's max_dense_gib; max_dense_bytes in Python); use "
            "attention='flex' on a GPU or 'sdpa_chunked' on a CPU, or fewer anchors, or a shorter pack"
        )


@dataclass(frozen=True)
class AttentionMask:
    """The visibility of one pack for one sliding window, in whichever form a backend asks for.

    Shapes: A anchors of `block_size` slots, T = doc_ids.shape[0] context positions, Q = A * block_size.
    """

    anchors: AnchorSet
    doc_ids: Tensor  # [T] int64
    block_size: int
    sliding_window: int | None = None

    @property
    def context(self) -> int:
        return self.doc_ids.shape[0]

    @property
    def queries(self) -> int:
        return self.anchors.positions.shape[0] * self.block_size

    @property
    def mask_mod(self) -> MaskMod:
        return visibility(self.anchors, self.doc_ids, self.block_size, self.sliding_window)

    @cached_property
    def dense(self) -> Tensor:
        """[Q, T + Q] bool."""
        return dense_mask(self.mask_mod, self.queries, self.context + self.queries, self.doc_ids.device)

    @cached_property
    def block_sparse(self):  # -> BlockMask
        """The BlockMask of the same rule, built compiled on CUDA."""
        from dflash.drafter.flex import build_block_mask

        return build_block_mask(self.mask_mod, self.queries, self.context + self.queries, self.doc_ids.device)

    @cached_property
    def _ranges(self) -> dict:
        return {}

    def ranges(self, group: int):  # -> kernels.attention.Ranges
        """What each block sees as ranges of positions, for `group` query heads per key head."""
        from dflash.drafter.kernels.attention import make_ranges

        if group not in self._ranges:
            lo, hi = pack_ranges(self.anchors, self.doc_ids, self.sliding_window)
            self._ranges[group] = make_ranges(lo, hi, self.context, self.block_size, group)
        return self._ranges[group]

    @cached_property
    def chunks(self) -> list[tuple[int, int, int, int, Tensor]]:
        """Runs of anchors with the context slice they can see: (q_start, q_end, c_start, c_end, mask).

        Anchors are sorted, so neighbours share documents and each slice is short. Reads positions on the host.
        """
        device, size = self.doc_ids.device, self.block_size
        lows, highs = (x.cpu() for x in pack_ranges(self.anchors, self.doc_ids, self.sliding_window))
        valid, pieces = self.anchors.valid.cpu(), []
        for first in range(0, len(lows), ANCHORS_PER_CHUNK):
            index = slice(first, first + ANCHORS_PER_CHUNK)
            lo, hi, some = lows[index], highs[index], valid[index]
            c_start, c_end = (int(lo[some].min()), int(hi[some].max())) if some.any() else (0, 0)
            c_end = min(c_end + 1, self.context)  # never empty; old runs had this width
            position = torch.arange(c_start, c_end)
            seen = (position >= lo[:, None]) & (position < hi[:, None])  # [anchors, c_end - c_start]
            own = torch.eye(len(lo), dtype=torch.bool).repeat_interleave(size, 1)
            allowed = torch.cat([seen, own], 1).repeat_interleave(size, 0).to(device)
            pieces.append((first * size, (first + len(lo)) * size, c_start, c_end, allowed))
        return pieces


# q, k, v of the draft slots, and the context's keys and values -> what the heads give
Attend = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor]


class PackMask:
    """Who sees whom in a training pack, for each sliding window that a drafter's layers have.

    Args:
        anchors, doc_ids, block_size: see `AttentionMask`. backend, max_dense_bytes: see `attention`.
    """

    def __init__(self, anchors: AnchorSet, doc_ids: Tensor, block_size: int, backend: str, max_dense_bytes: int):
        self.backend, self.max_dense_bytes = backend, max_dense_bytes
        self._view = cache(lambda window: AttentionMask(anchors, doc_ids, block_size, window))

    def attend(self, sliding_window: int | None) -> Attend:
        return lambda q, k, v, context: self.over(q, *_joined(context, k, v), sliding_window)

    def over(self, q: Tensor, k: Tensor, v: Tensor, sliding_window: int | None) -> Tensor:
        """`attention` over keys and values of [context | slots]."""
        return attention(q, k, v, self._view(sliding_window), self.backend, self.max_dense_bytes)


class DocumentMask:
    """Who sees whom where blocks are drafted over the cached context of one document that begins at position 0.

    Args:
        anchors: [C] int64, at most the context's length; of blocks of `block_size` slots.
    """

    def __init__(self, anchors: Tensor, block_size: int):
        self.anchors, self.block_size = anchors, block_size
        self.attend = cache(self._attend)

    def _attend(self, sliding_window: int | None) -> Attend:
        lo, hi = seen_context(self.anchors, 0, sliding_window)
        return self._one(int(lo), int(hi)) if lo.numel() == 1 else self._several(lo, hi)

    def _one(self, lo: int, hi: int) -> Attend:
        """A single block: what it may see, and nothing else, is in the keys."""

        def attend(q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
            keys, values = _joined([x[:, :, lo:hi] for x in context], k, v)
            return scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[1] != k.shape[1])

        return attend

    def _several(self, lo: Tensor, hi: Tensor) -> Attend:
        """A batch entry for each block, with its own copy of the context's keys."""
        count, length = lo.shape[0], int(hi.max())
        position = torch.arange(length, device=lo.device)
        seen = (position >= lo[:, None]) & (position < hi[:, None])
        mask = torch.cat([seen, seen.new_ones(count, self.block_size)], 1)[:, None, None]  # [C, 1, 1, n + S]

        def attend(q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
            keys, values = _joined([x[:, :, :length].expand(count, -1, -1, -1) for x in context], k, v)
            return scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

        return attend


def _joined(context: Sequence[Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([context[0], k], 2), torch.cat([context[1], v], 2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, backend: str, max_dense_bytes: int = DEFAULT_MAX_DENSE_BYTES
) -> Tensor:
    """Draft attention.

    Args:
        q: [1, Nq, Q, D]; k, v: [1, Nkv, T + Q, D], context first.
        mask: visibility of this pack.
        backend: one of `BACKENDS`.
        max_dense_bytes: bound on scores and mask of the dense backends, in bytes.

    Returns: [1, Nq, Q, D].

    Raises:
        ConfigError: unknown backend. DenseAttentionTooLarge: a dense backend above its bound.
        CompileSafetyError: the compiled backend cannot run compiled (it never falls back to dense).
    """
    gqa = q.shape[1] != k.shape[1]
    if backend == "flex":
        from dflash.drafter.flex import compiled_flex_attention

        return compiled_flex_attention(q, k, v, block_mask=mask.block_sparse, enable_gqa=gqa)
    if backend == "triton":
        return _block_attention(q, k, v, mask)
    if backend == "sdpa":
        check_dense_bytes(q.shape[1], q.shape[2], k.shape[2], q.element_size(), max_dense_bytes)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, enable_gqa=gqa)
    if backend == "sdpa_chunked":
        outputs = []
        for q_start, q_end, c_start, c_end, allowed in mask.chunks:
            check_dense_bytes(q.shape[1], q_end - q_start, allowed.shape[1], q.element_size(), max_dense_bytes)
            slots = slice(mask.context + q_start, mask.context + q_end)
            keys = torch.cat([k[:, :, c_start:c_end], k[:, :, slots]], 2)
            values = torch.cat([v[:, :, c_start:c_end], v[:, :, slots]], 2)
            outputs.append(
                scaled_dot_product_attention(q[:, :, q_start:q_end], keys, values, attn_mask=allowed, enable_gqa=gqa)
            )
        return torch.cat(outputs, 2)
    raise ConfigError(f"unknown attention backend {backend!r}; known: {', '.join(BACKENDS)}")


def _block_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """The `triton` backend, or a ConfigError that says why it does not run."""
    heads, kv_heads, d = q.shape[1], k.shape[1], q.shape[3]
    refuse_backend("triton", q.device, heads, kv_heads, d, mask.block_size)
    from dflash.drafter.kernels.attention import BlockAttention

    return BlockAttention.apply(q, k, v, mask.ranges(heads // kv_heads), d**-0.5)


def refuse_backend(backend: str, device: torch.device, heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    """Raises ConfigError where a backend cannot run on `device` or with these sizes. Only `triton` is choosy."""
    if backend != "triton":
        return
    if not kernels.usable(device):
        raise ConfigError(f"attention 'triton' needs CUDA and Triton, got {device}; use attention='sdpa_chunked' on a CPU")
    if not kernels.supported(heads, kv_heads, head_dim, block_size):
        raise ConfigError(
            "attention 'triton' takes query heads per key head, block sizes and a head_dim (16 to 128) that are powers of "
            f"two, and at most {kernels.ROWS} rows (query heads per key head times slots of a block); got {heads} / "
            f"{kv_heads} heads, blocks of {block_size}, head_dim {head_dim}; use attention='flex'"
        )
