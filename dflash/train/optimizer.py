"""AdamW over float32 masters, gradient clipping and the learning rate, without a host sync in a step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dflash.errors import ResumeError


def learning_rate(step: int, total: int, warmup: int, base: float, min_ratio: float) -> float:
    """Linear warmup over `warmup` steps, then a cosine that ends at base * min_ratio on step `total` (1-based)."""
    if step <= warmup:
        return base * step / max(1, warmup)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return base * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def finite_each(tensors: list[Tensor]) -> Tensor:
    """Whether each tensor is finite throughout, [n] bool on their device. By its largest entry: a sum of squares overflows
    for entries that are finite."""
    largest = iter(torch._foreach_norm([t for t in tensors if t.numel()], ord=math.inf))
    return torch.isfinite(torch.stack([next(largest) if t.numel() else t.new_zeros(()) for t in tensors]))


class MasterAdamW:
    """AdamW whose weights, moments and gradients are float32, whatever the model computes in.

    `accumulate` moves the model's gradients into float32 and clears them; between steps those do not exist, unless
    someone else put tensors of their own into `gradients` (one per master), which are then kept. `step` clips, updates
    the masters and copies them back. A gradient that is not finite changes nothing (the fused kernel skips on the
    device) and is visible in the norm that `step` returns. Matrices decay; norms and the bases of convolutions do not.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, betas: tuple[float, float], weight_decay: float, max_grad_norm: float
    ):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.max_grad_norm = max_grad_norm
        self.shared = all(p.dtype == torch.float32 for p in self.parameters)
        self.masters = self.parameters if self.shared else [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.gradients: list[Tensor] = []  # float32
        self._own = False  # made by `accumulate`, dropped by `step`
        groups = [
            {"params": [m for m in self.masters if m.dim() == 2], "weight_decay": weight_decay},
            {"params": [m for m in self.masters if m.dim() != 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, fused=True)

    def accumulate(self) -> None:
        """Add the model's gradients to the float32 ones and drop them."""
        first = not self.gradients
        self._own = self._own or first
        for index, p in enumerate(self.parameters):
            grad, p.grad = p.grad, None  # one by one, so that no second float32 copy of all of them exists
            if first:
                self.gradients.append(torch.zeros_like(self.masters[index]) if grad is None else grad.float())
            elif grad is not None:
                self.gradients[index].add_(grad)

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Clip to `max_grad_norm`, update, copy back, zero the gradients. Returns the norm before clipping (scalar,
        on the device, not finite when the step was skipped)."""
        norm = self._norm()
        finite = torch.isfinite(norm)
        factor = torch.where(finite, (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        torch._foreach_mul_(self.gradients, factor)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        self.adamw.grad_scale = None
        self.adamw.found_inf = (~finite).float()
        self.adamw.step()
        for master in self.masters:
            master.grad = None
        if not self.shared:
            torch._foreach_copy_(self.parameters, self.masters)
        if self._own:
            self.gradients, self._own = [], False
        else:
            torch._foreach_zero_(self.gradients)
        return norm

    def _norm(self) -> Tensor:
        """Norm of all gradients together, scalar."""
        return torch.nn.utils.get_total_norm(self.gradients)

    @torch.no_grad()
    def first_non_finite(self, names: Iterable[str]) -> str | None:
        """Name of the first parameter with a NaN or an infinity; `names` in the order of the parameters."""
        for name, master in zip(names, self.masters, strict=True):
            if not bool(torch.isfinite(master).all()):
                return name
        return None

    @torch.no_grad()
    def all_finite(self) -> Tensor:
        """Scalar bool on the device: every master is finite."""
        return finite_each(self.masters).all()

    def state_dict(self) -> dict:
        return {"adamw": self.adamw.state_dict(), "masters": [m.detach() for m in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Take over copies of a state's tensors, so that several optimizers may load one state.

        Raises: ResumeError where the state is that of another model.
        """
        was, now = ([tuple(m.shape) for m in masters] for masters in (state["masters"], self.masters))
        if was != now:
            differs = next((pair for pair in zip(was, now, strict=False) if pair[0] != pair[1]), (len(was), len(now)))
            raise ResumeError(
                f"the checkpoint is of a drafter with other weights: {len(was)} tensors, here {len(now)}, "
                f"first difference {differs[0]} and {differs[1]}; put the settings of its shape back"
            )
        device = self.masters[0].device
        torch._foreach_copy_(list(self.masters), [m.to(device) for m in state["masters"]])
        moments = {
            index: {
                name: value.clone() if torch.is_tensor(value) and value.device == device else value
                for name, value in of.items()
            }
            for index, of in state["adamw"]["state"].items()
        }
        self.adamw.load_state_dict({**state["adamw"], "state": moments})  # torch keeps tensors that are on the device
        if not self.shared:
            torch._foreach_copy_(self.parameters, self.masters)
