"""Feature capture of a target at the speed of its matrix products: hybrid (Qwen3.5-style) and dense (Llama, Qwen).

The documents of a pack run as one row: norms and MLPs see tokens, the convolution stops at document borders, the
recurrence takes them as sequence starts, and attention stays inside them (`packed_attention`). So there is no padding,
few kernels are launched, and nothing is kept but the captured layers, written straight into the hand-over buffer. `attach`
checks the result against the plain forward before it is used; `fast_target_kinds` says which targets it can be.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.devices import on
from dflash.drafter import kernels
from dflash.errors import TargetError
from dflash.target.fast_kinds import obstacle
from dflash.target.packed_attention import Documents, packed_attention, varlen_call

if TYPE_CHECKING:
    from dflash.target.capture import Target

TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.04, torch.float32: 1e-3}  # SmolLM2's rounding: 0.02 in bfloat16
CHECKED_SIZES = (37, 11, 200)  # short enough for one call of the attention, long enough for positions to matter


def takes(target: Target) -> bool:
    """True when the target's layers are of a kind this module knows and the kernels run on its device."""
    return kernels.usable(target.device) and obstacle(target) is None


def worthwhile(target: Target) -> bool:
    """True where loading should try: a dense target on a GPU, a hybrid one where its recurrence has kernels."""
    return has_recurrence_kernels(target) if target.is_hybrid else target.device.type == "cuda"


def attach(target: Target, required: bool = False) -> bool:
    """Let `target.capture` use the fast path when it gives the plain path's features.

    Returns whether it does; `target.why_plain` says why not. `required` raises a TargetError with it instead. Where only the
    variable-length attention fails, the fast path goes without it.
    """
    if not takes(target):
        reason = obstacle(target) if kernels.usable(target.device) else f"{target.device} has no Triton"
    else:
        fast = FastCapture(target)
        varlen, fast.varlen = fast.varlen, None
        reason = _failure(fast)
        if reason is None and varlen is not None:
            fast.varlen = varlen
            if _failure(fast) is not None:
                fast.varlen = None
    target.why_plain = reason
    if reason is None:
        target.fast = fast
    elif required:
        raise TargetError(f"fast capture does not run for target '{target.source}': {reason}")
    return reason is None


def _failure(fast: FastCapture) -> str | None:
    """Why the fast path's features are not to be used; None when they are the plain ones."""
    try:
        with on(fast.target.device):  # the plain forward may hold Triton kernels too
            difference = fast.difference()
    except Exception as error:  # of a compiler or a library: whatever it is, the plain path runs without it
        return f"it stopped with {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if not difference <= TOLERANCE.get(fast.target.dtype, 1e-3):  # NaN too
        return f"its features differ from the plain forward's by {difference:.3g} (relative)"
    return None


def _effective_weight(norm: nn.Module, size: int, device: torch.device) -> Tensor:
    """What the norm multiplies by, float32 [size]: its weight, or one plus its weight; read off its answer to ones."""
    with torch.no_grad():
        return norm(torch.ones(1, size, device=device))[0].float().contiguous()


