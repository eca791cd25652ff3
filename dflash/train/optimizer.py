"""AdamW and Muon over float32 masters, gradient clipping and the learning rate, without a host sync in a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dflash.errors import ResumeError

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd")
DECAY_SHARE = 0.2  # of a "wsd" schedule, the last part
MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # a quintic that pulls singular values towards 1; five times
ADAMW_RMS = 0.2  # of an AdamW step; makes one learning rate do for both (Moonlight, arXiv 2502.16982)
_PIECE = 1 << 25  # elements of matrices taken together, which bounds what a step needs beside the momenta


def learning_rate(step: int, total: int, warmup: int, base: float, min_ratio: float, schedule: str = "cosine") -> float:
    """Linear warmup over `warmup` steps, then one of `SCHEDULES`, which ends at base * min_ratio on step `total` (1-based):
    a cosine, or constant until the last `DECAY_SHARE`, which falls as 1 - sqrt."""
    if step <= warmup:
        return base * step / max(1, warmup)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule == "wsd":
        height = 1 - math.sqrt(max(0.0, 1 - (1 - progress) / DECAY_SHARE))
    else:
        height = 0.5 * (1 + math.cos(math.pi * progress))
    return base * (min_ratio + (1 - min_ratio) * height)


def finite_each(tensors: list[Tensor]) -> Tensor:
    """Whether each tensor is finite throughout, [n] bool on their device. By its largest entry: a sum of squares overflows
    for entries that are finite."""
    largest = iter(torch._foreach_norm([t for t in tensors if t.numel()], ord=math.inf))
    return torch.isfinite(torch.stack([next(largest) if t.numel() else t.new_zeros(()) for t in tensors]))


def orthogonal(matrices: Tensor) -> Tensor:
    """[n, r, c] bfloat16: matrices with the singular vectors of these and singular values near 1 (Newton-Schulz)."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon:
    """`torch.optim.Muon` with Nesterov momentum and AdamW's step size, for matrices of one shape together: one by one they
    are some twenty kernels each, more than the rest of a small drafter's step.

    `momenta`: [n, r, c] for each of `pieces`, lists of masters.
    """

    def __init__(self, masters: list[Tensor], weight_decay: float):
        self.weight_decay = weight_decay
        shapes: dict[torch.Size, list[Tensor]] = {}
        for master in masters:
            shapes.setdefault(master.shape, []).append(master)
        self.pieces: list[list[Tensor]] = []
        for shape, alike in shapes.items():
            count = max(1, _PIECE // shape.numel())
            self.pieces += [alike[i : i + count] for i in range(0, len(alike), count)]
        self.momenta = [piece[0].new_zeros(len(piece), *piece[0].shape) for piece in self.pieces]

    @torch.no_grad()
    def step(self, lr: Tensor, finite: Tensor) -> None:
        """From the masters' `grad`; lr scalar float32. `finite`, scalar bool: where it is False nothing changes."""
        for piece, momentum in zip(self.pieces, self.momenta, strict=True):
            gradient = torch.stack([master.grad for master in piece])
            gradient = torch.where(finite, gradient, momentum)  # which leaves the momentum as it is
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonal(gradient.lerp_(momentum, MOMENTUM)).float()
            update *= finite * (-lr * ADAMW_RMS * math.sqrt(max(momentum.shape[1:])))
            torch._foreach_mul_(piece, 1 - finite * (lr * self.weight_decay))
            torch._foreach_add_(piece, list(update.unbind()))


class MasterAdamW:
    """AdamW whose weights, moments and gradients are float32, whatever the model computes in.

    `accumulate` moves the model's gradients into float32 and clears them; between steps those do not exist, unless
    someone else put tensors of their own into `gradients` (one per master), which are then kept. `step` clips, updates
    the masters and copies them back. A gradient that is not finite changes nothing (the fused kernel skips on the
    device) and is visible in the norm that `step` returns. Matrices decay; norms and the bases of convolutions do not.

    Args:
        muon: those of the parameters that Muon updates instead.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        muon: Collection[nn.Parameter] = (),
    ):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.max_grad_norm = max_grad_norm
        self.shared = all(p.dtype == torch.float32 for p in self.parameters)
        self.masters = self.parameters if self.shared else [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.gradients: list[Tensor] = []  # float32
        self._own = False  # made by `accumulate`, dropped by `step`
        chosen = {id(p) for p in muon}
        apart = [m for p, m in zip(self.parameters, self.masters, strict=True) if id(p) in chosen]
        self.muon = Muon(apart, weight_decay) if apart else None
        rest = [m for p, m in zip(self.parameters, self.masters, strict=True) if id(p) not in chosen]
        groups = [
            {"params": [m for m in rest if m.dim() == 2], "weight_decay": weight_decay},
            {"params": [m for m in rest if m.dim() != 2], "weight_decay": 0.0},
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
    def step(self, lr: float | Tensor) -> Tensor:
        """Clip to `max_grad_norm`, update, copy back, zero the gradients. Returns the norm before clipping (scalar,
        on the device, not finite when the step was skipped). `lr` counts as float32, which a graph's tensor holds."""
        rate = lr if isinstance(lr, Tensor) else torch.full((), lr, device=self.masters[0].device)
        norm = self._norm()
        finite = torch.isfinite(norm)
        factor = torch.where(finite, (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        torch._foreach_mul_(self.gradients, factor)
        for group in self.adamw.param_groups:
            group["lr"] = lr if isinstance(lr, Tensor) else torch.tensor(lr, dtype=torch.float32).item()
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        self.adamw.grad_scale = None
        self.adamw.found_inf = (~finite).float()
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(rate, finite)
        for master in self.masters:
            master.grad = None
        if not self.shared:
            torch._foreach_copy_(self.parameters, self.masters)
        if self._own:
            self.gradients, self._own = [], False
        else:
            torch._foreach_zero_(self.gradients)
        return norm

    def make_state(self) -> None:
        """The moments of a first step before it, so that a graph finds them."""
        for master in (p for group in self.adamw.param_groups for p in group["params"]):
            if not self.adamw.state[master]:
                moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
                self.adamw.state[master] = {"step": torch.zeros((), device=master.device)} | moments

    def moments(self) -> list[Tensor]:
        """All tensors of the optimizer's state."""
        found = [value for of in self.adamw.state.values() for value in of.values()]
        return found if self.muon is None else [*found, *self.muon.momenta]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """For `step` inside a CUDA graph, with a tensor as learning rate."""
        for group in self.adamw.param_groups:
            group["capturable"] = True
        try:
            yield
        finally:
            for group in self.adamw.param_groups:
                group["capturable"], group["lr"] = False, 0.0

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
        state = {"adamw": self.adamw.state_dict(), "masters": [m.detach() for m in self.masters]}
        return state if self.muon is None else {**state, "muon": self.muon.momenta}

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
        if ("muon" in state) != (self.muon is not None):
            was, now = ("muon", "adamw") if "muon" in state else ("adamw", "muon")
            raise ResumeError(f"the checkpoint was trained with optimizer={was}, the settings say {now}; put it back")
        device = self.masters[0].device
        if self.muon is not None:
            torch._foreach_copy_(self.muon.momenta, [m.to(device) for m in state["muon"]])
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
