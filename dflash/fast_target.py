"""Feature capture of a hybrid (Qwen3.5-style) target at the speed of its matrix products.

The documents of a pack run as one row: norms and MLPs see tokens, the convolution stops at document borders, the
recurrence takes them as sequence starts, and attention runs document by document. So there is no padding, and nothing is
kept but the captured layers, written straight into the hand-over buffer. `attach` checks the result against the plain
forward before it is used.
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

from dflash import kernels
from dflash.errors import TargetError

if TYPE_CHECKING:
    from dflash.target import Target

LAYER_PARTS = ("input_layernorm", "post_attention_layernorm", "mlp")
LINEAR_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
FULL_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 1e-3}


def takes(target: Target) -> bool:
    """True when the target's layers are of the kind this module knows and the kernels run on its device."""
    layers = target.decoder.layers
    return kernels.usable(target.device) and hasattr(target.decoder, "rotary_emb") and all(
        all(hasattr(layer, part) for part in LAYER_PARTS)
        and (
            all(hasattr(getattr(layer, "linear_attn", None), part) for part in LINEAR_PARTS)
            or all(hasattr(getattr(layer, "self_attn", None), part) for part in FULL_PARTS)
        )
        for layer in layers
    ) and any(hasattr(layer, "linear_attn") for layer in layers)


