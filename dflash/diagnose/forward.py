"""The drafter alone: no threads, no target, random features."""

from __future__ import annotations

from dataclasses import replace

import torch

from dflash.bench.shapes import StepShape
from dflash.bench.timing import measure
from dflash.bench.workload import make_drafter, make_head, make_inputs
from dflash.compile_safety import GIB, WarmupJob, installed, warmup
from dflash.drafter.convolution import LocalConvolution

# The field log's drafter and 512 tokens; on a CPU the same graph, small.
FULL = StepShape(tokens=512, anchors=64, block=32, document=256)  # blocks as in the field log
SMALL = StepShape(512, 16, 8, 3, 128, 1.0, 64, 2, 4, 2, 16, 128, 512)


class DrafterAlone:
    """A drafter of one shape with made-up inputs, on one device."""

    def __init__(self, size: str, device: torch.device, seed: int = 0, tokens: int = 0, kind: str = "dflash") -> None:
        """`size` is "full" (Qwen3.6-27B drafter) or "small"; `tokens` changes the context length; `kind`: see
        `bench.workload.KINDS`."""
        shape = {"full": FULL, "small": SMALL}[size]
        self.shape = replace(shape, tokens=tokens or shape.tokens, kind=kind)
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(seed)
        self.drafter = make_drafter(self.shape, make_head(self.shape, device, self.dtype), device, self.dtype)
        self.inputs = make_inputs(self.shape, device, self.dtype, seed).arguments
        self.parameters = sum(p.numel() for p in self.drafter.parameters())

    def loss(self, **changes) -> torch.Tensor:
        """One forward with the story's reduction; `changes` replace inputs."""
        return self.drafter(**{**self.inputs, "reduction": "token_mean", **changes})[0]

    def forward_row(self, grad: bool) -> dict:
        """Run forward, or forward and backward, and say what it took."""

        def call() -> torch.Tensor:
            with torch.set_grad_enabled(grad):
                loss = self.loss()
            if grad:
                loss.backward()
                self.drafter.zero_grad()
            return loss.detach()

        with installed():
            loss = call().item()
            timing = measure(call, self.device, warmup=1, repeats=3)
        return {
            "mode": "forward + backward" if grad else "forward, no_grad",
            "loss": loss,
            "ms": timing.median * 1e3,
            "peak GiB": timing.peak_bytes / GIB if timing.peak_bytes else None,
        }

    def checksum(self) -> float:
        """Changes when any weight changes."""
        return sum(float(p.detach().double().abs().sum()) for p in self.drafter.parameters())

    def stacked_features(self) -> torch.Tensor:
        """The same features stacked as [1, T, N, H], the layout that crashed deep inside a matmul."""
        shape = self.shape
        return self.inputs["all_hidden_states"].unflatten(-1, (shape.captured, shape.hidden))

    def warm(self) -> str:
        """Warm forward and backward up; the line of the field log, from the warmup's own report."""

        def step() -> torch.Tensor:
            loss = self.loss()
            loss.backward()
            return loss.detach()

        with installed():
            (done,) = warmup(
                [WarmupJob(self.device, step, [self.drafter], generators=[self.drafter.anchor_generator], name="drafter")]
            ).devices
        return str(done)

    def warm_no_grad(self) -> str:
        """The field log's own warmup: one forward under no_grad."""

        def step() -> torch.Tensor:
            with torch.no_grad():
                return self.loss()

        with installed():
            (done,) = warmup([WarmupJob(self.device, step, [self.drafter], backward=False, name="drafter")]).devices
        return str(done)

    @torch.no_grad()
    def walk(self) -> list[dict]:
        """The selector's walk over one block, slot by slot, beside the head's best tokens."""
        context = self.drafter.new_context()
        self.drafter.extend(context, self.inputs["all_hidden_states"][:, :8])
        found = self.drafter.propose(context, int(self.inputs["input_ids"][0, 8]))
        before, rows = found.anchor, []
        for slot, token in enumerate(found.best().tolist()):
            place = found.ids[slot].tolist().index(token)
            rows.append({"slot": slot + 1, "after": before, "head's best": int(found.ids[slot, 0]), "walk": token})
            rows[-1]["its rank in the head"] = place + 1
            before = token
        return rows

    @torch.no_grad()
    def stir_selector(self) -> None:
        """Pair scores as large as the logits, as if trained."""
        table = self.drafter.candidate_selector.successor_codebook
        table.copy_(30 * torch.randn_like(table))


@torch.no_grad()
def convolution_reach(block_size: int, taps: int, times: int) -> torch.Tensor:
    """[S, S] bool, by trying: which slots (columns) change each slot (rows) of a block through `times` convolutions."""
    part = LocalConvolution(4, taps, 2, block_size)
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter)

    def through(x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            x = part.enter(x)[0]
        return x

    start = torch.randn(1, block_size, 4)
    changed = start + torch.eye(block_size)[:, :, None]  # row i: slot i changed
    same = through(start)
    return torch.stack([(through(x[None]) != same)[0].any(-1) for x in changed]).T
