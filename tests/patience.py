"""How long a test waits for something that has to happen or to end: at least ten times what two quiet cores take.

No test measures speed; benches do. A bound here only turns a wait without end into a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600.0  # seconds


def wait_until(condition: Callable[[], object], what: str = "the condition", every: float = 0.05) -> None:
    """Return as soon as `condition()` is true; fail with `what` after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for {what}"
        time.sleep(every)
