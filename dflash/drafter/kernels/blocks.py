"""The two halves of a drafter layer as autograd functions, around the attention call that lies between them.

Matrix products go to cuBLAS; what lies between them is `pointwise`. Only what the backward pass cannot recompute in one
cheap pass is kept: norm outputs and the SwiGLU product are made again there, and the SwiGLU's gradients take the place
of what it saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.drafter.kernels import convolution, pointwise

HalfRotary = tuple[Tensor, Tensor]  # cos, sin, each [P, D / 2] float32


def _heads(x: Tensor, d: int) -> Tensor:
    """[P, heads * D] -> [heads, P, D], a view."""
    return x.view(x.shape[0], -1, d).transpose(0, 1)


def _flat(x: Tensor) -> Tensor:
    """[1, heads, P, D] -> [P, heads * D]; a view when the memory lies that way."""
    return x[0].transpose(0, 1).reshape(x.shape[2], -1)


def _sum_rows(dx: Tensor, slots: int, lead: int) -> Tensor:
    """Gradients of A blocks of S rows [A * S, C] -> those of the distinct rows that they were made from (`Projection`)."""
    blocks = dx.view(-1, slots, dx.shape[-1])
    if lead == 1:
        rest = blocks[:, 1:].sum((0, 1), dtype=torch.float32)
        return torch.cat([blocks[:, 0], rest[None].to(dx.dtype)])
    rest = blocks[:, lead - 1 :].sum(1, dtype=torch.float32)
    return torch.cat([blocks[:, : lead - 1], rest[:, None].to(dx.dtype)], 1).flatten(0, 1)


class _Entering:
    """The entering side of a convolution around a sublayer whose normed input is y [P, H], or nothing without one.

    Args:
        weights: base of the entering side [K, H] and P [2 * K * G, H]; empty: no convolution. slots: rows of a block.
    """

    def __init__(self, y: Tensor, weights: tuple[Tensor, ...], slots: int):
        self.y, self.x, self.slots, self.base = y, y, slots, None
        if weights:
            self.base, self.projection = weights
            self.delta = y @ self.projection.T
            self.half = self.delta.shape[1] // 2
            self.x = convolution.convolve(y, self.base, self.delta[:, : self.half], slots)

    def backward(self, dx: Tensor, dleaving: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gradients of y and of the weights, from those of `x` and of the leaving side's coefficients."""
        if self.base is None:
            return dx, ()
        ddelta = torch.empty_like(self.delta)
        entering, leaving = ddelta.split(self.half, 1)
        leaving.zero_() if dleaving is None else leaving.copy_(dleaving)
        coefficients = self.delta[:, : self.half]
        dy, dbase = convolution.convolve_backward(self.y, self.base, coefficients, dx.contiguous(), entering, self.slots)
        return dy.addmm_(ddelta, self.projection), (dbase, ddelta.T @ self.y)


@dataclass(frozen=True)
class Projection:
    """What `ProjectQKV` needs beside tensors that learn: half rotary tables of context and slots, the norms' eps, slots of
    a block. With a row_map (first layer), x holds only rows that differ, and the Q = A * slots rows are made from them
    after the projections: [anchor tokens, mask token], A + 1 rows, or under a convolution of K taps the first `lead` =
    K + 1 slots of each block, the last of which all later slots equal."""

    context_rotary: HalfRotary
    rotary: HalfRotary
    eps: float
    slots: int
    row_map: Tensor | None = None
    lead: int = 1


