"""What a trained drafter is worth: acceptance, exactness and speed."""

from __future__ import annotations

from dflash.acceptance import evaluate_acceptance, summarize, walk_packs

__all__ = ["evaluate_acceptance", "summarize", "walk_packs"]
