"""`bench target`: how fast a target's features are captured, by the plain path and by the fast one.

The target has the Qwen3.6-27B text shape with random weights and as many of its layers as asked; tokens per second are
scaled to the whole depth, since every group of four layers costs the same. `--model` measures a target that can be loaded
instead, whole: `--model smollm2 --document 300`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from dflash.bench.arguments import add_json_argument, add_timing_arguments, whole
from dflash.bench.timing import (
    Timing,
    environment,
    free_memory,
    matmul_ceiling,
    measure,
    refuse_hours,
    synchronize,
    timing_fields,
    write_json,
)
from dflash.bench.workload import document_lengths
from dflash.devices import device_named, dtype_named
from dflash.errors import ConfigError
from dflash.runs.tables import Table
from dflash.target import fast_capture as fast_target
from dflash.target.capture import Target, load_target


@dataclass(frozen=True)
class TargetShape:
    """A hybrid target and a pack of documents; `depth` layers of the whole model, of which `layers` are built. A loaded
    target's sizes are its own, None where its config has none (`loaded_shape`)."""

    tokens: int = 16384
    document: int = 2000
    layers: int = 8
    depth: int = 64
    captured: int = 5
    hidden: int = 5120
    intermediate: int = 17408
    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256
    linear_key_heads: int = 16
    linear_value_heads: int = 48
    linear_head_dim: int = 128
    vocab: int = 248320

    @property
    def flops_per_token(self) -> float:
        """Of the matrix products of the built layers; three linear-attention layers to one of full attention."""
        h = self.hidden
        keys, values = self.linear_key_heads * self.linear_head_dim, self.linear_value_heads * self.linear_head_dim
        linear = h * (2 * keys + 3 * values + 2 * self.linear_value_heads)
        full = h * self.head_dim * (3 * self.heads + 2 * self.kv_heads)
        return self.layers * 2.0 * (3 * h * self.intermediate + 0.75 * linear + 0.25 * full)


PACK = ("tokens", "document")  # the options that a loaded target leaves open
CONFIG_NAMES = {
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_head_dim": "linear_key_head_dim",
}
SMALLER = (
    "--tokens 512 --hidden 256 --intermediate 768 --heads 4 --kv-heads 2 --head-dim 64 --linear-key-heads 2 "
    "--linear-value-heads 4 --linear-head-dim 64 --vocab 8192"
)  # a capture of a second on a CPU


def loaded_shape(target: Target, pack: TargetShape) -> TargetShape:
    """The sizes of a loaded target, whole, with the tokens and documents of `pack`."""
    sizes = {name: getattr(target.config, key, None) for name, key in CONFIG_NAMES.items()}
    return TargetShape(
        pack.tokens,
        pack.document,
        target.num_layers,
        target.num_layers,
        len(target.layer_ids),
        target.hidden_size,
        vocab=target.embed_weight.shape[0],
        **sizes,
    )


def make_target(shape: TargetShape, device: torch.device, dtype: torch.dtype) -> Target:
    """A target of this shape with random weights."""
    try:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
    except ImportError as error:
        raise ConfigError(f"this transformers has no Qwen3.5 model ({error}); install transformers>=5.2") from error
    config = Qwen3_5TextConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=shape.linear_key_heads,
        linear_num_value_heads=shape.linear_value_heads,
        linear_key_head_dim=shape.linear_head_dim,
        linear_value_head_dim=shape.linear_head_dim,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    ids = sorted({round(i * (shape.layers - 2) / max(1, shape.captured - 1)) for i in range(shape.captured)})
    return Target(model, layer_ids=ids)


def capture_call(target: Target, shape: TargetShape, last_hidden: bool = True) -> Callable[[], object]:
    """A function that captures one pack, each time with documents of other lengths, as training has them: what is done
    once for a shape (plans, tuning, caching) is paid for as there."""
    host = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.embed_weight.shape[0], (1, shape.tokens), generator=host)
    return lambda: target.capture(ids, document_lengths(shape.tokens, shape.document, host), last_hidden=last_hidden)


def report(
    name: str,
    target: Target,
    shape: TargetShape,
    ceiling: float,
    warmup: int,
    repeats: int,
    flops_per_token: float | None = None,
) -> dict:
    """Measure `target.capture`, soft labels' last state included; `flops_per_token` is the shape's unless given.

    `host_seconds` is what the call took before it returned: on a GPU the time to launch it, on a CPU all of it.
    """
    call = capture_call(target, shape)
    timing = measure(call, target.device, warmup, repeats)
    rate = shape.tokens / timing.median
    flops = (shape.flops_per_token if flops_per_token is None else flops_per_token) * rate
    return {
        "name": name,
        "tokens_per_second": rate * shape.layers / shape.depth,
        **timing_fields(timing),
        "host_seconds": _host_seconds(call, target.device, timing),
        "matmul_flops_per_second": flops,
        "mfu": flops / ceiling,
    }


