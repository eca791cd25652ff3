"""Logits through a frozen head in float8: both operands as e4m3 with one scale a row, products summed in float32.

The head never changes, so it is quantized once; the hidden rows of a chunk are quantized when they are multiplied. A
tensor core multiplies e4m3 at twice the rate of bfloat16. Only the logits take this way, the draft's and with soft labels
the teacher's. The gradient's product stays in the head's own dtype: its left operand, softmax minus label, spans from 1
down to 1e-12 in one row, and e4m3 with one scale holds 2^-17 of the row's largest.

Numbers. A row's scale is the power of two that brings its largest magnitude into [128, 256), so scaling rounds nothing
and a value that e4m3 can hold is kept exactly. Elements above 2^-13 of the largest are off by at most 2^-4 of themselves
(3 mantissa bits, to nearest), smaller ones by at most 2^-17 of the largest. A row with NaN or infinity gives NaN logits;
a row of zeros gives zeros.

A few columns of a real head carry most of every logit, and so most of its error. What rounding took from those columns, on
either side, comes as further columns of the same product: [x | x' | x - x'] times [w | w - w' | w'], primes for the rounded
values of the columns in question, all under the row's one scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dflash.errors import ConfigError

PRECISIONS = ("same", "fp8")
E4M3 = torch.float8_e4m3fn
CORRECTED = 64  # columns whose rounding is made good; fewer where H is small
ALIGN = 16  # the product wants H and the number of head rows in multiples of this
_PIECE_ROWS = 8192  # of the head, quantized at once
_EXPONENT = 0x7F800000  # of a float32
_TINIEST = 2.0**-120  # scale of a row of zeros; its inverse is finite


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [R, H] as e4m3 [R, H] and their scales [R] float32; x is about codes * scale."""
    if x.dtype == torch.float16:
        x = x.float()  # its exponents are too short for the scales
    peak = x.abs().amax(-1, keepdim=True).float()
    # The peak's exponent alone, 2^-7 of it; infinity for infinity and NaN, whose rows then hold a NaN (0 * inf).
    scale = ((peak.view(torch.int32) & _EXPONENT).view(torch.float32) * 2.0**-7).clamp_(min=_TINIEST)
    return (x * scale.reciprocal().to(x.dtype)).to(E4M3), scale.squeeze(-1)


