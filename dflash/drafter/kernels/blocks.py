"""The two halves of a drafter layer as autograd functions, around the attention call that lies between them.

Matrix products go to cuBLAS; what lies between them is `pointwise`. Only what the backward pass cannot recompute in one
cheap pass is kept: norm outputs and the SwiGLU product are made again there, and the SwiGLU's gradients take the place
of what it saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.drafter.kernels import pointwise

HalfRotary = tuple[Tensor, Tensor]  # cos, sin, each [P, D / 2] float32
# One product for q, k and v instead of three. Weight gradients of k and v alone are too narrow to fill a large GPU, and
# the input's gradient is summed over three products in memory. Off until a GPU has shown that it pays for its copies.
JOINT_QKV = False


def _heads(x: Tensor, d: int) -> Tensor:
    """[P, heads * D] -> [heads, P, D], a view."""
    return x.view(x.shape[0], -1, d).transpose(0, 1)


def _flat(x: Tensor) -> Tensor:
    """[1, heads, P, D] -> [P, heads * D]; a view when the memory lies that way."""
    return x[0].transpose(0, 1).reshape(x.shape[2], -1)


def _sum_rows(dx: Tensor, slots: int) -> Tensor:
    """Gradients of A blocks of S rows [A * S, C] -> [A + 1, C]: slot 0 of each block, then the sum of the others."""
    blocks = dx.view(-1, slots, dx.shape[-1])
    rest = blocks[:, 1:].sum((0, 1), dtype=torch.float32)
    return torch.cat([blocks[:, 0], rest[None].to(dx.dtype)])


@dataclass(frozen=True)
class Projection:
    """What `ProjectQKV` needs beside tensors that learn: half rotary tables of context and slots, the norms' eps, slots of
    a block. With a row_map (first layer), x holds the A + 1 distinct rows [anchor tokens, mask token] and the Q = A *
    slots rows are made from them after the projections."""

    context_rotary: HalfRotary
    rotary: HalfRotary
    eps: float
    slots: int
    row_map: Tensor | None = None


class ProjectQKV(torch.autograd.Function):
    """Norm, projections, head norms and rotary of one layer, K and V joined with the context's.

    Inputs: a `Projection`; x, delta [P, H] (delta None: no residual to add); the context's K before its norm and V, each
    [T, Nkv * D]; the weights of norm, q, k, v, q norm and k norm.

    Outputs: x + delta [P, H], q [1, Nq, Q, D], k and v [1, Nkv, T + Q, D].
    """

    @staticmethod
    def forward(ctx, how, x, delta, context_k, context_v, *weights):
        norm_weight, wq, wk, wv, q_norm, k_norm = weights
        context_rotary, rotary, eps, row_map = how.context_rotary, how.rotary, how.eps, how.row_map
        d = q_norm.shape[0]
        total, y, rstd = pointwise.norm_forward(x, delta, norm_weight, eps)
        queries, context = rotary[0].shape[0], context_k.shape[0]
        ctx.joint = JOINT_QKV
        if ctx.joint:
            q_raw, k_raw, v_raw = (y @ torch.cat([wq, wk, wv]).T).split([len(wq), len(wk), len(wv)], 1)
        else:
            q_raw, k_raw, v_raw = y @ wq.T, y @ wk.T, None
        q = torch.empty(queries, wq.shape[0], dtype=y.dtype, device=y.device)
        k, v = (torch.empty(context + queries, wk.shape[0], dtype=y.dtype, device=y.device) for _ in range(2))
        pointwise.head_norm_rotary(q_raw, q_norm, *rotary, eps, _heads(q, d), row_map)
        pointwise.head_norm_rotary(k_raw, k_norm, *rotary, eps, _heads(k[context:], d), row_map)
        pointwise.head_norm_rotary(context_k, k_norm, *context_rotary, eps, _heads(k[:context], d))
        v[:context] = context_v
        if row_map is not None:
            torch.index_select(y @ wv.T if v_raw is None else v_raw, 0, row_map, out=v[context:])
        elif v_raw is not None:
            v[context:] = v_raw
        else:
            torch.mm(y, wv.T, out=v[context:])
        ctx.save_for_backward(total, rstd, *weights, q_raw, k_raw, context_k)
        ctx.how, ctx.residual = how, delta is not None
        ctx.set_materialize_grads(False)  # the first layer's residual is frozen: no gradient arrives for `total`
        return total, _heads(q, d)[None], _heads(k, d)[None], _heads(v, d)[None]

    @staticmethod
    def backward(ctx, dtotal, dq, dk, dv):
        total, rstd, norm_weight, wq, wk, wv, q_norm, k_norm, q_raw, k_raw, context_k = ctx.saved_tensors
        (cos_c, sin_c), (cos, sin), row_map, eps = ctx.how.context_rotary, ctx.how.rotary, ctx.how.row_map, ctx.how.eps
        context, queries = context_k.shape[0], cos.shape[0]
        dq, dk = (g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk))
        sizes = [len(wq), len(wk), len(wv)]
        if ctx.joint:
            joint = torch.empty(queries, sum(sizes), dtype=q_raw.dtype, device=q_raw.device)
            dq_raw, dk_raw, dv_raw = joint.split(sizes, 1)
        else:
            dq_raw, dk_raw = (torch.empty(queries, n, dtype=q_raw.dtype, device=q_raw.device) for n in sizes[:2])
        dcontext_k = torch.empty_like(context_k, memory_format=torch.contiguous_format)
        back = pointwise.head_norm_rotary_backward
        dq_norm = back(q_raw, q_norm, cos, sin, eps, dq[0], dq_raw, row_map)
        dk_norm = back(k_raw, k_norm, cos, sin, eps, dk[0, :, context:], dk_raw, row_map)
        dk_norm += back(context_k, k_norm, cos_c, sin_c, eps, dk[0, :, :context], dcontext_k)
        dv = _flat(dv)
        y = pointwise.norm_again(total, rstd, norm_weight)
        if ctx.joint:
            dv_raw.copy_(dv[context:])
            joint = joint if row_map is None else _sum_rows(joint, ctx.how.slots)
            dy, weights = joint @ torch.cat([wq, wk, wv]), (joint.T @ y).split(sizes)
        else:
            parts = (dq_raw, dk_raw, dv[context:])
            if row_map is not None:
                parts = tuple(_sum_rows(part, ctx.how.slots) for part in parts)
            dy = parts[0] @ wq
            dy.addmm_(parts[1], wk).addmm_(parts[2], wv)
            weights = [part.T @ y for part in parts]
        dx, dnorm = pointwise.norm_backward(total, rstd, norm_weight, dy, dtotal)
        dnorms = dq_norm.to(q_norm.dtype), dk_norm.to(k_norm.dtype)
        return None, dx, dx if ctx.residual else None, dcontext_k, dv[:context], dnorm, *weights, *dnorms


class Mlp(torch.autograd.Function):
    """(x + delta, SwiGLU MLP of its norm) of x, delta [P, H]. Its backward pass can run once only."""

    @staticmethod
    def forward(ctx, x, delta, norm_weight, w_gate, w_up, w_down, eps):
        total, y, rstd = pointwise.norm_forward(x.contiguous(), delta.contiguous(), norm_weight, eps)
        gate, up = y @ w_gate.T, y @ w_up.T
        ctx.save_for_backward(total, rstd, norm_weight, w_gate, w_up, w_down)
        ctx.inner = (gate, up)  # overwritten in backward, so not for save_for_backward's version check
        return total, pointwise.swiglu(gate, up) @ w_down.T

    @staticmethod
    def backward(ctx, dtotal, dout):
        if ctx.inner is None:
            raise RuntimeError(
                "the MLP's saved activations are gone after one backward pass; run forward again "
                "(retain_graph=True has no effect on this path)"
            )
        total, rstd, norm_weight, w_gate, w_up, w_down = ctx.saved_tensors
        (gate, up), ctx.inner = ctx.inner, None
        dout = dout.contiguous()
        product = dout @ w_down  # gradient of the product, replaced by the product itself
        pointwise.swiglu_backward_(gate, up, product)
        dw_down = dout.T @ product
        del product
        y = pointwise.norm_again(total, rstd, norm_weight)
        dw_gate, dw_up = gate.T @ y, up.T @ y
        dy = gate @ w_gate
        dy.addmm_(up, w_up)
        dx, dnorm = pointwise.norm_backward(total, rstd, norm_weight, dy, dtotal)
        return dx, dx, dnorm, dw_gate, dw_up, dw_down, None


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