def attach(target: Target, required: bool = False) -> bool:
    """Let `target.capture` use the fast path when it gives the plain path's features.

    Returns whether it does; `target.why_plain` says why not. `required` raises a TargetError with it instead.
    """
    reason = None
    if not takes(target):
        reason = f"its layers are not of a kind the fast capture knows, or {target.device} has no Triton"
    else:
        fast = FastCapture(target)
        difference = fast.difference()
        if not difference <= TOLERANCE.get(target.dtype, 1e-3):  # NaN too
            reason = f"its features differ from the plain forward's by {difference:.3g} (relative)"
    target.why_plain = reason
    if reason is None:
        target.fast = fast
    elif required:
        raise TargetError(f"fast capture does not run for target '{target.source}': {reason}")
    return reason is None


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
            (_effective_weight(layer.input_layernorm, size, device),
             _effective_weight(layer.post_attention_layernorm, size, device))
            for layer in target.decoder.layers
        ]
        self.final_norm = _effective_weight(target.decoder.norm, size, device)
        self.head_norms = [
            tuple(_effective_weight(n, layer.self_attn.head_dim, device) for n in
                  (layer.self_attn.q_norm, layer.self_attn.k_norm)) if hasattr(layer, "self_attn") else None
            for layer in target.decoder.layers
        ]
        self.eps = target.config.rms_norm_eps
        self.rule = _delta_rule(target)

    @torch.no_grad()
    def run(self, ids: Tensor, sizes: list[int], features: Tensor, last_hidden: Tensor | None) -> None:
        """Fill features [T, N * H] and last_hidden [T, H] for documents of `sizes` that start at 0; ids [T].

        Without last_hidden the layers after the last captured one do not run.
        """
        from dflash.kernels import pointwise

        decoder, wanted = self.target.decoder, self.target.layer_ids
        total, hidden = sum(sizes), self.target.hidden_size
        positions = torch.cat([torch.arange(size) for size in sizes]).to(ids.device, non_blocking=True)
        x, delta = F.embedding(ids[:total], self.target.embed_weight), None
        cos, sin = decoder.rotary_emb(x[None], positions.expand(3, 1, -1))
        half = cos.shape[-1] // 2
        rotary = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        borders = torch.tensor([0, *sizes]).cumsum(0)
        documents = (sizes, positions, borders.to(ids.device, non_blocking=True), borders)
        count = len(decoder.layers) if last_hidden is not None else max(wanted) + 1
        for index, layer in enumerate(decoder.layers[:count]):
            before, after = self.norms[index]
            x, y, _ = pointwise.norm_forward(x, delta, before, self.eps)
            if hasattr(layer, "linear_attn"):
                mixed = self._linear(layer.linear_attn, y, documents)
            else:
                mixed = self._full(layer.self_attn, self.head_norms[index], y, sizes, rotary)
            x, y, _ = pointwise.norm_forward(x, mixed, after, self.eps)
            mlp = layer.mlp
            delta = mlp.down_proj(pointwise.swiglu(mlp.gate_proj(y), mlp.up_proj(y)))
            if index in wanted:
                slot = wanted.index(index) * hidden
                torch.add(x, delta, out=features[:total, slot : slot + hidden])
        if last_hidden is not None:
            last_hidden[:total] = pointwise.norm_forward(x, delta, self.final_norm, self.eps)[1]

    def _linear(self, layer: nn.Module, y: Tensor, documents: tuple) -> Tensor:
        """Gated delta rule over [T, H]."""
        from dflash.kernels import target_ops

        positions = documents[1]
        qkv, gate = layer.in_proj_qkv(y), layer.in_proj_z(y)
        weight = layer.conv1d.weight[:, 0]
        parts, start = [], 0
        for width, d in ((layer.key_dim, layer.head_k_dim), (layer.key_dim, layer.head_k_dim),
                         (layer.value_dim, layer.head_v_dim)):
            out = torch.empty(y.shape[0], width, dtype=y.dtype, device=y.device)
            target_ops.conv_silu(qkv[:, start : start + width], weight[start : start + width], positions, out)
            parts.append(out.view(1, y.shape[0], -1, d))
            start += width
        decay = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(y).float() + layer.dt_bias)
        beta = layer.in_proj_b(y).sigmoid()
        out = self.rule(*parts, decay[None], beta[None], documents)
        norm = layer.norm
        out = target_ops.gated_norm(out.reshape(-1, layer.head_v_dim), gate.view(-1, layer.head_v_dim), norm.weight,
                                    norm.variance_epsilon)
        return layer.out_proj(out.view(y.shape[0], -1))

    def _full(self, layer: nn.Module, norms: tuple, y: Tensor, sizes: list[int], rotary: tuple) -> Tensor:
        """Gated attention over [T, H], one document after another."""
        from dflash.kernels import target_ops

        d = layer.head_dim
        query, gate = layer.q_proj(y).view(y.shape[0], -1, 2 * d).split(d, -1)
        q = target_ops.norm_partial_rotary(query, norms[0], *rotary, self.eps)
        k = target_ops.norm_partial_rotary(layer.k_proj(y).view(y.shape[0], -1, d), norms[1], *rotary, self.eps)
        v = layer.v_proj(y).view(y.shape[0], -1, d)
        outputs = []
        for parts in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
            heads = [part.transpose(0, 1)[None] for part in parts]  # [1, heads, length, D]
            out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=layer.scaling, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1))
        return layer.o_proj((torch.cat(outputs) * torch.sigmoid(gate)).flatten(1))

    @torch.no_grad()
    def difference(self, sizes: tuple[int, ...] = (37, 11, 70)) -> float:
        """Relative difference to the plain forward on random tokens, the largest of the captured layers and the end."""
        generator = torch.Generator().manual_seed(0)
        target = self.target
        ids = torch.randint(0, target.embed_weight.shape[0], (sum(sizes),), generator=generator).to(target.device)
        features = ids.new_full((len(ids), len(target.layer_ids) * target.hidden_size), 0, dtype=target.dtype)
        last = torch.zeros_like(features[:, : target.hidden_size])
        self.run(ids, list(sizes), features, last)
        worst, start = 0.0, 0
        for size in sizes:
            with plain_recurrence(target):
                layers, end = target._run(ids[None, start : start + size])
            plain = torch.cat([*layers, end], -1)[0].float()
            ours = torch.cat([features[start : start + size], last[start : start + size]], -1).float()
            worst = max(worst, float((ours - plain).norm() / plain.norm()))
            start += size
            if not torch.isfinite(ours).all():
                return float("nan")
        return worst


@contextmanager
def plain_recurrence(target: Target) -> Iterator[None]:
    """The plain forward with transformers' own recurrence, where a kernel package has taken its place.

    An answer of other code than the fast path's is the better comparison; and kernels for sequences that are not packed,
    a hundred autotuned variants that nothing else calls, need not be compiled for it.
    """
    name = "torch_chunk_gated_delta_rule"
    linear = next(layer.linear_attn for layer in target.decoder.layers if hasattr(layer, "linear_attn"))
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
            borders = {"cu_seqlens": documents[2]} | ({"cu_seqlens_cpu": documents[3]} if on_host else {})
            return chunk_gated_delta_rule(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, **borders)[0]

        return kernel
    linear = next(layer.linear_attn for layer in target.decoder.layers if hasattr(layer, "linear_attn"))
    module = sys.modules[type(linear).__module__]

    def reference(q, k, v, decay, beta, documents):
        repeats = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
        pieces = zip(*(x.split(documents[0], 1) for x in (q, k, v, decay, beta)), strict=True)
        return torch.cat([
            module.torch_chunk_gated_delta_rule(*piece[:3], g=piece[3], beta=piece[4], use_qk_l2norm_in_kernel=True)[0]
            for piece in pieces
        ], 1)

    return reference
