"""Does this torch show the faults, and does the protection remove them? Each probe runs in its own process.

    fx_flag_race                 a compiled call in one thread fails because another thread traces with FX
    warm_cache_still_races       the same for a function that is compiled and warm: the check runs before the cache
    recompile_limit_goes_dense   after `recompile_limit` shapes the next one runs uncompiled
    suppressed_error_goes_dense  settings that hide errors (nested traces, failed compiles) run uncompiled
    lazy_backward_deadlock       a lazily compiled backward and a forward being traced wait for each other (CUDA)
    foreign_trace_recompiles     a trace in another thread makes a warm function fail its guards and recompile
    foreign_trace_breaks_modules a trace in another thread breaks eager `nn.Module` calls

Verdicts: `fault` (shown), `clean` (not shown), `hang` (killed at the time limit), `skipped` (needs a GPU),
`error` (the probe itself failed). Run one by hand: `python -m dflash.diagnose.probes NAME --protect`.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from dflash.diagnose.isolated import report, run_isolated
from dflash.views.style import clip

PROBES = (
    "fx_flag_race",
    "warm_cache_still_races",
    "recompile_limit_goes_dense",
    "suppressed_error_goes_dense",
    "lazy_backward_deadlock",
    "foreign_trace_recompiles",
    "foreign_trace_breaks_modules",
)
DEFAULT_LIMIT = 180.0


@dataclass(frozen=True)
class ProbeResult:
    """One probe with protection off or on."""

    name: str
    protected: bool
    verdict: str
    detail: str
    seconds: float

    @property
    def bad(self) -> bool:
        return self.verdict in ("fault", "hang", "error")


def run_probe(
    name: str, protect: bool, backend: str = "inductor", device: str = "auto", limit: float = DEFAULT_LIMIT
) -> ProbeResult:
    """Run one probe in a fresh process with an empty compile cache.

    Args:
        name: one of `PROBES`.
        backend: of torch.compile; "eager" needs no compiler and shows the same races in a fraction of the time.
        device: "cpu", "cuda", or "auto" for CUDA where there is one.
        limit: seconds after which the process is killed and the verdict is `hang`.
    """
    if name not in PROBES:
        raise ValueError(f"unknown probe {name!r}; known: {', '.join(PROBES)}")
    if name == "lazy_backward_deadlock":
        backend = "inductor"  # the others have no lazily compiled backward
    arguments = [name, "--backend", backend, "--device", device, *(["--protect"] if protect else [])]
    result = run_isolated(__name__, arguments, limit)
    if result.hung:
        return ProbeResult(name, protect, "hang", f"killed after {limit:.0f} s", result.seconds)
    if result.value is None:
        return ProbeResult(name, protect, "error", result.death[:300], result.seconds)
    return ProbeResult(name, protect, result.value["verdict"], result.value["detail"], result.seconds)


def run_probes(
    backend: str = "inductor",
    device: str = "auto",
    limit: float = DEFAULT_LIMIT,
    names: tuple[str, ...] = PROBES,
    jobs: int = 1,
) -> list[ProbeResult]:
    """Every probe, off and on, `jobs` processes at a time; in the order of `names`."""
    cases = [(name, protect) for name in names for protect in (False, True)]
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda each: run_probe(*each, backend, device, limit), cases)
        return list(tqdm(found, "probes", total=len(cases), leave=False))


def jobs_here() -> int:
    """Processes that may compile at a time without slowing one another down much: one for each eight cores."""
    return max(1, (os.cpu_count() or 1) // 8)


def probe_rows(results: list[ProbeResult]) -> list[dict[str, Any]]:
    """One row for each probe: its verdict with protection off and on, and what was seen."""
    rows = []
    for name in dict.fromkeys(result.name for result in results):
        off, on = (
            next((r for r in results if r.name == name and r.protected == protect), None) for protect in (False, True)
        )
        rows.append({"probe": name, "protection off": off and off.verdict, "protection on": on and on.verdict})
        rows[-1]["what was seen (off)"] = clip((off or on).detail.splitlines()[0], 90)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROBES)
    parser.add_argument("--protect", action="store_true", help="with the protection on")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args(argv)
    from dflash.diagnose.probe_bodies import run_body

    verdict, detail = run_body(args.name, args.protect, args.backend, args.device)
    report({"verdict": verdict, "detail": detail})
    return 0


if __name__ == "__main__":
    sys.exit(main())
