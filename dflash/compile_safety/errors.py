"""Errors of the compile-safe runtime, and the memory that the dense path would have taken.

A call that was meant to run compiled never runs dense instead. It raises one of these; the message names the cause,
the memory that dense attention would need, and the next thing to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash.errors import DFlashError

GIB = 1 << 30
SCORE_BYTES = 4  # uncompiled flex_attention holds its scores in float32, whatever the inputs' dtype


class CompileSafetyError(DFlashError):
    """Root of the errors of this package."""


class NestedTraceError(CompileSafetyError):
    """A compiled function was called while FX traces, in this thread or (unprotected) in another one."""


class RecompileLimitError(CompileSafetyError):
    """More shapes than torch keeps compiled versions of; it would run the next one uncompiled."""


class SealedRecompileError(CompileSafetyError):
    """A call after `seal()` that needs a new compilation.

    Attributes: `guard` is the guard that failed, as torch words it; `shapes` the shapes of the call.
    """

    def __init__(self, message: str, guard: str = "", shapes: str = "") -> None:
        super().__init__(message)
        self.guard = guard
        self.shapes = shapes


class DynamoDisabledError(CompileSafetyError):
    """The compiler is switched off, or set to hide its errors, so the call would run uncompiled."""


class UnsupportedDeviceError(CompileSafetyError):
    """This device cannot run the compiled kernel, or not its backward."""


class UnsupportedHeadDimError(CompileSafetyError):
    """No kernel of this device takes this head_dim, with the default tiles or with smaller ones."""


class CompileFailedError(CompileSafetyError):
    """The compiler failed for a reason that none of the other errors names; the cause is chained."""


class GateTimeoutError(CompileSafetyError):
    """A thread waited too long for traces, or for compiled calls, of other threads to end."""


class HangError(CompileSafetyError):
    """The watchdog saw no completed step within its bound."""


class WarmupError(CompileSafetyError):
    """Warmup did not reach a state that can be sealed."""


def dense_bytes(batch: int, heads: int, q_len: int, kv_len: int) -> int:
    """Bytes of the one tensor that makes dense attention impossible: scores [B, Nq, Q, K] in float32.

    Uncompiled `flex_attention` multiplies q and k, casts the product to float32 and keeps it for the softmax. That
    cast is the first allocation to fail, so this is what an out-of-memory message shows: for 32 heads, 32768 queries
    and 40000 context positions (K = 72768) it is 284 GiB. The whole peak is higher, since the product in the input
    dtype and the softmax's output live beside it (about 2.5 times this for bf16 inputs).
    """
    return batch * heads * q_len * kv_len * SCORE_BYTES


@dataclass(frozen=True)
class AttentionShape:
    """What the messages say about one attention call: B, Nq, Q, K, D, its dtype and device."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    device: str

    @classmethod
    def of(cls, q, k) -> AttentionShape:  # q [B, Nq, Q, D], k [B, Nkv, K, D]
        """Read a call's shape; tensors that are not 4-D are left to the kernel's own check."""
        batch, heads, q_len, head_dim = q.shape
        return cls(batch, heads, q_len, k.shape[-2], head_dim, str(q.dtype).removeprefix("torch."), str(q.device))

    @property
    def dense_gib(self) -> float:
        return dense_bytes(self.batch, self.heads, self.q_len, self.kv_len) / GIB

    def __str__(self) -> str:
        return (
            f"q [{self.batch}, {self.heads}, {self.q_len}, {self.head_dim}] x {self.kv_len} keys, "
            f"{self.dtype} on {self.device}"
        )

    def refusal(self) -> str:
        return f"Dense attention was refused: its scores alone would take {self.dense_gib:.2f} GiB ({self})."
