"""`dflash doctor`: one page about this machine, to read or to paste into a bug report.

Versions, GPUs, the compile cache, the environment variables that matter, the compile probes with protection off and
on, and advice. Exit code 0 only where a protected run is safe here.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash.diagnose.isolated import report, run_isolated
from dflash.diagnose.probes import DEFAULT_LIMIT, ProbeResult, jobs_here, probe_rows, run_probes
from dflash.runs.environment import package_version
from dflash.runs.tables import Table

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "accelerate",
    "gguf",
    "papermill",
    "plotly",
    "matplotlib",
    "ipykernel",
    "nvidia-ml-py",
    "flash-linear-attention",
    "causal-conv1d",
)
VARIABLES = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True keeps memory flat when shapes vary",
    "PYTORCH_ALLOC_CONF": "the same, newer name",
    "CUDA_MODULE_LOADING": "EAGER loads kernels at start instead of during the run",
    "CUDA_VISIBLE_DEVICES": "which GPUs torch sees",
    "CUDA_LAUNCH_BLOCKING": "1 makes every launch wait: for debugging only",
    "TORCH_COMPILE_DISABLE": "1 switches torch.compile off",
    "TORCHDYNAMO_DISABLE": "1 switches torch.compile off",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "1 hides compile errors by running uncompiled",
    "TORCHINDUCTOR_CACHE_DIR": "where compiled kernels are kept",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1 compiles everything anew in each process",
    "TRITON_CACHE_DIR": "where Triton keeps its kernels",
    "OMP_NUM_THREADS": "threads of CPU kernels; compiled code is guarded by it",
    "NCCL_NVLS_ENABLE": "0 where NVLink multicast is unavailable",
}
QUICK_LIMIT = 120.0


def examine(quick: bool = False) -> dict[str, Any]:
    """Everything the page shows. `safe` is the verdict behind the exit code."""
    import torch

    limit = QUICK_LIMIT if quick else DEFAULT_LIMIT
    probes = run_probes(backend="eager" if quick else "inductor", limit=limit, jobs=jobs_here())
    overhead = run_isolated(__name__, ["overhead"], limit).value
    page: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "cuda_build": torch.version.cuda,
        "gpus": gpus(),
        "compile_cache": compile_cache(),
        "environment": environment_variables(),
        "probes": [asdict(probe) for probe in probes],
        "flex": flex_compiles(),
        "overhead_us": overhead and overhead["overhead_us"],
        "linear_attention": linear_attention(),
    }
    page["safe"], page["advice"] = judge(page, probes)
    return page


def judge(page: dict[str, Any], probes: list[ProbeResult]) -> tuple[bool, list[str]]:
    """Whether a protected run is safe here, and what to do; pure, so that it can be tested."""
    advice = []
    failing = [probe for probe in probes if probe.protected and probe.bad]
    for probe in failing:
        advice.append(f"{probe.name} still shows a {probe.verdict} with protection on: {probe.detail[:300]}")
    for index, flex in page["flex"].items():
        if not flex["ok"]:
            advice.append(f"compiled attention does not work on {index}: {flex['detail'][:300]}")
    shown = sorted({probe.name for probe in probes if not probe.protected and probe.verdict in ("fault", "hang")})
    if shown:
        advice.append(
            f"never start drafter threads unprotected on this torch; it shows {', '.join(shown)}. Every run "
            "of this package installs the protection itself."
        )
    if not page["gpus"]:
        advice.append("no GPU: attention is 'sdpa_chunked' here; 'flex' has no backward on CPU.")
    env = page["environment"]
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS"):
        if env.get(name) not in (None, "", "0"):
            advice.append(f"unset {name}: {VARIABLES[name]}.")
    if page["gpus"] and "expandable_segments" not in (env.get("PYTORCH_CUDA_ALLOC_CONF") or "") + (
        env.get("PYTORCH_ALLOC_CONF") or ""
    ):
        advice.append("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: " + VARIABLES["PYTORCH_CUDA_ALLOC_CONF"])
    if not page["compile_cache"]["writable"]:
        advice.append(
            f"the compile cache {page['compile_cache']['path']} cannot be written; set "
            "TORCHINDUCTOR_CACHE_DIR to a folder that can."
        )
    if page["gpus"] and not page["linear_attention"]["flash-linear-attention"]:
        advice.append(
            "for hybrid targets (Qwen3.5/3.6): install flash-linear-attention, the reference path runs at "
            "about 60% of its speed."
        )
    safe = not failing and all(flex["ok"] for flex in page["flex"].values())
    return safe, advice


def environment_variables() -> dict[str, str | None]:
    """The variables of `VARIABLES` as this process was started with; torch sets some itself while it runs."""
    try:
        entries = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
        started = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    except OSError:
        started = dict(os.environ)
    return {name: started.get(name) for name in VARIABLES}


def gpus() -> list[dict[str, Any]]:
    """Each visible GPU: name, capability, memory and driver; empty without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return []
    driver = _driver_version()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "total_bytes": total,
                "free_bytes": free,
                "driver": driver,
            }
        )
    return found