def _host_seconds(call: Callable[[], object], device: torch.device, timing: Timing, repeats: int = 5) -> float:
    """Median seconds until the call returns, each into an empty stream; on a CPU the call is the work, timed already."""
    if device.type != "cuda":
        return timing.median
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _measured(target: Target, shape: TargetShape, ceiling: float, args: argparse.Namespace, flops: float) -> list[dict]:
    """Plain, fast, and fast with the documents' attention one after another."""
    settings = (shape, ceiling, args.warmup, args.repeats, flops)
    results = [report("plain", target, *settings)]
    free_memory(target.device)
    if fast_target.attach(target):
        results.append(report("fast", target, *settings))
        if target.fast.varlen is not None:
            target.fast.varlen = None
            results.append(report("loop", target, *settings))
    return results


def shape_asked(args: argparse.Namespace) -> TargetShape:
    """The shape of the options, the default's where none is given. Raises ConfigError where no target has it."""
    given = {f.name: getattr(args, f.name) for f in fields(TargetShape) if getattr(args, f.name) is not None}
    if args.model:
        refused = ", ".join(_option(name) for name in given if name not in PACK)
        if refused:
            raise ConfigError(f"--model {args.model} has sizes of its own, got {refused} too; leave them out, or --model")
        return TargetShape(**given)
    shape = TargetShape(**given)
    if shape.layers < 2:
        raise ConfigError(f"--layers must be at least 2, since layers below the last are captured; got {shape.layers}")
    below = shape.layers - 1
    if "captured" not in given:
        shape = replace(shape, captured=min(shape.captured, below))
    if shape.captured > below:
        raise ConfigError(
            f"--captured must be at most {below}, the layers below the last of --layers {shape.layers}; got "
            f"{shape.captured}; give fewer, or --layers {shape.captured + 1}"
        )
    if shape.depth < shape.layers:
        raise ConfigError(
            f"--depth, the layers of the whole model, must be at least --layers ({shape.layers}), those that "
            f"are built; got {shape.depth}"
        )
    for name, group_name in (("heads", "kv_heads"), ("linear_value_heads", "linear_key_heads")):
        count, group = getattr(shape, name), getattr(shape, group_name)
        if count % group:
            raise ConfigError(
                f"{_option(name)} ({count}) must be a multiple of the key heads, {_option(group_name)} ({group})"
            )
    return shape


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(args: argparse.Namespace) -> int:
    device, dtype = device_named(args.device), dtype_named(args.dtype)
    shape, target = shape_asked(args), None
    if args.model:
        target = load_target(args.model, device, dtype, fast=False)
        shape = loaded_shape(target, shape)
    flops = (
        shape.flops_per_token
        if target is None
        else 2.0 * sum(p.numel() for p in target.decoder.layers.parameters() if p.dim() > 1)
    )
    ceiling, calls = matmul_ceiling(device, dtype), args.warmup + args.repeats
    refuse_hours(lambda: calls * flops * shape.tokens / ceiling, device, "--tokens 1024" if target else SMALLER)
    target = target or make_target(shape, device, dtype)
    results = _measured(target, shape, ceiling, args, flops)
    print(target.describe())
    kernels = fast_target.has_recurrence_kernels(target)
    print(
        f"{shape.layers} of {shape.depth} layers, scaled; flash-linear-attention {'in use' if kernels else 'not in use'}; "
        f"ceiling {ceiling / 1e12:.3g} TFLOP/s"
    )
    rows = [
        {
            "path": r["name"],
            "tokens/s": round(r["tokens_per_second"]),
            "ms": r["seconds_median"] * 1e3,
            "host ms": r["host_seconds"] * 1e3,
            "TFLOP/s": r["matmul_flops_per_second"] / 1e12,
            "MFU": r["mfu"],
            "peak GB": None if r["peak_bytes"] is None else r["peak_bytes"] / 1e9,
        }
        for r in results
    ]
    print(Table(rows))
    write_json(
        args.json,
        {
            "bench": "target",
            "model": args.model,
            "shape": vars(shape),
            "dtype": args.dtype,
            "matmul_ceiling": ceiling,
            "flash_linear_attention": kernels,
            "environment": environment(device),
            "results": results,
        },
    )
    return 0


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("target", help="a target's feature capture, plain and fast")
    parser.add_argument("--model", help="a target to load (smollm2, a folder, random:tiny) instead of the Qwen3.6 shape")
    for field in fields(TargetShape):
        parser.add_argument(
            _option(field.name),
            type=whole(),
            help=f"{field.default} where no --model is given" if field.name not in PACK else f"default {field.default}",
        )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add_timing_arguments(parser, warmup=2, repeats=5)
    add_json_argument(parser)
    parser.set_defaults(run=run)