def corrected_columns(hidden: int) -> int:
    """C, how many of H columns are corrected: 64, at most a quarter, a multiple of 8."""
    return min(CORRECTED, hidden // 32 * 8)


def _wide_rows(x: Tensor, columns: Tensor, rest_first: bool) -> tuple[Tensor, Tensor]:
    """`quantize_rows` with the codes of `columns` and of what they lack appended: [R, H + 2 C] and [R]."""
    if x.dtype == torch.float16:
        x = x.float()
    codes, scales = quantize_rows(x)
    bits = codes.view(torch.uint8)  # selection and joining know plain types better
    rounded = bits.index_select(1, columns)
    scaled = x.index_select(1, columns) * scales[:, None].reciprocal().to(x.dtype)
    rest = (scaled - rounded.view(E4M3).to(x.dtype)).to(E4M3).view(torch.uint8)
    return torch.cat([bits, *((rest, rounded) if rest_first else (rounded, rest))], 1).view(E4M3), scales


@dataclass(frozen=True)
class Fp8Head:
    """A quantized head: `codes` [V16, H + 2 C] e4m3, `scales` [V16] float32 and the corrected `columns` [C] int64; V16 is V
    rounded up to 16 by rows of zeros."""

    codes: Tensor
    scales: Tensor
    columns: Tensor
    size: int  # V

    @classmethod
    def of(cls, head: Tensor) -> Fp8Head:
        """Quantize a head [V, H]. Costs `memory_bytes` and never a second copy of the head.

        Raises: ConfigError where the product cannot run, see `refuse`.
        """
        refuse(head.device, head.dtype, head.shape[1])
        return cls._quantized(head)

    @classmethod
    def _quantized(cls, head: Tensor) -> Fp8Head:
        size, hidden = head.shape
        parts = [slice(start, min(start + _PIECE_ROWS, size)) for start in range(0, size, _PIECE_ROWS)]
        energy = torch.zeros(hidden, dtype=torch.float32, device=head.device)
        for part in parts:
            energy += head[part].float().square().sum(0)
        columns = energy.topk(corrected_columns(hidden)).indices.sort().values
        bits = torch.zeros(-(-size // ALIGN) * ALIGN, hidden + 2 * len(columns), dtype=torch.uint8, device=head.device)
        codes, scales = bits.view(E4M3), torch.ones(bits.shape[0], dtype=torch.float32, device=head.device)
        for part in parts:
            codes[part], scales[part] = _wide_rows(head[part], columns, rest_first=True)
        return cls(codes, scales, columns, size)

    @property
    def width(self) -> int:
        """V16, the columns of a buffer that `logits` writes."""
        return self.codes.shape[0]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [R, H] times the head: [R, V], a view of `out` [R, V16] where that is given."""
        codes, scales = _wide_rows(hidden, self.columns, rest_first=False)
        if out is None:
            dtype = hidden.dtype if hidden.device.type == "cpu" else torch.bfloat16
            out = torch.empty(hidden.shape[0], self.width, dtype=dtype, device=hidden.device)
        if hidden.device.type == "cpu":  # the same numbers without the tensor core: e4m3 products are exact in float32
            for start in range(0, self.width, _PIECE_ROWS):
                part = slice(start, start + _PIECE_ROWS)
                out[:, part] = (codes.float() @ self.codes[part].float().T) * scales[:, None] * self.scales[part]
        elif hidden.shape[0]:
            # Row-wise `torch.nn.functional.scaled_mm`, which has no `out`. Fast accumulation keeps about 14 bits of the
            # running sum: an error below 1% of it, where rounding the operands costs 4% of every product.
            torch._scaled_mm(
                codes,
                self.codes.T,
                scale_a=scales[:, None],
                scale_b=self.scales[None],
                out_dtype=out.dtype,
                use_fast_accum=True,
                out=out,
            )
        return out[:, : self.size]


def memory_bytes(size: int, hidden: int) -> int:
    """Bytes of a quantized head of `size` rows."""
    corrected = corrected_columns(hidden)
    return -(-size // ALIGN) * ALIGN * (hidden + 2 * corrected + 4) + 8 * corrected


def usable(device: torch.device | str) -> bool:
    """True when float8 logits can be made on `device`: a CPU computes the same numbers, slowly."""
    return obstacle(device) is None


def obstacle(device: torch.device | str) -> str | None:
    """Why `device` cannot multiply e4m3 by rows, in one clause; None when it can. A GPU is asked by a tiny product."""
    device = torch.device(device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"{device} is no NVIDIA GPU"
    return _gpu_obstacle(device)


@cache
def _gpu_obstacle(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "this process sees no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"{device} has compute capability {capability[0]}.{capability[1]}, float8 products need 8.9 or newer"
    ones = torch.ones(3 * ALIGN, 4 * ALIGN, dtype=torch.bfloat16, device=device)
    try:
        head = Fp8Head._quantized(ones)
        right = bool((head.logits(ones[: ALIGN + 1]) == 4 * ALIGN).all())  # any number of rows must do
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        return f"torch {torch.__version__} on {device} refuses the product ({str(error).splitlines()[0][:200]})"
    return None if right else f"torch {torch.__version__} on {device} gives a wrong product"


def refuse(device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    """Raises ConfigError where float8 logits cannot be made; there is no silent way back to another precision.

    Args:
        dtype: of the drafter. hidden: H.
    """
    reason = None
    if hidden % ALIGN:
        reason = f"needs a hidden size that is a multiple of {ALIGN}, the target's is {hidden}"
    elif device.type == "cuda" and dtype != torch.bfloat16:
        reason = f"gives bfloat16 logits on a GPU, and the drafter computes in {str(dtype).removeprefix('torch.')}"
    elif (found := obstacle(device)) is not None:
        reason = f"cannot run here: {found}"
    if reason is not None:
        cure = "dtype=bfloat16 or " if "bfloat16 logits" in reason else ""
        raise ConfigError(f"head_precision=fp8 {reason}; set {cure}head_precision=same")
