"""N fresh processes, each with threads that make their first compiled call at once on an empty compile cache.

This is the launch that the field log's run died in. Each thread has its own shapes, its own device where there are
several, and runs forward (and, on CUDA, backward) of `flex_attention`, over and over until every thread has had its
first call: early threads train while late ones still compile, as in a real launch. On CPU flex_attention has no
backward; there every thread also runs a small compiled layer forward and backward. Each process has a time limit; a hang
is a result.

Checks inside a process: no exception; each thread's outputs (and gradients) equal, bit for bit, what the same
function returns afterwards in the main thread alone; and agree with dense float32 attention.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from dflash.diagnose.isolated import report, run_isolated

DEFAULT_LIMIT = 300.0
MAX_SPANS = 2000
REPEATS = 3  # calls of each thread in a process, at the least
TOLERANCE = 2e-2  # against dense float32, for float32 inputs with TF32 products


@dataclass
class ColdReport:
    """`outcomes` counts processes: ok, error, hang, mismatch, crash. `details` holds the first of each bad kind."""

    protected: bool
    devices: list[str]
    threads: int
    outcomes: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    thread_faults: int = 0
    timelines: list[list[dict]] = field(default_factory=list)  # of each process: thread, name, start, seconds

    @property
    def faults(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome != "ok")

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        mean = sum(self.seconds) / max(1, len(self.seconds))
        mode = "protected" if self.protected else "unprotected"
        text = (
            f"{mode}: {sum(self.outcomes.values())} processes x {self.threads} threads on "
            f"{', '.join(self.devices)}: {counts}; {mean:.1f} s a process"
        )
        ends = [
            max((s["start"] + s["seconds"] for s in line if s["name"] == "first call"), default=0.0)
            for line in self.timelines
        ]
        if not ends:
            return text
        return f"{text}, of it {sum(ends) / len(ends):.1f} s until every thread had made its first call"


def run_cold(
    processes: int,
    protect: bool,
    devices: list[str],
    threads: int = 3,
    limit: float = DEFAULT_LIMIT,
    noise: bool = False,
    backend: str = "inductor",
    jobs: int = 1,
) -> ColdReport:
    """Run the launch `processes` times and count the outcomes.

    Args:
        devices: e.g. ["cpu"], ["cuda:0"] or ["cuda:0", "cuda:1"]; thread i runs on devices[i % len].
        limit: seconds for one process.
        noise: one more thread traces with FX in a loop.
        jobs: processes at a time. Each one compiles on several cores: too many make one another slow.
    """
    result = ColdReport(protect, devices, threads)
    arguments = ["--devices", ",".join(devices), "--threads", str(threads), "--backend", backend]
    arguments += [*(["--protect"] * protect), *(["--noise"] * noise), "--stacks", str(0.7 * limit)]
    with ThreadPoolExecutor(jobs) as pool:
        for run in pool.map(lambda _: run_isolated(__name__, arguments, limit), range(processes)):
            outcome, detail = _classify(run)
            result.outcomes[outcome] = result.outcomes.get(outcome, 0) + 1
            if outcome != "ok":
                result.details.setdefault(outcome, detail)
            if run.value:
                result.thread_faults += len(run.value["errors"])
                result.timelines.append(run.value["timeline"])
            result.seconds.append(round(run.seconds, 2))
    return result


def _classify(run) -> tuple[str, str]:
    if run.hung:
        return "hang", run.output[-1500:]
    if run.value is None:
        return "crash", run.death
    if run.value["errors"]:
        return "error", run.value["errors"][0]
    if run.value["mismatches"]:
        return "mismatch", run.value["mismatches"][0]
    return "ok", ""


# -- inside one process -----------------------------------------------------------------------------------------------


def _launch(devices: list[str], threads: int, protect: bool, noise: bool, backend: str) -> dict:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention.flex_attention import flex_attention

    from dflash.compile_safety.boundary import CompiledFunction
    from dflash.compile_safety.protect import installed
    from dflash.drafter.flex import build_block_mask, compiled_flex_attention

    def layer(x, w):
        return F.gelu(x @ w).square().mean()

    if protect:
        attention = compiled_flex_attention if backend == "inductor" else CompiledFunction(flex_attention, backend=backend)
        compiled_layer = CompiledFunction(layer, backend=backend)
        build = build_block_mask
    else:
        attention = torch.compile(flex_attention, dynamic=False, backend=backend)
        compiled_layer = torch.compile(layer, dynamic=False, backend=backend)
        build = _plain_masks(backend)
    cases = [make_case(torch.device(devices[index % len(devices)]), index) for index in range(threads)]
    state = {"errors": [], "mismatches": [], "timeline": []}
    outputs: list[Any] = [None] * threads
    barrier, begin, stop = threading.Barrier(threads), time.perf_counter(), threading.Event()
    first_calls: set[int] = set()  # threads that are past theirs

    def work(index: int) -> None:
        step = 0
        try:
            _use(cases[index]["device"])
            barrier.wait()
            while step < REPEATS or (len(first_calls) < threads and not state["errors"]):
                start = time.perf_counter()
                outputs[index] = attend(attention, cases[index], build)
                first_calls.add(index)
                if len(state["timeline"]) < MAX_SPANS:
                    state["timeline"].append(
                        {
                            "thread": index,
                            "name": "first call" if step == 0 else "warm call",
                            "start": start - begin,
                            "seconds": time.perf_counter() - start,
                        }
                    )
                step += 1
            outputs[index] += _train(compiled_layer, cases[index])
        except Exception as error:
            state["errors"].append(f"thread {index}, step {step}: {type(error).__name__}: {str(error)[:600]}")

    def trace() -> None:
        while not stop.is_set():
            torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))

    with installed() if protect else nullcontext():
        noisy = threading.Thread(target=trace, daemon=True)
        if noise:
            noisy.start()
        workers = [threading.Thread(target=work, args=(index,), name=f"drafter-{index}") for index in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        stop.set()
        if noise:
            noisy.join()
        if not state["errors"]:
            _compare(state, attention, compiled_layer, cases, outputs, build)
    return state


def _plain_masks(backend: str) -> Callable:
    """Block masks as a run without this package builds them: compiled on CUDA, eager on CPU."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = torch.compile(create_block_mask, dynamic=False, backend=backend)

    def build(rule, queries: int, keys: int, device):
        make = compiled if device.type == "cuda" else create_block_mask
        with torch.no_grad():
            return make(rule, None, None, queries, keys, device)

    return build