class FastCapture:
    """The decoder's forward over packed documents."""

    def __init__(self, target: Target):
        self.target = target
        size, device = target.hidden_size, target.device
        self.norms = [
            (
                _effective_weight(layer.input_layernorm, size, device),
                _effective_weight(layer.post_attention_layernorm, size, device),
            )
            for layer in target.decoder.layers
        ]
        self.final_norm = _effective_weight(target.decoder.norm, size, device)
        self.head_norms = [
            tuple(
                _effective_weight(n, layer.self_attn.head_dim, device)
                for n in (layer.self_attn.q_norm, layer.self_attn.k_norm)
            )
            if hasattr(getattr(layer, "self_attn", None), "q_norm")
            else (None, None)
            for layer in target.decoder.layers
        ]
        self.eps = target.config.rms_norm_eps
        self.hybrid = any(hasattr(layer, "linear_attn") for layer in target.decoder.layers)
        self.rule = _delta_rule(target) if self.hybrid else None
        self.varlen = varlen_call(device, target.dtype)

    @torch.no_grad()
    def run(self, ids: Tensor, sizes: list[int], features: Tensor, last_hidden: Tensor | None) -> None:
        """Fill features [T, N * H] and last_hidden [T, H] for documents of `sizes` that start at 0; ids [T].

        Without last_hidden the layers after the last captured one do not run. Nothing here waits for the device.
        """
        with on(ids.device):
            self._run(ids, Documents.of(sizes, ids.device), features, last_hidden)

    def _run(self, ids: Tensor, documents: Documents, features: Tensor, last_hidden: Tensor | None) -> None:
        from dflash.drafter.kernels import pointwise

        decoder, wanted = self.target.decoder, self.target.layer_ids
        total, hidden = sum(documents.sizes), self.target.hidden_size
        x, delta = F.embedding(ids[:total], self.target.embed_weight), None
        positions = documents.positions[None]  # [1, T]; a hybrid takes three rows: time, height, width
        cos, sin = decoder.rotary_emb(x[None], positions.expand(3, 1, -1) if self.hybrid else positions)
        half = cos.shape[-1] // 2
        rotary = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        count = len(decoder.layers) if last_hidden is not None else max(wanted) + 1
        for index, layer in enumerate(decoder.layers[:count]):
            before, after = self.norms[index]
            x, y, _ = pointwise.norm_forward(x, delta, before, self.eps)
            if hasattr(layer, "linear_attn"):
                mixed = self._linear(layer.linear_attn, y, documents)
            else:
                mixed = self._full(layer.self_attn, self.head_norms[index], y, documents, rotary)
            x, y, _ = pointwise.norm_forward(x, mixed, after, self.eps)
            mlp = layer.mlp
            delta = mlp.down_proj(pointwise.swiglu(mlp.gate_proj(y), mlp.up_proj(y)))
            if index in wanted:
                slot = wanted.index(index) * hidden
                torch.add(x, delta, out=features[:total, slot : slot + hidden])
        if last_hidden is not None:
            last_hidden[:total] = pointwise.norm_forward(x, delta, self.final_norm, self.eps)[1]

    def _linear(self, layer: nn.Module, y: Tensor, documents: Documents) -> Tensor:
        """Gated delta rule over [T, H]."""
        from dflash.target import kernels as target_ops

        positions = documents.positions
        qkv, gate = layer.in_proj_qkv(y), layer.in_proj_z(y)
        weight = layer.conv1d.weight[:, 0]
        parts, start = [], 0
        for width, d in (
            (layer.key_dim, layer.head_k_dim),
            (layer.key_dim, layer.head_k_dim),
            (layer.value_dim, layer.head_v_dim),
        ):
            out = torch.empty(y.shape[0], width, dtype=y.dtype, device=y.device)
            target_ops.conv_silu(qkv[:, start : start + width], weight[start : start + width], positions, out)
            parts.append(out.view(1, y.shape[0], -1, d))
            start += width
        decay = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(y).float() + layer.dt_bias)
        beta = layer.in_proj_b(y).sigmoid()
        out = self.rule(*parts, decay[None], beta[None], documents)
        norm = layer.norm
        out = target_ops.gated_norm(
            out.reshape(-1, layer.head_v_dim), gate.view(-1, layer.head_v_dim), norm.weight, norm.variance_epsilon
        )
        return layer.out_proj(out.view(y.shape[0], -1))

    def _full(self, layer: nn.Module, norms: tuple, y: Tensor, documents: Documents, rotary: tuple) -> Tensor:
        """Attention over [T, H]; a hybrid's query comes with an output gate."""
        from dflash.target import kernels as target_ops

        d, rows, gate = layer.head_dim, y.shape[0], None
        query = layer.q_proj(y).view(rows, -1, 2 * d if self.hybrid else d)
        if self.hybrid:
            query, gate = query.split(d, -1)
        q = target_ops.norm_partial_rotary(query, norms[0], *rotary, self.eps)
        k = target_ops.norm_partial_rotary(layer.k_proj(y).view(rows, -1, d), norms[1], *rotary, self.eps)
        out = packed_attention(q, k, layer.v_proj(y).view(rows, -1, d), documents, layer.scaling, self.varlen)
        return layer.o_proj((out if gate is None else out * torch.sigmoid(gate)).flatten(1))

    @torch.no_grad()
    def difference(self, sizes: tuple[int, ...] = CHECKED_SIZES) -> float:
        """Relative difference to the plain forward on random tokens: the mean over a document's rows, and of these the
        largest over documents, captured layers and the end; NaN where a feature is not finite.

        Row by row, since a few rows of a model (its first tokens, often) are so large that they hide all others.
        """
        generator = torch.Generator().manual_seed(0)
        target, hidden = self.target, self.target.hidden_size
        ids = torch.randint(0, target.embed_weight.shape[0], (sum(sizes),), generator=generator).to(target.device)
        features = ids.new_full((len(ids), len(target.layer_ids) * hidden), 0, dtype=target.dtype)
        last = torch.zeros_like(features[:, :hidden])
        self.run(ids, list(sizes), features, last)
        means, start = [], 0
        for size in sizes:
            here = slice(start, start + size)
            with plain_recurrence(target):
                layers, end = target._run(ids[None, here])
            for ours, plain in zip((*features[here].split(hidden, -1), last[here]), (*layers, end), strict=True):
                ours, plain = ours.float(), plain[0].float()  # [size, H]
                means.append(((ours - plain).norm(dim=-1) / plain.norm(dim=-1)).mean())
            start += size
        return float(torch.stack(means).max())


