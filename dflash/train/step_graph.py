"""A replica's step as two CUDA graphs: the host launches two things instead of hundreds.

One graph is a pass over a pack (draft, loss, backward, its gradient added to the float32 ones), the other the update of the
weights. A pack's plan is padded (`drafter.head_plan`), so every pass has the same sizes; what differs is copied into
tensors that the graph reads. Both are proved bit for bit against the same step without a graph, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.target.capture import Features

if TYPE_CHECKING:
    from dflash.drafter.pack_plan import PackPlan
    from dflash.train.plan import WorkItem
    from dflash.train.step import Replica


class _Differs(Exception):
    """A graph gave other bits than the step without it."""


def capture(replica: Replica, item: WorkItem, features: Features) -> str:
    """Give a replica its graphs, or none where they cannot be. Returns what came of it, one sentence.

    Weights, moments and gradients are afterwards what they were.
    """
    if replica.device.type != "cuda":
        return f"step_graph: no CUDA graph on {replica.device}; steps are padded and run one operation at a time"
    try:
        replica.graph = StepGraph(replica, replica.padded_plan(item), features.to(replica.device), item.weight or 1.0)
    except Exception as error:  # of a compiler, a kernel or the driver: steps run without it
        replica.graph = None
        torch.cuda.synchronize(replica.device)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"step_graph: steps run one operation at a time, since capturing one failed: {reason}"
    return "step_graph: a pass and the update are one CUDA graph each, bit-equal to the step without them"


class StepGraph:
    """The graphs of one replica, and the tensors that they read and write."""

    def __init__(self, replica: Replica, plan: PackPlan, features: Features, denominator: float):
        self.replica = replica
        optimizer, device = replica.optimizer, replica.device
        if not optimizer.gradients:
            optimizer.gradients = [torch.zeros_like(master) for master in optimizer.masters]
        self._bytes = plan.bytes().to(device)
        self._plan = plan.views(self._bytes)
        self._features = Features(*(tensor.clone() for tensor in features.tensors))
        self._denominator = torch.full((), denominator, dtype=torch.float32, device=device)
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        self._stream = torch.cuda.Stream(device)
        self._pass, self._sums = self._prove(self._padded_pass, optimizer.gradients, None)
        optimizer.make_state()
        state = [*optimizer.masters, *optimizer.moments(), *optimizer.gradients]
        state += [] if optimizer.shared else optimizer.parameters
        self._pass.replay()  # real gradients for the update's proof
        self._lr.fill_(1e-3)
        with optimizer.capturing():
            self.update, self._applied = self._prove(lambda: replica.update(self._lr), state, self._pass.pool())
        torch._foreach_zero_(optimizer.gradients)

    def run(self, plan: PackPlan, features: Features, denominator: float) -> Tensor:
        """`Replica.accumulate`."""
        self._bytes.copy_(plan.bytes(pinned=True), non_blocking=True)
        torch._foreach_copy_(list(self._features.tensors), list(features.tensors))
        self._denominator.fill_(denominator)
        self._pass.replay()
        return self._sums.clone()

    def run_update(self, lr: float) -> Tensor:
        """`Replica.apply` of a step that supervises something."""
        self._lr.fill_(lr)
        self.update.replay()
        return self._applied.clone()

    def _padded_pass(self) -> Tensor:
        return self.replica.padded_pass(self._plan, self._features, self._denominator)

    def _prove(self, step: Callable[[], Tensor], state: list[Tensor], pool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture `step`, and compare what one replay leaves in `state` and returns with a call; `state` is put back."""
        device = self.replica.device
        before = [tensor.detach().clone() for tensor in state]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            for _ in range(2):  # the first compiles, and makes workspaces
                torch._foreach_copy_(state, before)
                with torch.enable_grad():
                    wanted = [step().clone()]
            wanted += [tensor.detach().clone() for tensor in state]
            torch._foreach_copy_(state, before)
        torch.cuda.current_stream(device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step()
        graph.replay()
        with torch.no_grad():
            found = [result, *state]
            same = [_bits(a).eq(_bits(b)).all() for a, b in zip(found, wanted, strict=True)]
            torch._foreach_copy_(state, before)
        if not bool(torch.stack(same).all()):
            raise _Differs(f"{sum(not bool(s) for s in same)} of {len(same)} tensors differ from the step without a graph")
        return graph, result


def _bits(tensor: Tensor) -> Tensor:
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.detach().reshape(-1).view(kind)
