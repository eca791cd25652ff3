"""The compiled half of attention: the one boundary to `torch.compile(flex_attention)`, and its block masks.

Both are built here, at import, once for the process; nothing is compiled before the first call. Every call runs the
compiled kernel or raises a `CompileSafetyError`; it never materializes dense scores.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash.compile_safety.boundary import CompiledFunction
from dflash.compile_safety.errors import AttentionShape, UnsupportedDeviceError, UnsupportedHeadDimError
from dflash.drafter.masks import MaskMod

DEVICES = ("cuda", "cpu", "xpu")
BLOCK = 128  # rows and columns of one block of the mask
SHORT_QUERIES = 128  # torch would choose its decoding kernel, which does not take every mask of this size
# Tiles that fit the shared memory of small GPUs at head_dim 256 (pytorch issues 133254, 180278, 198224).
SMALL_TILES = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_M1": 16, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 16, "num_stages": 1}
_NO_KERNEL = ("No valid triton configs", "out of resource", "OutOfResources", "embedding dimension", "NoValidChoices")


def _describe(args: tuple, kwargs: dict) -> str:
    return AttentionShape.of(args[0], args[1]).refusal()


_flex = CompiledFunction(flex_attention, "compiled_flex_attention", _describe)
_masks = CompiledFunction(create_block_mask, "compiled create_block_mask", lambda args, kwargs: f"Q, K = {args[3:5]}.")

_small_tiles: set[tuple[str, int, torch.dtype]] = set()  # (device, head_dim, dtype) whose default tiles do not fit
_small_tiles_lock = threading.Lock()


def compiled_flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask | None = None,
    enable_gqa: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Block-sparse attention by the compiled kernel, from any thread.

    Args:
        q: [B, Nq, Q, D]; k, v: [B, Nkv, K, D], on one device.
        block_mask: visibility, [B or 1, Nq or 1, Q, K].
        enable_gqa: Nq is a multiple of Nkv.
        scale: of the scores, 1/sqrt(D) where None.

    Returns: [B, Nq, Q, D].

    Raises:
        UnsupportedDeviceError, UnsupportedHeadDimError: no compiled kernel here; the memory of a dense run is named.
        NestedTraceError, RecompileLimitError, SealedRecompileError, DynamoDisabledError: it would run uncompiled.
    """
    if torch.compiler.is_dynamo_compiling():
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, scale=scale)
    _check_device(q, k, v)
    key = (str(q.device), q.shape[-1], q.dtype)
    options = _kernel_options(q, key)
    try:
        return _flex(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, scale=scale, kernel_options=options)
    except RuntimeError as error:
        if not _is_missing_kernel(error):
            raise
        if key in _small_tiles or q.device.type != "cuda":
            raise _unsupported_head_dim(q, k) from error
    with _small_tiles_lock:
        _small_tiles.add(key)
    options = _kernel_options(q, key)
    try:
        return _flex(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, scale=scale, kernel_options=options)
    except RuntimeError as error:
        raise (_unsupported_head_dim(q, k) if _is_missing_kernel(error) else error) from error


def build_block_mask(mask_mod: MaskMod, queries: int, keys: int, device: torch.device | str) -> BlockMask:
    """The BlockMask of `mask_mod` over [Q, K], one for all batches and heads.

    Compiled on CUDA (eagerly it would hold the dense mask several times: 24 GB for 32768 x 72768), eager on CPU.
    """
    device = torch.device(device)
    build = _masks if device.type == "cuda" else create_block_mask
    with torch.no_grad():
        return build(mask_mod, None, None, queries, keys, device, BLOCK)


def _check_device(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.device.type not in DEVICES:
        reason = f"flex_attention has no kernel for device type {q.device.type!r}"
    elif q.device.type != "cpu" or not (q.requires_grad or k.requires_grad or v.requires_grad):
        return
    else:
        reason = "flex_attention has no backward on CPU"
    raise UnsupportedDeviceError(
        f"{reason}. {AttentionShape.of(q, k).refusal()} Run on a CUDA device, or choose attention 'sdpa_chunked' or "
        "'sdpa' by name."
    )


def _kernel_options(q: Tensor, key: tuple[str, int, torch.dtype]) -> dict | None:
    if q.device.type != "cuda":
        return None
    options = dict(SMALL_TILES) if key in _small_tiles else {}
    if q.shape[-2] <= SHORT_QUERIES:
        options["FORCE_USE_FLEX_ATTENTION"] = True
    return options or None


def _is_missing_kernel(error: BaseException) -> bool:
    return any(text in str(error) for text in _NO_KERNEL)


def _unsupported_head_dim(q: Tensor, k: Tensor) -> UnsupportedHeadDimError:
    name = torch.cuda.get_device_name(q.device) if q.device.type == "cuda" else "the CPU"
    return UnsupportedHeadDimError(
        f"no flex_attention kernel for head_dim {q.shape[-1]} on {name}, neither with the default tiles nor with "
        f"smaller ones. {AttentionShape.of(q, k).refusal()} Use a head_dim of 64 or 128, or another GPU."
    )
