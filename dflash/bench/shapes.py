"""Sizes that a bench measures at; without torch, so that a command line can list them at once."""

from __future__ import annotations

from dataclasses import dataclass

from dflash.drafter.config import DrafterConfig, create_drafter_config

KINDS: dict[str, dict] = {
    "dflash": {},
    "dflash2": {"drafter_kind": "dflash2"},
    "convolution": {"drafter_kind": "dflash2", "selector_top_k": 0},
    "selector": {"drafter_kind": "dflash2", "conv_kernel_size": 0},
}


@dataclass(frozen=True)
class StepShape:
    """One step. `supervised` is the share of positions with loss; 1.0 leaves nothing to skip."""

    tokens: int = 40000
    anchors: int = 1024
    block: int = 32
    captured: int = 5
    document: int = 2000
    supervised: float = 1.0
    hidden: int = 5120
    layers: int = 5
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 17408
    vocab: int = 248320
    kind: str = "dflash"  # or "dflash2", or one of its parts: "convolution", "selector"

    @property
    def sizes(self) -> dict[str, int]:
        """Those of the decoder layers, by transformers' names."""
        return dict(
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
        )

    @property
    def config(self) -> DrafterConfig:
        return create_drafter_config(num_draft_layers=self.layers, **self.sizes, **KINDS[self.kind])


TARGET = "random:qwen3.6-27b@8"  # what `bench target` captures where nobody says
# The fields of StepShape from `tokens` to `vocab`, in order.
TINY = StepShape(96, 8, 4, 2, 30, 1.0, 64, 2, 4, 2, 16, 96, 300)
SMALL = StepShape(2048, 64, 8, 3, 400, 0.8, 512, 2, 8, 2, 64, 1408, 8192)
MEDIUM = StepShape(16384, 512, 16, 3, 1500, 0.9, 2048, 4, 16, 4, 128, 6144, 65536)
SHAPES = {"tiny": TINY, "small": SMALL, "medium": MEDIUM, "full": StepShape()}