class ProjectQKV(torch.autograd.Function):
    """Norm, projections, head norms and rotary of one layer, K and V joined with the context's.

    Inputs: a `Projection`; x, delta [P, H] (delta None: no residual to add); the context's K before its norm and V, each
    [T, Nkv * D]; the weights of norm, q, k, v, q norm and k norm, and of the convolution (`_Entering`) where there is one.

    Outputs: x + delta [P, H], q [1, Nq, Q, D], k and v [1, Nkv, T + Q, D], and the coefficients of the convolution's
    leaving side [Q, K * G] or None.
    """

    @staticmethod
    def forward(ctx, how, x, delta, context_k, context_v, *weights):
        (norm_weight, wq, wk, wv, q_norm, k_norm), around = weights[:6], weights[6:]
        context_rotary, rotary, eps, row_map = how.context_rotary, how.rotary, how.eps, how.row_map
        d = q_norm.shape[0]
        total, y, rstd = pointwise.norm_forward(x, delta, norm_weight, eps)
        entered = _Entering(y, around, how.slots if row_map is None else how.lead)
        y, leaving = entered.x, None
        if around:
            leaving = entered.delta[:, entered.half :]
            leaving = leaving if row_map is None else leaving.index_select(0, row_map)
        queries, context = rotary[0].shape[0], context_k.shape[0]
        q_raw, k_raw = y @ wq.T, y @ wk.T
        q = torch.empty(queries, wq.shape[0], dtype=y.dtype, device=y.device)
        k, v = (torch.empty(context + queries, wk.shape[0], dtype=y.dtype, device=y.device) for _ in range(2))
        pointwise.head_norm_rotary(q_raw, q_norm, *rotary, eps, _heads(q, d), row_map)
        pointwise.head_norm_rotary(k_raw, k_norm, *rotary, eps, _heads(k[context:], d), row_map)
        pointwise.head_norm_rotary(context_k, k_norm, *context_rotary, eps, _heads(k[:context], d))
        v[:context] = context_v
        if row_map is not None:
            torch.index_select(y @ wv.T, 0, row_map, out=v[context:])
        else:
            torch.mm(y, wv.T, out=v[context:])
        ctx.save_for_backward(total, rstd, *weights, q_raw, k_raw, context_k)
        ctx.how, ctx.residual = how, delta is not None
        ctx.set_materialize_grads(False)  # the first layer's residual is frozen: no gradient arrives for `total`
        return total, _heads(q, d)[None], _heads(k, d)[None], _heads(v, d)[None], leaving

    @staticmethod
    def backward(ctx, dtotal, dq, dk, dv, dleaving):
        total, rstd, norm_weight, wq, wk, wv, q_norm, k_norm, *around, q_raw, k_raw, context_k = ctx.saved_tensors
        (cos_c, sin_c), (cos, sin), row_map, eps = ctx.how.context_rotary, ctx.how.rotary, ctx.how.row_map, ctx.how.eps
        context, queries = context_k.shape[0], cos.shape[0]
        dq, dk = (g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk))
        dq_raw, dk_raw = (torch.empty(queries, len(w), dtype=q_raw.dtype, device=q_raw.device) for w in (wq, wk))
        dcontext_k = torch.empty_like(context_k, memory_format=torch.contiguous_format)
        back = pointwise.head_norm_rotary_backward
        dq_norm = back(q_raw, q_norm, cos, sin, eps, dq[0], dq_raw, row_map)
        dk_norm = back(k_raw, k_norm, cos, sin, eps, dk[0, :, context:], dk_raw, row_map)
        dk_norm += back(context_k, k_norm, cos_c, sin_c, eps, dk[0, :, :context], dcontext_k)
        dv = _flat(dv)
        lead = ctx.how.lead
        y = pointwise.norm_again(total, rstd, norm_weight)
        entered = _Entering(y, tuple(around), ctx.how.slots if row_map is None else lead)
        y = entered.x
        if row_map is not None and dleaving is not None:
            dleaving = _sum_rows(dleaving, ctx.how.slots, lead)
        parts = (dq_raw, dk_raw, dv[context:])
        if row_map is not None:
            parts = tuple(_sum_rows(part, ctx.how.slots, lead) for part in parts)
        dy = parts[0] @ wq
        dy.addmm_(parts[1], wk).addmm_(parts[2], wv)
        weights = [part.T @ y for part in parts]
        dy, daround = entered.backward(dy, dleaving)
        dx, dnorm = pointwise.norm_backward(total, rstd, norm_weight, dy, dtotal)
        dnorms = dq_norm.to(q_norm.dtype), dk_norm.to(k_norm.dtype)
        return None, dx, dx if ctx.residual else None, dcontext_k, dv[:context], dnorm, *weights, *dnorms, *daround


