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
    def config(self) -> DrafterConfig:
        return create_drafter_config(
            num_draft_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            **KINDS[self.kind],
        )


TARGET = "random:qwen3.6-27b@8"  # what `bench target` captures where nobody says
TINY = StepShape(
    tokens=96,
    anchors=8,
    block=4,
    captured=2,
    document=30,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=300,
)
SMALL = StepShape(
    tokens=2048,
    anchors=64,
    block=8,
    captured=3,
    document=400,
    supervised=0.8,
    hidden=512,
    layers=2,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate=1408,
    vocab=8192,
)
MEDIUM = StepShape(
    tokens=16384,
    anchors=512,
    block=16,
    captured=3,
    document=1500,
    supervised=0.9,
    hidden=2048,
    layers=4,
    heads=16,
    kv_heads=4,
    head_dim=128,
    intermediate=6144,
    vocab=65536,
)
FULL = StepShape()
SHAPES = {"tiny": TINY, "small": SMALL, "medium": MEDIUM, "full": FULL}
