"""DFlash 2's local convolution: each draft slot mixes with the slots just before it in its own block.

It stands around a sublayer (attention, MLP). One projection P of the normed sublayer input x gives both sides' dynamic
coefficients, d = P x, viewed as [side 2, tap K, group G] with G = H / g groups of g channels:

    out[t, c] = sum over taps k of (base[side, k, c] + d[t, side, k, c // g]) * z[t - k, c]

Side 0 takes z = x and feeds the sublayer; side 1 takes z = what the sublayer gives, before the residual. A tap that would
reach in front of the block's first slot is zero, and context never takes part. It starts as the identity.

Source: DFlash 2 (z-lab/dflash).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def local_convolution(z: Tensor, base: Tensor, delta: Tensor, block_size: int) -> Tensor:
    """One side. z: [1, Q, H] or [Q, H], Q a whole number of blocks; base: [K, H]; delta: [.., Q, K, G]."""
    taps, groups = delta.shape[-2:]
    blocks = z.reshape(-1, block_size, groups, z.shape[-1] // groups)  # [A, S, G, g]
    delta, base = delta.reshape(-1, block_size, taps, groups), base.view(taps, groups, -1)
    out = (base[0] + delta[:, :, 0, :, None]) * blocks
    for tap in range(1, taps):
        before = F.pad(blocks, (0, 0, 0, 0, tap, 0))[:, :block_size]
        out = out + (base[tap] + delta[:, :, tap, :, None]) * before
    return out.view_as(z)


class Projection(nn.Module):
    """A linear map without bias that draws nothing when it is made: adding parts leaves the other weights' draws alone."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LocalConvolution(nn.Module):
    """Both sides of one sublayer: `base_kernel` [2, K, H] and `kernel_projection` [2 * K * G, H]."""

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int, block_size: int):
        super().__init__()
        self.kernel_size, self.groups, self.block_size = kernel_size, hidden_size // group_size, block_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = Projection(hidden_size, 2 * kernel_size * self.groups)

    def reset_parameters(self) -> None:
        """The identity."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input from x [1, Q, H], and the coefficients that `leave` wants."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.kernel_size, self.groups))
        return local_convolution(x, self.base_kernel[0], delta[..., 0, :, :], self.block_size), delta[..., 1, :, :]

    def leave(self, z: Tensor, delta: Tensor) -> Tensor:
        """What goes into the residual from the sublayer's output z [1, Q, H]."""
        return local_convolution(z, self.base_kernel[1], delta, self.block_size)


class NoConvolution(nn.Module):
    """The plain DFlash layer: nothing around a sublayer."""

    def enter(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None

    def leave(self, z: Tensor, delta: None) -> Tensor:
        return z
