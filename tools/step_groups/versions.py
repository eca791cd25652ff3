"""How fast is the whole step: its versions, one change at a time, and the peer's."""

from __future__ import annotations

import contextlib

from gpu_harness import OUT

from step_groups.common import HARNESS, TINY, best_backend, ceiling_of, extra_backends, measured, setup


def group_step() -> None:
    """The versions that decide: the best one, the plain one, hard labels, and where the best one's time goes."""
    _, _, large, _ = setup()
    ceiling = ceiling_of("step")
    for backend in (*extra_backends(), None):
        measured(large, True, ceiling, "step", f"fast {backend or 'flex'}", 60, backend)
    best = best_backend("step")
    measured(large, False, ceiling, "step", "fast hard", 40, best)
    measured(large, False, ceiling, "step", "fast hard fp8", 40, best, head_precision="fp8")
    HARNESS.attempt("step", "profile", 30, lambda: profile(large, best))
    with card_of(96e9):
        measured(large, True, ceiling, "step", "96 GB card, optimizer", 40, best, optimizer=True)
    measured(large, True, ceiling, "step", "plain", 60, repeats=3, fast_path=False)


@contextlib.contextmanager
def card_of(size: float):
    """As if the card had this many bytes; one GB of them is the context's."""
    import torch

    if TINY:
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((size - 1e9) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def profile(shape, backend) -> dict:
    """Seconds per kernel of one step, the largest first."""
    import torch
    from torch.profiler import ProfilerActivity

    from dflash.bench import step
    from dflash.bench.workload import make_drafter, make_head, make_inputs

    device, dtype, *_ = setup()
    drafter = make_drafter(shape, make_head(shape, device, dtype), device, dtype, attention_backend=backend)
    call = step.step_call(drafter, make_inputs(shape, device, dtype), True)
    call()
    call()
    activity = ProfilerActivity.CPU if TINY else ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as trace:
        call()
        if not TINY:
            torch.cuda.synchronize()
    rows = [(e.self_cpu_time_total if TINY else e.self_device_time_total, e) for e in trace.key_averages()]
    rows.sort(key=lambda row: -row[0])
    lines = [f"{us / 1e3:9.2f} ms {e.count:5d} x  {e.key[:150]}" for us, e in rows]
    (OUT / "profile.txt").write_text("\n".join(lines) + "\n")
    return {"kernels": lines[:24]}


def group_small() -> None:
    """512 anchors of 8 slots."""
    small = setup()[3]
    ceiling = ceiling_of("small")
    best = best_backend("step")
    measured(small, True, ceiling, "small", "fast 512x8", 40, best, repeats=10)
    measured(small, False, ceiling, "small", "fast 512x8 hard", 20, best, repeats=10)


def group_levers() -> None:
    """One change at a time from the best version."""
    import functools

    import torch

    import dflash.drafter.model
    from dflash.drafter import kernels
    from dflash.drafter.head_plan import HeadPlan

    large = setup()[2]
    ceiling = ceiling_of("levers")
    best = best_backend("step")
    for rows in (7, 9) if TINY else (1664, 4992, 8320):
        measured(large, True, ceiling, "levers", f"chunk {rows}", 20, best, repeats=3, chunk=rows)
    measured(large, True, ceiling, "levers", "soft fp8 head", 30, best, repeats=3, head_precision="fp8")
    wide = 11 if TINY else 8448  # 66 x 20 tiles of 128 x 256: ten full waves of 132, in either orientation of the tile
    measured(large, False, ceiling, "levers", f"hard chunk {wide}", 20, best, repeats=3, chunk=wide)
    measured(
        large, False, ceiling, "levers", f"hard fp8 chunk {wide}", 20, best, repeats=3, chunk=wide, head_precision="fp8"
    )

    if kernels.usable(setup()[0]):
        from dflash.drafter.kernels import blocks

        blocks.JOINT_QKV = True
        measured(large, False, ceiling, "levers", "hard, q k v joint", 20, best, repeats=5)
        blocks.JOINT_QKV = False
    make = HeadPlan.make.__func__

    def unshared(cls, *args):
        plan = make(cls, *args)
        rows = torch.arange(plan.label_at.numel())
        return HeadPlan(plan.supervised, plan.slot, plan.query, plan.label_at, plan.label_at - 1, rows)

    HeadPlan.make = classmethod(unshared)
    measured(large, True, ceiling, "levers", "teacher rows not shared", 20, best, repeats=3)
    HeadPlan.make = classmethod(make)
    plain = dflash.drafter.model.chunked_head_loss

    def swapped(*args, **kwargs):
        return plain(*args, **{**kwargs, "fused": not kwargs["fused"]})

    dflash.drafter.model.chunked_head_loss = functools.wraps(plain)(swapped)
    if not TINY:
        measured(large, True, ceiling, "levers", "plain layers, fused loss", 60, repeats=3, fast_path=False)
        measured(large, True, ceiling, "levers", "fast layers, plain loss", 25, best, repeats=3, chunk=1024)
    dflash.drafter.model.chunked_head_loss = plain


def _peer(group: str, shape, soft: bool, name: str, losses: str = "eager") -> None:
    from dflash.bench import step
    from dflash.bench.peer import peer_call
    from dflash.bench.workload import make_head, make_inputs

    device, dtype, *_ = setup()
    ceiling = ceiling_of(group)

    def call() -> dict:
        function = peer_call(
            shape, make_inputs(shape, device, dtype), make_head(shape, device, dtype), device, dtype, soft, losses
        )
        return {k: v for k, v in step.report(name, shape, soft, function, device, ceiling, 2, 5).items() if k != "name"}

    HARNESS.attempt(group, name, 110, call)


def group_peer() -> None:
    _peer("peer", setup()[2], True, "speculators")


def group_peer_small() -> None:
    _peer("peer_small", setup()[3], True, "speculators 512x8")
