"""The speculators library's DFlash model on our tensors, for comparison. Only its model is imported.

Its package imports the training data code, and with it a dataset library and HTTP clients; the model needs none of
them, so empty modules stand in for that part.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor

from dflash.bench.shapes import StepShape
from dflash.bench.workload import StepInputs
from dflash.drafter.masks import document_ids
from dflash.errors import ConfigError

GAMMA = 10.0


def import_peer() -> types.ModuleType:
    """speculators.models.dflash.core. Raises ConfigError when it is not installed."""
    train, data = types.ModuleType("speculators.train"), types.ModuleType("speculators.train.data")
    train.__path__ = []
    data.BatchType = dict
    added = {"speculators.train": train, "speculators.train.data": data}
    for name, module in added.items():
        sys.modules.setdefault(name, module)
    try:
        return importlib.import_module("speculators.models.dflash.core")
    except ImportError as error:
        raise ConfigError(
            f"the peer speculators cannot be imported ({error}); install its wheel with --no-deps, and pydantic"
        ) from error


def make_peer(shape: StepShape, head: tuple[Tensor, Tensor], device: torch.device, dtype: torch.dtype):
    """Its model at our shape with random weights and our head; K and V as in ours, full attention."""
    core = import_peer()
    from speculators.models.dflash import DFlashSpeculatorConfig
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    config = Qwen3Config(
        **shape.sizes,
        num_hidden_layers=shape.layers,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
    )
    config._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "eager"
    with torch.device(device):
        model = core.DFlashDraftModel(
            DFlashSpeculatorConfig(
                transformer_layer_config=config,
                draft_vocab_size=shape.vocab,
                block_size=shape.block,
                aux_hidden_state_layer_ids=list(range(shape.captured)),
                mask_token_id=shape.vocab - 1,
            )
        ).to(dtype)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(head[0])
        for owner in (model.lm_head, model.verifier_lm_head):
            owner.weight = torch.nn.Parameter(head[1], requires_grad=False)  # one head, as in ours
    return core, model


def peer_call(
    shape: StepShape, inputs: StepInputs, head: tuple[Tensor, Tensor], device: torch.device, dtype: torch.dtype, soft: bool
) -> Callable[[], Tensor]:
    """A function that runs one step of the peer on our tensors and anchors, its forward and losses compiled as a whole on
    CUDA. (Its Triton losses refuse a compiled forward on torch 2.11.)"""
    core, model = make_peer(shape, head, device, dtype)
    losses = importlib.import_module("speculators.losses.eager")
    chosen = losses.kl_div_loss if soft else losses.ce_loss
    anchors = inputs.anchors.to(device)
    core.select_anchors = lambda loss_mask, count, block: (anchors.positions, anchors.valid)
    documents = document_ids(inputs.lengths, shape.tokens)[None].to(device)
    loss_mask = inputs.loss_mask.to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def call() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        _, loss, _ = model(
            hidden_states=inputs.all_hidden_states,
            input_ids=inputs.input_ids,
            loss_mask=loss_mask,
            verifier_last_hidden_states=inputs.verifier_last_hidden,
            document_ids=documents,
            position_ids=inputs.position_ids,
            loss_config={"loss": (chosen, 1.0)},
            gamma=GAMMA,
            max_anchors=shape.anchors,
        )
        loss.backward()
        return loss.detach()

    return call
