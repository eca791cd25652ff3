"""The losses between a teacher and a drafter, written out over whole rows, for autograd."""

import torch
from torch import Tensor


def dense_rows(log_p: Tensor, log_t: Tensor, loss_fn: str) -> Tensor:
    """[R] from log probabilities [R, V]."""
    kl = (log_t.exp() * (log_t - log_p)).sum(-1)
    variation = (log_t.exp() - log_p.exp()).abs().sum(-1) / 2
    if loss_fn == "lk_hybrid":
        share = torch.exp(-3 * (1 - variation.detach()))
        return share * kl + (1 - share) * variation
    return {"kl": kl, "tv": variation, "lk": -torch.log1p(-variation)}[loss_fn]
