"""The gate that keeps FX traces and compiled calls apart.

While a thread traces with FX, torch replaces functions such as `math.log` for the whole process. A compiled function
called at that moment in another thread fails its guards and recompiles, silently and concurrently. So:

  * a compiled call holds the gate's **shared** side during its launch, and a backward pass for as long as it runs;
  * a trace, and a whole compilation, holds the **exclusive** side.

Rules that keep it free of deadlock:

  * Both sides are re-entrant per thread. The owner of the exclusive side passes everywhere.
  * A thread that holds the shared side and needs the exclusive one (a compiled call that must compile) gives its
    shared hold up while it waits and gets it back, without a gap, when it leaves. Two such threads take turns.
  * A thread that is inside a running backward pass, so every worker of the autograd engine, never waits here: whoever
    started that backward holds a side of the gate for it, and waiting could block the engine for its own starter.
  * Waiters are served in order of arrival, so a thread that traces in a loop starves nobody, nor do busy callers
    starve a trace. A shared waiter that has waited `barge_after` seconds goes next: a caller whose turn hangs on
    another thread's progress cannot be locked out by a queued trace.
  * Every wait has an end: after `timeout` seconds it raises GateTimeoutError, which names the holders.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dflash.compile_safety.errors import GateTimeoutError

SHARED, EXCLUSIVE = "shared", "exclusive"


def in_backward() -> bool:
    """True in a thread that runs part of a backward pass: an autograd worker, or the caller on CPU."""
    return torch._C._current_graph_task_id() != -1


class _Waiter:
    __slots__ = ("granted", "kind", "thread", "wake")

    def __init__(self, kind: str, thread: int) -> None:
        self.kind = kind
        self.thread = thread
        self.granted = False
        self.wake = threading.Event()


class TraceGate:
    """Shared side for compiled calls, exclusive side for traces and compilations; see the module's text.

    Args:
        timeout: seconds after which a waiter raises GateTimeoutError.
        barge_after: seconds after which a shared waiter goes before everything queued.
        passes: says whether the calling thread goes through without waiting (inside a backward pass).
    """

    def __init__(self, timeout: float = 900.0, barge_after: float = 2.0, passes: Callable[[], bool] = in_backward) -> None:
        self.timeout = timeout
        self.barge_after = barge_after
        self._passes = passes
        self._reset()

    def _reset(self) -> None:
        """Forget all holders: for a new gate, and for the child of a fork, whose other threads are gone."""
        self._lock = threading.Lock()
        self._owner = 0  # thread id; 0 is nobody
        self._depth = 0
        self._shared: dict[int, int] = {}  # thread id -> re-entrant count
        self._queue: deque[_Waiter] = deque()

    # -- shared side: the two calls below are the warm path, so they are written out, not wrapped ----------------

    def enter_shared(self) -> bool:
        """Take the shared side. Returns whether `leave_shared` has to be called."""
        me = threading.get_ident()
        held = self._shared
        with self._lock:
            if me in held:
                held[me] += 1
                return True
            if self._owner == me:
                return False
            if not self._owner and not self._queue:
                held[me] = 1
                return True
        if self._passes():
            return False
        self._wait(SHARED, me)
        return True

    def leave_shared(self) -> None:
        """Give back what `enter_shared` took (called only where it returned True)."""
        me = threading.get_ident()
        with self._lock:
            count = self._shared[me] - 1
            if count:
                self._shared[me] = count
                return
            del self._shared[me]
            if self._queue:
                self._grant()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the shared side: no trace or compilation runs in another thread meanwhile."""
        entered = self.enter_shared()
        try:
            yield
        finally:
            if entered:
                self.leave_shared()

    # -- exclusive side ------------------------------------------------------------------------------------------

    def enter_exclusive(self) -> tuple[bool, int]:
        """Take the exclusive side. Returns a token for `leave_exclusive`."""
        me = threading.get_ident()
        if self._passes():
            return (False, 0)
        with self._lock:
            if self._owner == me:
                self._depth += 1
                return (True, 0)
            given_up = self._shared.pop(me, 0)
            if not self._owner and not self._shared and not self._queue:
                self._owner, self._depth = me, 1
                return (True, given_up)
            if given_up and self._queue:
                self._grant()
        try:
            self._wait(EXCLUSIVE, me)
        except BaseException:
            if given_up:  # the compiled call around us still believes that it holds the shared side
                self._restore_shared(me, given_up)
            raise
        return (True, given_up)

    def leave_exclusive(self, token: tuple[bool, int]) -> None:
        """Leave; a shared hold that `enter_exclusive` gave up is back before anyone else gets in."""
        entered, given_up = token
        if not entered:
            return
        me = threading.get_ident()
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            self._owner = 0
            if given_up:
                self._shared[me] = given_up
            self._grant()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the exclusive side: no compiled call, backward pass or trace runs in another thread meanwhile."""
        token = self.enter_exclusive()
        try:
            yield
        finally:
            self.leave_exclusive(token)

    def describe(self) -> str:
        """Who holds the gate and who waits, for messages."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}

        def name(ident: int) -> str:
            return names.get(ident, f"thread {ident}")

        with self._lock:
            owner = name(self._owner) if self._owner else "nobody"
            shared = ", ".join(name(ident) for ident in self._shared) or "nobody"
            queue = ", ".join(f"{name(waiter.thread)} ({waiter.kind})" for waiter in self._queue) or "nobody"
        return f"exclusive: {owner}; shared: {shared}; waiting: {queue}"

    # -- waiting -------------------------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Let in everyone at the head of the queue who may. The caller holds the lock."""
        while self._queue and not self._owner:
            waiter = self._queue[0]
            if waiter.kind == EXCLUSIVE:
                if self._shared:
                    return
                self._owner, self._depth = waiter.thread, 1
            else:
                self._shared[waiter.thread] = 1
            self._queue.popleft()
            waiter.granted = True
            waiter.wake.set()

    def _wait(self, kind: str, me: int) -> None:
        waiter = _Waiter(kind, me)
        deadline = time.monotonic() + self.timeout
        with self._lock:
            self._queue.append(waiter)
            self._grant()
        try:
            if kind == SHARED and not waiter.wake.wait(min(self.barge_after, self.timeout)):
                with self._lock:
                    if not waiter.granted:
                        self._queue.remove(waiter)
                        self._queue.appendleft(waiter)
                        self._grant()
            if not waiter.wake.wait(max(0.0, deadline - time.monotonic())):
                raise GateTimeoutError(
                    f"waited {self.timeout:.0f} s for the {kind} side of the compile gate; {self.describe()}. "
                    f"A trace or a compiled call in one of these threads does not end:\n{self._holder_stacks()}"
                )
        except BaseException:
            self._abandon(waiter)
            raise

    def _abandon(self, waiter: _Waiter) -> None:
        """Undo a wait that was interrupted, whether its turn had come or not."""
        with self._lock:
            if not waiter.granted:
                self._queue.remove(waiter)
            elif waiter.kind == EXCLUSIVE:
                self._owner = self._depth = 0
            else:
                del self._shared[waiter.thread]
            self._grant()

    def _restore_shared(self, me: int, count: int) -> None:
        """Give a hold back outright; the caller is on its way out with an exception, so it never waits."""
        with self._lock:
            self._shared[me] = count

    def _holder_stacks(self) -> str:
        holders = [ident for ident in (self._owner, *self._shared) if ident]
        frames = sys._current_frames()
        stacks = [
            f"thread {ident}:\n{''.join(traceback.format_stack(frames[ident])[-8:])}" for ident in holders if ident in frames
        ]
        return "\n".join(stacks)


GATE = TraceGate()
