"""A target with random weights, by name: `random:qwen3.6-27b`, `random:tiny-hybrid`, `random:tiny`; `@8` asks for 8 layers.

It has the shape, and so the speed and the memory, of a real model that need not be there. It has no tokenizer and
nothing to say: losses and acceptance on it measure nothing but that the numbers are finite.

Each weight is a hash of its name and of its elements' indices in integer arithmetic. So all processes, CPUs and GPUs get
the same bits, and a drafter's process can make the embedding and the head alone. A weight is made on its own device.

Activations are of order one, and each of L layers adds about 1 / sqrt(8 L) of that: with equal weights in all layers the
last of 64 is chaotic, and two right bfloat16 forward passes of it differ by half (measured against float32).
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import TargetError

PREFIX = "random:"
_SEED = 0
_PLAIN = dict(tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
_TINY = _PLAIN | dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.6-27b": _PLAIN
    | dict(
        vocab_size=248320,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
    "tiny-hybrid": _TINY
    | dict(
        num_hidden_layers=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "tiny": _TINY | dict(num_hidden_layers=4),
}
_DENSE = ("tiny",)
MOST_LAYERS = 1000  # counting the weights of more takes minutes
_BACK = ("o_proj.weight", "out_proj.weight", "down_proj.weight")  # matrices that lead back to the residual stream
_PIECE = 1 << 26  # elements filled at once: half a GiB of indices
NOTHING_TO_DECODE = "a random target has nothing to decode"
EMBED_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"


def is_random(name: Any) -> bool:
    """Whether a target's name asks for random weights."""
    return str(name).lower().startswith(PREFIX)


def random_config(name: str) -> Any:
    """The transformers config of `random:SHAPE[@LAYERS]`. Raises TargetError for a shape that is not known."""
    found = re.fullmatch(r"([^@]+)(?:@([0-9]+))?", name.lower().removeprefix(PREFIX))
    if found is None or found[1] not in SHAPES or (found[2] is not None and not 1 <= int(found[2]) <= MOST_LAYERS):
        raise TargetError(
            f"target '{name}' is no random target; wanted {PREFIX}SHAPE with SHAPE one of "
            f"{', '.join(SHAPES)}, and if not all layers are wanted their number, 1 to {MOST_LAYERS}, as in "
            f"{PREFIX}tiny@2"
        )
    sizes = dict(SHAPES[found[1]])
    if found[2] is not None:
        sizes["num_hidden_layers"] = int(found[2])
    if found[1] in _DENSE:
        from transformers import LlamaConfig

        return LlamaConfig(**sizes)
    try:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    except ImportError as error:
        raise TargetError(
            f"target '{name}' needs a transformers with Qwen3.5 models ({error}); install transformers>=5.2"
        ) from error
    return Qwen3_5TextConfig(**sizes)


def build_random(name: str, device: torch.device, dtype: torch.dtype, attention: str = "sdpa") -> nn.Module:
    """The model, made on `device` in `dtype`; nothing of it ever lies elsewhere."""
    from transformers import AutoModelForCausalLM

    config = random_config(name)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("A_log"):  # decay rates from 1 to 16
                weight.copy_(torch.log1p(7.5 * (1 + _uniform(key, weight.shape, 1.0, device, torch.float32))))
            elif weight.dim() > 1:
                _fill(weight, key, config.num_hidden_layers)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class RandomHead:
    """What a drafter takes from a target: its config, and embedding and head, [V, H] each."""

    config: Any
    embed_weight: Tensor
    head_weight: Tensor
    end_ids: tuple[int, ...] = ()


def random_head(name: str, device: torch.device, dtype: torch.dtype) -> RandomHead:
    """Embedding and head of the model that `build_random` would make, without the rest."""
    config = random_config(name)
    weights = []
    for key in (EMBED_NAME, HEAD_NAME):
        weight = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        weights.append(_fill(weight, key, config.num_hidden_layers))
    return RandomHead(config, *weights)


def _std(key: str, shape: torch.Size, layers: int) -> float:
    """Standard deviation of a weight: unit rows for the embedding, unit gain for the rest, see the module's text."""
    if key == EMBED_NAME:
        return 1.0
    return (8 * layers if key.endswith(_BACK) else 1) ** -0.5 * math.prod(shape[1:]) ** -0.5


def _fill(weight: Tensor, key: str, layers: int) -> Tensor:
    """The weight of this name, in place: uniform, centred."""
    std = _std(key, weight.shape, layers)
    flat = weight.view(-1)
    for begin in range(0, flat.numel(), _PIECE):
        piece = flat[begin : begin + _PIECE]
        piece.copy_(_uniform(key, piece.shape, std * math.sqrt(3), weight.device, torch.float32, begin))
    return weight


def _uniform(key: str, shape: torch.Size, bound: float, device: torch.device, dtype: torch.dtype, begin: int = 0) -> Tensor:
    """Values in [-bound, bound) that depend on the key and the element's index alone, the same on every device.

    Products stay below 2 ** 63, so no integer wraps; 24 bits of the hash make a float32 exactly.
    """
    digest = hashlib.blake2b(repr((_SEED, key)).encode(), digest_size=8).digest()
    first, second = (int.from_bytes(part, "big") for part in (digest[:4], digest[4:]))
    x = torch.arange(begin, begin + math.prod(shape), dtype=torch.int64, device=device)
    x.mul_(0x5BD1F36B).add_(first).bitwise_and_(0xFFFFFFFF)
    x.bitwise_xor_(x >> 14).bitwise_xor_(second)  # without it all weights would be stretches of one sequence
    for shift, factor in ((15, 0x6C8E944D), (13, 0x7A3D4B2F), (16, 0x51ED7A95)):
        x.bitwise_xor_(x >> shift).mul_(factor).bitwise_and_(0xFFFFFFFF)
    x.bitwise_xor_(x >> 15)
    return ((x >> 8) - 2**23).to(dtype).mul_(bound / 2**23).view(shape)