@contextmanager
def plain_recurrence(target: Target) -> Iterator[None]:
    """The plain forward with transformers' own recurrence, where a kernel package has taken its place.

    An answer of other code than the fast path's is the better comparison; and kernels for sequences that are not packed,
    a hundred autotuned variants that nothing else calls, need not be compiled for it.
    """
    name = "torch_chunk_gated_delta_rule"
    linear = next((layer.linear_attn for layer in target.decoder.layers if hasattr(layer, "linear_attn")), None)
    if linear is None:  # a dense target has none
        yield
        return
    module = sys.modules[type(linear).__module__]
    chosen = getattr(module, name, None)
    plain = inspect.unwrap(chosen) if callable(chosen) else chosen
    if plain is chosen:
        yield
        return
    known = inspect.signature(plain).parameters

    def reference(*args, **kwargs):
        return plain(*args, **{key: value for key, value in kwargs.items() if key in known})

    setattr(module, name, reference)
    try:
        yield
    finally:
        setattr(module, name, chosen)


def has_recurrence_kernels(target: Target) -> bool:
    """True when flash-linear-attention is installed and runs on the target's device."""
    return target.device.type == "cuda" and importlib.util.find_spec("fla") is not None


def _delta_rule(target: Target):
    """The recurrence over packed documents: flash-linear-attention's kernels, or transformers' own code per document."""
    if has_recurrence_kernels(target):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        on_host = "cu_seqlens_cpu" in inspect.signature(chunk_gated_delta_rule).parameters  # spares it a sync

        def kernel(q, k, v, decay, beta, documents):
            borders = {"cu_seqlens": documents.borders} | ({"cu_seqlens_cpu": documents.borders_host} if on_host else {})
            return chunk_gated_delta_rule(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, **borders)[0]

        return kernel
    linear = next(layer.linear_attn for layer in target.decoder.layers if hasattr(layer, "linear_attn"))
    module = sys.modules[type(linear).__module__]

    def reference(q, k, v, decay, beta, documents):
        repeats = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
        pieces = zip(*(x.split(documents.sizes, 1) for x in (q, k, v, decay, beta)), strict=True)
        return torch.cat(
            [
                module.torch_chunk_gated_delta_rule(*piece[:3], g=piece[3], beta=piece[4], use_qk_l2norm_in_kernel=True)[0]
                for piece in pieces
            ],
            1,
        )

    return reference
