"""The DFlash drafter: a block-diffusion draft model over the target's own features.

One forward pass denoises A blocks of S slots at once. Slot 0 of a block holds the real token at its anchor, the other
slots hold the mask token; every layer attends from the draft slots to [context features | draft slots].

Source: DFlash, block diffusion for flash speculative decoding (z-lab/dflash); the stack is Qwen3's.
Shape letters are those of DESIGN: T packed tokens, A anchors, S block_size, Q = A * S, N captured layers, H hidden,
V vocabulary, Vd draft vocabulary, Nq / Nkv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.devices import to_device
from dflash.drafter import fast_path, fp8_head
from dflash.drafter.attention import DEFAULT_MAX_DENSE_BYTES, DocumentMask, PackMask, default_backend
from dflash.drafter.blocks import Blocks, DraftContext, PackContext
from dflash.drafter.config import DrafterConfig
from dflash.drafter.convolution import LocalConvolution
from dflash.drafter.head_plan import HeadPlan, teacher_spans
from dflash.drafter.layers import DraftLayer, RMSNorm, Rotary, rotary_tables
from dflash.drafter.losses import DEFAULT_CHUNK_ROWS, HeadPass, top_of_rows
from dflash.drafter.masks import AnchorSet, document_ids, sample_anchors
from dflash.drafter.objective import Objective, pack_loss
from dflash.drafter.pack_plan import PackPlan
from dflash.drafter.selector import Candidates, CandidateSelector
from dflash.errors import ConfigError

if TYPE_CHECKING:
    from dflash.drafter.rows import RowContext, RowMask


@dataclass(frozen=True)
class Running:
    """How a drafter computes, which changes nothing of what it is.

    attention_backend: "flex", "sdpa", "sdpa_chunked", or None for the device's default at call time.
    max_dense_bytes: bound of the dense backends.
    loss_chunk_rows: rows of logits alive at once; None takes what suits the device.
    fast_path: train over the Triton kernels (`fast_path`); None: where they run.
    head_precision: "same", or "fp8" for training logits through a quantized copy of the frozen head (`fp8_head`);
        decoding and evaluation keep the head's own dtype.
    """

    attention_backend: str | None = None
    max_dense_bytes: int = DEFAULT_MAX_DENSE_BYTES
    loss_chunk_rows: int | None = None
    fast_path: bool | None = None
    head_precision: str = "same"

    def __post_init__(self) -> None:
        if self.head_precision not in fp8_head.PRECISIONS:
            raise ConfigError(f"head_precision must be {' or '.join(fp8_head.PRECISIONS)}, got {self.head_precision!r}")


class DFlashDrafter(nn.Module):
    """The drafter.

    Args:
        config: shape of the stack.
        target_layer_ids: N layer ids; id l is the output of target layer l.
        block_size: S. max_anchors: A of a training step.
        mask_token_id: the token in slots 1..S-1; must lie inside the embedding.
        running: fields of `Running`; each is an attribute that may be set later, too.

    Raises: ConfigError for a block size below 2, no anchors, no layer ids, a mask token outside the vocabulary, or an
        unknown head_precision.
    """

    def __init__(
        self,
        config: DrafterConfig,
        target_layer_ids: list[int],
        block_size: int = 32,
        max_anchors: int = 1024,
        mask_token_id: int = 248070,
        **running: Any,
    ):
        super().__init__()
        if block_size < 2:
            raise ConfigError(f"block_size must be at least 2 (slot 0 is the anchor itself), got {block_size}")
        if config.has_convolution and config.conv_kernel_size > block_size:
            raise ConfigError(
                f"conv_kernel_size {config.conv_kernel_size} is more than the {block_size} slots of a block; use at most "
                f"{block_size}"
            )
        if max_anchors < 1:
            raise ConfigError(f"max_anchors must be at least 1, got {max_anchors}")
        if not target_layer_ids or min(target_layer_ids) < 0 or len(set(target_layer_ids)) != len(target_layer_ids):
            raise ConfigError(f"target_layer_ids must be distinct layer ids >= 0, got {list(target_layer_ids)}")
        if not 0 <= mask_token_id < config.vocab_size:
            raise ConfigError(f"mask_token_id {mask_token_id} lies outside the vocabulary of {config.vocab_size}")
        for name, value in vars(Running(**running)).items():
            setattr(self, name, value)
        self.config = config
        self.target_layer_ids = list(target_layer_ids)
        self.block_size = block_size
        self.max_anchors = max_anchors
        self.mask_token_id = mask_token_id
        self.anchor_generator = torch.Generator().manual_seed(0)

        h = config.hidden_size
        self.fc = nn.Linear(len(self.target_layer_ids) * h, h, bias=False)
        self.hidden_norm = RMSNorm(h, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, block_size) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(h, config.rms_norm_eps)
        if config.has_selector:
            self.candidate_selector = CandidateSelector(config)
        # The target's own tables, frozen and shared: buffers, so that no optimizer and no checkpoint takes them.
        draft_vocab = config.draft_vocab_size or config.vocab_size
        self.register_buffer("embed_tokens", torch.zeros(0, h), persistent=False)
        self.register_buffer("lm_head", torch.zeros(0, h), persistent=False)
        # The head in float8 and its scales, both as integers: `.to(dtype)` on a module casts whatever floats.
        self.register_buffer("head_codes", torch.zeros(0, h, dtype=torch.uint8), persistent=False)
        self.register_buffer("head_scale_bits", torch.zeros(0, dtype=torch.int32), persistent=False)
        self.register_buffer("head_columns", torch.zeros(0, dtype=torch.int64), persistent=False)
        self.register_buffer("draft_token_ids", torch.arange(draft_vocab), persistent=False)  # [Vd] -> target id
        self.register_buffer("draft_index", torch.arange(config.vocab_size), persistent=False)  # [V] -> row, or -1
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal initialisation of every matrix, ones in every norm. The parts of DFlash 2 start as the identity, and draw
        from the generator after all else: the same seed gives the same plain drafter."""
        parts = [m for m in self.modules() if isinstance(m, LocalConvolution | CandidateSelector)]
        own = {id(parameter) for part in parts for parameter in part.parameters()}
        for parameter in self.parameters():
            if id(parameter) in own:
                continue
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.config.initializer_range)
            else:
                nn.init.ones_(parameter)
        for part in parts:
            part.reset_parameters()

    def load_target_head(self, embed_tokens: Tensor, lm_head: Tensor, draft_token_ids: Tensor | None = None) -> None:
        """Share the target's embedding [V, H] and head [V, H]; with a draft vocabulary, keep only its head rows.

        Args:
            draft_token_ids: [Vd] distinct target ids that the drafter may propose; None means all.

        Raises: ConfigError when a shape differs from the drafter's config, or the head is to be quantized where float8
            products cannot run.
        """
        v, h = self.config.vocab_size, self.config.hidden_size
        for name, table in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            if tuple(table.shape[1:]) != (h,) or table.shape[0] < v:
                raise ConfigError(
                    f"the target's {name} is {list(table.shape)}, the drafter wants [{v}, {h}]; derive the drafter's "
                    "config from this target with create_drafter_config(target_config)"
                )
        device, dtype = self.fc.weight.device, self.fc.weight.dtype
        self.embed_tokens = embed_tokens.detach().to(device=device, dtype=dtype)
        head = lm_head.detach()[:v]
        if draft_token_ids is not None:
            ids = draft_token_ids.to(torch.int64).cpu()
            wanted = self.config.draft_vocab_size
            if ids.numel() != wanted or ids.unique().numel() != wanted or ids.min() < 0 or ids.max() >= v:
                raise ConfigError(
                    f"draft_token_ids must be {wanted} distinct ids below {v} (draft_vocab_size), got {ids.numel()}"
                )
            head = head[ids.to(head.device)]
            self.draft_token_ids = ids.to(device)
            index = torch.full((v,), -1, dtype=torch.int64)
            index[ids] = torch.arange(wanted)
            self.draft_index = index.to(device)
        elif self.config.draft_vocab_size not in (None, v):
            raise ConfigError(f"draft_vocab_size is {self.config.draft_vocab_size}, so draft_token_ids is needed")
        self.lm_head = head.to(device=device, dtype=dtype)
        if self.head_precision == "fp8":
            quantized = fp8_head.Fp8Head.of(self.lm_head)
            self.head_codes = quantized.codes.view(torch.uint8)
            self.head_scale_bits = quantized.scales.view(torch.int32)
            self.head_columns = quantized.columns

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Weights that turn states into states: every matrix but the selector's tables of tokens."""
        return [p for name, p in self.named_parameters() if p.dim() == 2 and not name.endswith("codebook")]

    @property
    def head_fp8(self) -> fp8_head.Fp8Head | None:
        """The quantized head, or None with head_precision "same"."""
        if self.head_precision == "same":
            return None
        codes, scales = self.head_codes.view(fp8_head.E4M3), self.head_scale_bits.view(torch.float32)
        return fp8_head.Fp8Head(codes, scales, self.head_columns, self.lm_head.shape[0])

    # -- the forward ----------------------------------------------------------------------------------------------

    def draft(
        self,
        blocks: Blocks,
        context: PackContext | DraftContext | RowContext,
        mask: PackMask | DocumentMask | RowMask,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Final-normed states of the slots of some blocks, [A, S, H]; serves training, decoding and acceptance.

        Args:
            mask: who sees whom. rows: [R] distinct indices of the A * S slots; only their states are wanted, [R, H].
        """
        if rows is not None and self._fused():
            return fast_path.draft_rows(self, blocks, context, mask, rows)
        x = F.embedding(blocks.slot_tokens(self.block_size, self.mask_token_id), self.embed_tokens)  # [Q, H]
        rotary = self._rotary(blocks.slot_positions(self.block_size))
        cached = not isinstance(context, PackContext)
        if cached:  # a batch entry for each block
            x = x.unflatten(0, (-1, self.block_size))  # [A, S, H]
            rotary = tuple(table.unflatten(0, (-1, 1, self.block_size)) for table in rotary)
            seen = context.layers
        else:  # the blocks of one row; the layers make the context's keys and values
            x, features = x[None], self.hidden_norm(self.fc(context.features.to(self.fc.weight.dtype)))  # [1, T, H]
            seen = [(features, self._rotary(context.positions))] * len(self.layers)
        for layer, window, own in zip(self.layers, self.windows, seen, strict=True):
            x = layer(x, own, rotary, mask.attend(window), cached)
        hidden = self.norm(x).view(-1, x.shape[-1])  # [Q, H]
        return hidden.unflatten(0, (-1, self.block_size)) if rows is None else hidden.index_select(0, rows)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window."""
        return self.config.sliding_window or (None,) * len(self.layers)

    def _fused(self) -> bool:
        """Whether training goes over the Triton kernels."""
        return fast_path.applies(self) if self.fast_path is None else self.fast_path

    # -- training -------------------------------------------------------------------------------------------------

    def forward(
        self,
        all_hidden_states: Tensor,
        verifier_last_hidden: Tensor | None,
        input_ids: Tensor,
        loss_mask: Tensor,
        lengths: Tensor,
        position_ids: Tensor,
        anchors: AnchorSet | None = None,
        **objective: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one pack.

        Args:
            all_hidden_states: [1, T, N*H], outputs of the captured target layers, concatenated on the last axis.
            verifier_last_hidden: [1, T, H], after the target's final norm, so that the head gives its logits;
                None with hard labels, which do not read it.
            input_ids: [1, T] int64. loss_mask: [1, T] bool. position_ids: [1, T] int64, restarting per document.
            lengths: [documents] int64 on CPU or the pack's device, summing to at most T.
            anchors: where blocks start; None draws them from `anchor_generator`.
            objective: fields of `Objective`, such as `use_soft_labels` and `gamma`.

        Returns: the loss (scalar float32; exactly 0 with no supervised slot) and a dict of sums, see
        `losses.block_metrics`, with `loss`, `weight` and `supervised_slots`.

        Raises: ValueError naming the argument, the shape got and the shape wanted.
        """
        wanted = Objective(**objective)
        if verifier_last_hidden is None and wanted.use_soft_labels:
            raise ValueError("verifier_last_hidden is None, and soft labels are made of it; capture it, or use hard labels")
        self._check(all_hidden_states, verifier_last_hidden, input_ids, loss_mask, lengths, position_ids)
        if anchors is None:
            anchors = sample_anchors(
                loss_mask[0].cpu(), lengths.cpu(), self.block_size, self.max_anchors, self.anchor_generator
            )
        _check_anchors(anchors, input_ids.shape[1])
        plan = self.plan(input_ids[0], loss_mask[0], lengths, position_ids[0], anchors)
        return self.planned_loss(all_hidden_states, verifier_last_hidden, plan.to(all_hidden_states.device), wanted)

    def plan(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        lengths: Tensor,
        position_ids: Tensor,
        anchors: AnchorSet,
        padded: bool = False,
    ) -> PackPlan:
        """What is known of a pack's pass before it; ids, mask and positions [T]. `padded`: see `head_plan`."""
        lengths, anchors = lengths.cpu(), anchors.to("cpu")
        rows = HeadPlan.make(anchors, loss_mask.cpu(), lengths, self.block_size, padded)
        spans = teacher_spans(rows.teacher_row, self._chunk_rows())
        return PackPlan(input_ids, position_ids, document_ids(lengths, len(input_ids)), anchors, rows, spans)

    def planned_loss(
        self, all_hidden_states: Tensor, verifier_last_hidden: Tensor | None, plan: PackPlan, wanted: Objective
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`forward` of a plan on the features' device. Nothing in it waits for the device."""
        inputs = self._inputs(all_hidden_states, plan.input_ids, plan.position_ids, plan.anchors, plan.documents)
        hidden = self.draft(*inputs, plan.rows.query)  # [R, H]
        how = HeadPass(
            chunk_rows=self._chunk_rows(),
            teacher_spans=plan.spans,
            fused=self._fused(),
            head_fp8=self.head_fp8,
            top_k=self.config.selector_top_k if self.config.has_selector else 0,
        )
        last = None if verifier_last_hidden is None else verifier_last_hidden[0]
        return pack_loss(self, hidden, last, plan.input_ids, plan.rows, wanted, how)

    def _chunk_rows(self) -> int:
        return self.loss_chunk_rows or (fast_path.CHUNK_ROWS if self._fused() else DEFAULT_CHUNK_ROWS)

    def pack_inputs(
        self, all_hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor, anchors: AnchorSet, lengths: Tensor
    ) -> tuple[Blocks, PackContext, PackMask]:
        """`draft`'s arguments for the blocks of a training pack; input_ids and position_ids [T]."""
        device = all_hidden_states.device
        documents = document_ids(to_device(lengths, device), input_ids.shape[0])
        return self._inputs(all_hidden_states, input_ids, position_ids, anchors.to(device), documents)

    def _inputs(
        self, features: Tensor, input_ids: Tensor, position_ids: Tensor, anchors: AnchorSet, documents: Tensor
    ) -> tuple[Blocks, PackContext, PackMask]:
        backend = self.attention_backend or default_backend(features.device)
        return (
            Blocks(input_ids[anchors.positions], position_ids[anchors.positions]),
            PackContext(features, position_ids),
            PackMask(anchors, documents, self.block_size, backend, self.max_dense_bytes),
        )

    def _rotary(self, positions: Tensor) -> Rotary:
        return rotary_tables(positions, self.config.head_dim, self.config.rope_theta)

    def _check(self, all_hidden_states, verifier_last_hidden, input_ids, loss_mask, lengths, position_ids) -> None:
        """Refuse wrong shapes before anything is computed."""
        n, h = len(self.target_layer_ids), self.config.hidden_size
        if all_hidden_states.dim() == 4:
            shape = list(all_hidden_states.shape)
            raise ValueError(
                f"all_hidden_states has shape {shape}, wanted [1, T, {n * h}]: the {n} captured layers must be "
                "concatenated on the feature axis, not stacked. Use torch.cat([layer_1, layer_2, ...], dim=-1) with "
                "each layer [1, T, H], or x.flatten(2) if the stack is [1, T, N, H]"
            )
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}, wanted [1, T]")
        total = input_ids.shape[1]
        for name, value, wanted in (
            ("all_hidden_states", all_hidden_states, [1, total, n * h]),
            ("verifier_last_hidden", verifier_last_hidden, [1, total, h]),
            ("loss_mask", loss_mask, [1, total]),
            ("position_ids", position_ids, [1, total]),
        ):
            if value is not None and list(value.shape) != wanted:
                raise ValueError(
                    f"{name} has shape {list(value.shape)}, wanted {wanted} (T is {total} by input_ids, {n} captured "
                    f"layers of {h} features)"
                )
        if loss_mask.dtype != torch.bool:
            raise ValueError(f"loss_mask has dtype {loss_mask.dtype}, wanted torch.bool")
        if lengths.dim() != 1 or lengths.numel() == 0:
            raise ValueError(f"lengths has shape {list(lengths.shape)}, wanted [num_documents], at least one document")
        if lengths.device.type == "cpu" and (int(lengths.sum()) > total or int(lengths.min()) < 1):
            raise ValueError(
                f"lengths {lengths.tolist()} must be positive and sum to at most T = {total}, got {int(lengths.sum())}"
            )
        if self.lm_head.shape[0] == 0:
            raise ConfigError("the drafter has no head yet; call load_target_head(embed_tokens, lm_head) first")

    # -- decoding -------------------------------------------------------------------------------------------------

    def new_context(self) -> DraftContext:
        """An empty context for one sequence."""
        c = self.config
        empty = torch.zeros(
            1, c.num_key_value_heads, 0, c.head_dim, device=self.fc.weight.device, dtype=self.fc.weight.dtype
        )
        return DraftContext([(empty, empty) for _ in self.layers])

    @torch.no_grad()
    def extend(self, context: DraftContext, features: Tensor) -> None:
        """Append the features [1, n, N*H] of n verified tokens that follow the context."""
        positions = torch.arange(context.length, context.length + features.shape[1], device=features.device)
        for i, (k, v) in enumerate(self.context_keys_values(features, positions[None])):
            context.layers[i] = (torch.cat([context.layers[i][0], k], 2), torch.cat([context.layers[i][1], v], 2))
        context.length += features.shape[1]

    def context_keys_values(self, features: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V, each [R, Nkv, n, D], of context features [R, n, N*H] at positions [R, n], layer by layer."""
        x = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        rotary = tuple(table.unflatten(0, (-1, 1, positions.shape[1])) for table in self._rotary(positions.flatten()))
        for layer in self.layers:
            yield layer.self_attn.keys_values(x, rotary)

    @torch.no_grad()
    def propose(self, context: DraftContext, anchor_token: int) -> Tensor | Candidates:
        """What is drafted for slots 1..S-1 of the block whose anchor follows the context, see `proposal`."""
        at = torch.tensor([context.length])
        device = self.fc.weight.device
        blocks = Blocks(torch.tensor([anchor_token], device=device), at.to(device))
        hidden = self.draft(blocks, context, DocumentMask(at, self.block_size))
        return self.proposal(hidden[0, 1:], anchor_token)

    @torch.no_grad()
    def proposal(self, hidden: Tensor, anchor_token: int) -> Tensor | Candidates:
        """From the states [n, H] of a block's slots 1..n: the draft logits [n, Vd], or with a selector its `Candidates`."""
        logits = hidden @ self.lm_head.T
        if not self.config.has_selector:
            return logits
        unary, ids = top_of_rows(logits, self.config.selector_top_k)
        selector = self.candidate_selector
        return Candidates(self.draft_token_ids[ids], unary, logits, anchor_token, hidden, selector, self.embed_tokens)


def _check_anchors(anchors: AnchorSet, total: int) -> None:
    """Refuse anchors outside the pack. Those on a GPU are not read: it would hold up the host."""
    places, valid = anchors.positions, anchors.valid
    if places.dim() != 1 or places.shape != valid.shape or places.numel() == 0:
        raise ValueError(
            f"anchors have positions {list(places.shape)} and valid {list(valid.shape)}, wanted [A] each, at "
            "least one (an invalid one where there is nothing to train)"
        )
    if places.device.type == "cpu" and (int(places.min()) < 0 or int(places.max()) >= total):
        raise ValueError(
            f"anchors lie at {int(places.min())} to {int(places.max())}, wanted 0 to {total - 1} (T is {total})"
        )