def compile_cache() -> dict[str, Any]:
    """Where inductor keeps compiled kernels, how many files and bytes are there, and whether it can be written."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    path = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    return {
        "path": str(path),
        "state": "empty" if not files else "filled",
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files if file.exists()),
        "writable": os.access(nearest, os.W_OK),
    }


def flex_compiles() -> dict[str, dict[str, Any]]:
    """Whether the package's compiled attention runs here, by device, in a process of its own."""
    result = run_isolated(__name__, ["flex"], DEFAULT_LIMIT)
    if result.value is not None:
        return result.value
    return {"this machine": {"ok": False, "detail": "hung" if result.hung else result.death}}


def linear_attention() -> dict[str, bool]:
    """Whether the packages that make hybrid targets fast are importable."""
    return {
        "flash-linear-attention": importlib.util.find_spec("fla") is not None,
        "causal-conv1d": importlib.util.find_spec("causal_conv1d") is not None,
    }


def render(page: dict[str, Any]) -> str:
    """The page as text."""
    lines = [f"python {page['python']} ({page['executable']}) on {page['platform']}, {page['cpu_cores']} cores"]
    lines += [f"  {name:<24} {version or '-'}" for name, version in page["packages"].items()]
    lines.append(f"  {'CUDA build of torch':<24} {page['cuda_build'] or '-'}")
    lines.append("GPUs:" if page["gpus"] else "GPUs: none")
    lines += [
        f"  {gpu['device']}  {gpu['name']}, capability {gpu['capability']}, {gpu['total_bytes'] / 2**30:.0f} GiB "
        f"({gpu['free_bytes'] / 2**30:.0f} free), driver {gpu['driver']}"
        for gpu in page["gpus"]
    ]
    cache = page["compile_cache"]
    lines.append(
        f"compile cache: {cache['path']} ({cache['state']}, {cache['files']} files, "
        f"{cache['bytes'] / 2**20:.1f} MiB{'' if cache['writable'] else ', NOT WRITABLE'})"
    )
    lines.append("environment:")
    lines += [f"  {name} = {value}" for name, value in page["environment"].items() if value is not None]
    unset = ", ".join(name for name, value in page["environment"].items() if value is None)
    lines.append(f"  unset: {unset}")
    lines.append("probes (each in its own process):")
    probes = [ProbeResult(**probe) for probe in page["probes"]]
    lines += ["  " + line for line in str(Table(probe_rows(probes))).splitlines()]
    lines += [
        f"flex_attention compiled on {device}: {'yes' if flex['ok'] else 'NO'} ({flex['detail']})"
        for device, flex in page["flex"].items()
    ]
    if page["overhead_us"] is not None:
        lines.append(f"protection costs {page['overhead_us']:.1f} us on a warm call")
    lines.append("advice:")
    lines += [f"  - {line}" for line in page["advice"]] or ["  - nothing to do"]
    lines.append(f"verdict: a protected run is {'safe' if page['safe'] else 'NOT safe'} here")
    return "\n".join(lines)


def _driver_version() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()[0].strip()
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return None


def _flex_in_this_process() -> dict[str, dict[str, Any]]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from dflash.compile_safety import installed
    from dflash.drafter.flex import compiled_flex_attention

    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    results = {}
    with installed():
        for device in devices:
            cuda = device.startswith("cuda")
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device=device)
            dtype = torch.bfloat16 if cuda else torch.float32
            q, k, v = (torch.randn(1, 2, 256, 64, device=device, dtype=dtype, requires_grad=cuda) for _ in range(3))
            try:
                out = compiled_flex_attention(q, k, v, block_mask=mask)
                if cuda:
                    out.sum().backward()
            except Exception as error:
                results[device] = {"ok": False, "detail": f"{type(error).__name__}: {str(error)[:500]}"}
                continue
            want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
            worst = (out.float() - want).abs().max().item()
            what = "forward and backward" if cuda else "forward; there is no backward on CPU"
            results[device] = {"ok": worst < 0.05, "detail": f"{what}, largest difference from dense {worst:.1e}"}
    return results


def _child(what: str) -> None:
    if what == "flex":
        report(_flex_in_this_process())
    else:
        from dflash.diagnose.overhead import measure_gate_overhead

        report(measure_gate_overhead())


if __name__ == "__main__":
    _child(sys.argv[1])