class Leave(torch.autograd.Function):
    """The attention's output projection and the leaving side of its convolution: heads [Q, Nq * D], wo, base [K, H] and
    coefficients [Q, K * G] -> [Q, H]. The projection is made again in backward rather than kept."""

    @staticmethod
    def forward(ctx, heads, wo, base, delta, slots):
        ctx.save_for_backward(heads, wo, base, delta)
        ctx.slots = slots
        return convolution.convolve(heads @ wo.T, base, delta, slots)

    @staticmethod
    def backward(ctx, dout):
        heads, wo, base, delta = ctx.saved_tensors
        ddelta = torch.empty(delta.shape, dtype=delta.dtype, device=delta.device)
        dz, dbase = convolution.convolve_backward(heads @ wo.T, base, delta, dout.contiguous(), ddelta, ctx.slots)
        return dz @ wo, dz.T @ heads, dbase, ddelta, None


class Mlp(torch.autograd.Function):
    """(x + delta, SwiGLU MLP of its norm) of x, delta [P, H]. Its backward pass can run once only.

    Weights: of norm, gate, up and down; with a convolution of blocks of `slots` rows around it also those of `_Entering`
    and the base of the leaving side [K, H].
    """

    @staticmethod
    def forward(ctx, x, delta, eps, slots, *weights):
        (norm_weight, w_gate, w_up, w_down), around = weights[:4], weights[4:]
        total, y, rstd = pointwise.norm_forward(x.contiguous(), delta.contiguous(), norm_weight, eps)
        entered = _Entering(y, around[:2], slots)
        gate, up = entered.x @ w_gate.T, entered.x @ w_up.T
        z = out = pointwise.swiglu(gate, up) @ w_down.T
        if around:
            out = convolution.convolve(z, around[2], entered.delta[:, entered.half :], slots)
        ctx.save_for_backward(total, rstd, *weights, *((z,) if around else ()))
        ctx.inner, ctx.slots = (gate, up), slots  # overwritten in backward, so not for save_for_backward's version check
        return total, out

    @staticmethod
    def backward(ctx, dtotal, dout):
        if ctx.inner is None:
            raise RuntimeError(
                "the MLP's saved activations are gone after one backward pass; run forward again "
                "(retain_graph=True has no effect on this path)"
            )
        total, rstd, norm_weight, w_gate, w_up, w_down, *around = ctx.saved_tensors
        (gate, up), ctx.inner = ctx.inner, None
        dout = dout.contiguous()
        entered = _Entering(pointwise.norm_again(total, rstd, norm_weight), tuple(around[:2]), ctx.slots)
        dleaving, last = None, ()
        if around:
            leaving = entered.delta[:, entered.half :]
            dleaving = torch.empty(leaving.shape, dtype=leaving.dtype, device=leaving.device)
            dout, dbase = convolution.convolve_backward(around[3], around[2], leaving, dout, dleaving, ctx.slots)
            last = (dbase,)
        product = dout @ w_down  # gradient of the product, replaced by the product itself
        pointwise.swiglu_backward_(gate, up, product)
        dw_down = dout.T @ product
        del product
        dw_gate, dw_up = gate.T @ entered.x, up.T @ entered.x
        dy = gate @ w_gate
        dy.addmm_(up, w_up)
        dy, daround = entered.backward(dy, dleaving)
        dx, dnorm = pointwise.norm_backward(total, rstd, norm_weight, dy, dtotal)
        return dx, dx, None, None, dnorm, dw_gate, dw_up, dw_down, *daround, *last


class TakeRows(torch.autograd.Function):
    """x[rows] of x [P, C] with distinct rows [R]; the gradient is a copy, not a sum."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.size = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.size, dy.shape[-1]).index_copy_(0, rows, dy), None