def _use(device) -> None:
    """Make `device` the calling thread's current one."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)


def make_case(device, index: int) -> dict:
    """One thread's inputs: an anchor mask over its own number of context positions and blocks."""
    import torch

    from dflash.drafter.masks import AnchorSet, dense_mask, document_ids, visibility

    generator = torch.Generator().manual_seed(index)
    total, block, anchors = 256 + 128 * index, 16, 8 + 8 * index
    q_len = anchors * block
    lengths = torch.tensor([total // 2, total - total // 2])
    positions = torch.randperm(total, generator=generator)[:anchors].sort().values
    anchor_set = AnchorSet(positions, torch.ones(anchors, dtype=torch.bool)).to(device)
    rule = visibility(anchor_set, document_ids(lengths, total).to(device), block)
    grad = device.type == "cuda"

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_(grad)

    layer_grad = torch.randn(32 + 16 * index, 32, generator=generator).to(device).requires_grad_()
    return {
        "q": draw(1, 4, q_len, 64),
        "k": draw(1, 2, total + q_len, 64),
        "v": draw(1, 2, total + q_len, 64),
        "rule": rule,
        "dense": dense_mask(rule, q_len, total + q_len, device),
        "x": torch.randn(8, 32 + 16 * index, generator=generator).to(device),
        "w": layer_grad,
        "device": device,
    }


def attend(attention, case: dict, build: Callable | None = None) -> list:
    """Forward, and backward on CUDA; returns the tensors that have to be equal, on the host.

    `build` makes the block mask anew for each call, as a run does; by default the package's own.
    """
    import torch

    from dflash.drafter.flex import build_block_mask

    q, k, v = case["q"], case["k"], case["v"]
    mask = (build or build_block_mask)(case["rule"], q.shape[2], k.shape[2], case["device"])
    out = attention(q, k, v, block_mask=mask, enable_gqa=True)
    result = [out]
    if q.requires_grad:
        result += torch.autograd.grad(out.square().sum(), (q, k, v))
    return [tensor.detach().cpu() for tensor in result]


def _train(layer, case: dict) -> list:
    """On CPU: forward and backward of the small layer; its gradient, on the host."""
    import torch

    if case["device"].type != "cpu":
        return []
    return [torch.autograd.grad(layer(case["x"], case["w"]), case["w"])[0].cpu()]


def _compare(state: dict, attention, layer, cases: list[dict], outputs: list, build) -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    for index, (case, threaded) in enumerate(zip(cases, outputs, strict=True)):
        _use(case["device"])
        alone = attend(attention, case, build) + _train(layer, case)
        if not all(torch.equal(a, b) for a, b in zip(alone, threaded, strict=True)):
            state["mismatches"].append(f"thread {index}: outputs differ from the single-threaded ones")
        q, k, v = (case[name].detach().float().cpu() for name in "qkv")
        dense = scaled_dot_product_attention(q, k, v, attn_mask=case["dense"].cpu(), enable_gqa=True)
        worst = (dense - threaded[0]).abs().max().item()
        if not worst < TOLERANCE:
            state["mismatches"].append(f"thread {index}: differs from dense float32 attention by {worst:.3g}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--protect", action="store_true")
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--stacks", type=float, default=None, help="seconds after which all stacks are printed")
    args = parser.parse_args(argv)
    if args.stacks:
        faulthandler.dump_traceback_later(args.stacks)
    report(_launch(args.devices.split(","), args.threads, args.protect, args.noise, args.backend))
    return 0


if __name__ == "__main__":
    sys.exit(main())
