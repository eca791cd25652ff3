"""Is the step right: loss, gradients and metrics of the fast path against the plain modules."""

from __future__ import annotations

import time

from step_groups.common import HARNESS, TINY, setup

# Of the fp8 head against float32, relative: (loss, worst gradient). Rounding both operands to e4m3 costs each product 4%
# (rms), logits of spread 2 so 0.07; a hard label's gradient feels it through the softmax alone, a soft one's is a
# difference of two such.
FP8_LIMITS = {"hard": (1e-2, 6e-2), "soft": (1e-2, 0.15)}


def relative(a, b) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def group_check() -> None:
    """Loss, gradients and metrics of the fast path against the plain modules: fresh random inputs, poisoned memory."""
    import torch

    from dflash.bench.workload import StepShape, make_drafter, make_head, make_inputs

    device = setup()[0]
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    base = dict(captured=3, hidden=256, layers=2, heads=8, kv_heads=2, head_dim=128, intermediate=640, vocab=5003)
    seed = int(time.time())

    def one(shape, dtype, soft, attention, fast, precision="same"):
        torch.manual_seed(seed)
        drafter = make_drafter(
            shape,
            make_head(shape, device, torch.float32, seed),
            device,
            torch.float32,
            fast_path=fast,
            attention_backend=attention,
            loss_chunk_rows=384 if fast else 1024,
        )
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            drafter.lm_head.mul_(6)
        drafter.to(dtype)
        drafter.head_precision = precision
        drafter.load_target_head(drafter.embed_tokens, drafter.lm_head)  # quantizes it as it is now
        inputs = make_inputs(shape, device, torch.float32, seed).arguments
        for name in ("all_hidden_states", "verifier_last_hidden"):
            inputs[name] = inputs[name].to(dtype)
        loss, metrics = drafter(**inputs, use_soft_labels=soft, gamma=10.0)
        loss.backward()
        return loss.detach(), metrics, {n: p.grad for n, p in drafter.named_parameters()}

    def compare(shape, soft, attention, exact, fp8=False):
        reference = one(shape, torch.float32, soft, "sdpa", False)
        result = {"seed": seed}
        rows = [("plain bf16", torch.bfloat16, "sdpa", False), ("fast bf16", torch.bfloat16, attention, True)]
        if exact:
            rows.append(("fast fp32", torch.float32, "triton" if attention == "triton" else "sdpa", True))
        if fp8:
            rows.append(("fp8 head", torch.float32 if TINY else torch.bfloat16, attention, not TINY, "fp8"))
        for label, *version in rows:
            loss, metrics, grads = one(shape, version[0], soft, *version[1:])
            worst = max((relative(grads[n], g), n) for n, g in reference[2].items())
            same = all(torch.equal(metrics[k], reference[1][k]) for k in ("supervised_by_slot", "blocks"))
            hits = int((metrics["correct_by_slot"] - reference[1]["correct_by_slot"]).abs().sum())
            result[label] = [relative(loss, reference[0]), worst[0], worst[1], same, hits]
        limits = {
            "fast fp32": (1e-5, 2e-4),
            "fast bf16": (1e-2, max(2 * result["plain bf16"][1], 2e-2)),
            "fp8 head": FP8_LIMITS["soft" if soft else "hard"],
        }
        result["ok"] = all(
            result[k][0] <= a and result[k][1] <= b and result[k][3] for k, (a, b) in limits.items() if k in result
        )  # NaN fails both
        return result

    shape = StepShape(tokens=700, anchors=24, block=32, document=150, supervised=0.8, **base)
    short = StepShape(tokens=300, anchors=40, block=8, document=90, supervised=0.6, **base)
    cases = [("hard 40x8 sdpa", short, False, "sdpa", True)]
    if not TINY:
        cases += [
            ("soft 24x32 triton", shape, True, "triton", True),
            ("hard 40x8 triton", short, False, "triton", False),
            ("soft 24x32 flex", shape, True, "flex", False),
        ]
    cases += [
        ("hard 40x8 fp8 head", short, False, "sdpa", False, True),
        ("soft 24x32 fp8 head", shape, True, "sdpa", False, True),
    ]
    for name, *case in cases:
        HARNESS.attempt("check", name, 150, lambda c=tuple(case): compare(*c))
    torch.use_deterministic_algorithms(False)
