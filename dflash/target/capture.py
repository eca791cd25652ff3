"""The frozen target: load it, and capture the features that a drafter is trained on.

Layer id `l` means the output of layer `l` (DESIGN.md section 4). transformers' `hidden_states[l + 1]` is the
same tensor for every layer but the last, where it is taken after the final norm; so layers are read with
forward hooks.

Documents of a pack never see each other here. They are not run as one row with a block mask but as a few
right-padded batches of documents of similar length: in a causal model nothing after a document's end can
change it, be the layers attention (which then needs no mask at all) or linear attention, whose recurrent and
convolution states a mask does not reset (transformers#46851).
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from dflash.devices import attention_without_plans, device_named, dtype_named, to_device
from dflash.errors import TargetError
from dflash.target.choices import choose_mask_token_id, default_layer_ids, validate_layer_ids, validate_mask_token_id
from dflash.target.loading import DEFAULT_TARGET, end_token_ids, load_config, load_model, load_tokenizer, resolve_source
from dflash.target.packed_attention import document_positions

__all__ = [
    "Features",
    "Target",
    "choose_mask_token_id",
    "default_layer_ids",
    "group_documents",
    "load_target",
    "validate_layer_ids",
    "validate_mask_token_id",
]

_SELF_TEST_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.1, torch.float16: 0.05}


class _Enough(Exception):
    """Every wanted layer has been captured; the rest of the forward pass need not run."""


@dataclass
class Features:
    """What the drafter sees of one pack: `all_hidden_states [1, T, N*H]` and `verifier_last_hidden [1, T, H]`, which is
    None where nobody asked for it (hard labels never read it)."""

    all_hidden_states: Tensor
    verifier_last_hidden: Tensor | None = None

    def to(self, *args, **kwargs) -> Features:
        return Features(*(tensor.to(*args, **kwargs) for tensor in self.tensors))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are there."""
        return tuple(t for t in (self.all_hidden_states, self.verifier_last_hidden) if t is not None)


class Target:
    """A frozen causal language model and the hooks that read it.

    Making one takes cuDNN out of `scaled_dot_product_attention` for the whole process (`devices.attention_without_plans`).

    Args:
        model: a transformers causal LM with a decoder that has `layers` and returns `last_hidden_state`.
        tokenizer: its tokenizer, or None for a random test model.
        layer_ids: captured layers; None takes `default_layer_ids`.
        source: the name it was loaded from, kept for messages and cache keys.
        max_batch_tokens: padded tokens in one forward; bounds memory, changes no result.
        note: added to `describe()`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer=None,
        layer_ids=None,
        source: str = "in memory",
        max_batch_tokens: int = 65536,
        note: str = "",
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.source, self.note = source, note
        self.fast = None  # a `fast_target.FastCapture`, once `fast_target.attach` has checked it
        self.why_plain: str | None = None  # what `attach` found against it
        self.max_batch_tokens = max_batch_tokens
        self.decoder = _text_decoder(model, source)
        self.config = model.config.get_text_config()
        self.num_layers = len(self.decoder.layers)
        self.layer_ids = validate_layer_ids(
            default_layer_ids(self.num_layers, min(5, self.num_layers)) if layer_ids is None else layer_ids, self.num_layers
        )
        # Hooks stay in place; each thread fills its own dict and only while it captures.
        self._captured = threading.local()
        self._hooks = [self.decoder.layers[index].register_forward_hook(self._make_hook(index)) for index in self.layer_ids]
        attention_without_plans()

    # -- what others read ------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def hidden_size(self) -> int:
        return self.embed_weight.shape[1]

    @property
    def embed_weight(self) -> Tensor:
        """Input embedding `[V, H]`."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """Output head `[V, H]`; the embedding itself where the two are tied."""
        head = self.model.get_output_embeddings()
        return self.embed_weight if head is None else head.weight

    def logits(self, states: Tensor) -> Tensor:
        """The target's logits of final-normed states, capped where the model caps them (Gemma 2)."""
        head = self.head_weight  # on another device than the states where the target is spread
        found = torch.nn.functional.linear(states.to(head.device), head)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return found if cap is None else cap * torch.tanh(found / cap)

    @property
    def is_hybrid(self) -> bool:
        """True when some layer keeps a recurrent state (linear attention, Mamba, short convolution)."""
        kinds = getattr(self.config, "layer_types", None) or []
        return any(kind not in ("full_attention", "sliding_attention", "chunked_attention") for kind in kinds)

    @property
    def end_ids(self) -> list[int]:
        """Every end-of-text id: the config's, the generation config's and the tokenizer's."""
        ids = end_token_ids(self.config) + end_token_ids(getattr(self.model, "generation_config", None))
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        return sorted(set(ids))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights as they are held, each tied tensor once."""
        return sum(weight.nbytes for weight in self.model.parameters())

    def describe(self) -> str:
        """One line for people: name, size, dtype, memory, captured layers."""
        count = sum(weight.numel() for weight in self.model.parameters())
        kind = f"{'hybrid' if self.is_hybrid else 'dense'} with {'fast' if self.fast else 'plain'} capture"
        kind += f" ({self.why_plain})" if self.why_plain else ""
        places = dict.fromkeys(str(weight.device) for weight in self.model.parameters())
        return (
            f"{self.source}: {type(self.model).__name__}, {kind}, {self.num_layers} layers, {count / 1e6:,.1f}M "
            f"weights, {self.memory_bytes / 1e6:,.0f} MB as {str(self.dtype).removeprefix('torch.')}{self.note} on "
            f"{', '.join(places)}; captured layers {', '.join(map(str, self.layer_ids))}"
        )

    def close(self) -> None:
        """Remove the hooks; the model is as it was before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def fingerprint(self) -> str:
        """Hash of what decides the features: config, a sample of every weight, layer ids and dtype."""
        digest = hashlib.sha256()
        settings = {
            key: value
            for key, value in self.config.to_dict().items()
            if key not in ("_name_or_path", "transformers_version", "quantization_config")
        }
        digest.update(repr((sorted(settings.items(), key=str), self.layer_ids, str(self.dtype))).encode())
        for name, weight in self.model.named_parameters():
            flat = weight.detach().reshape(-1)
            digest.update(f"{name}{tuple(weight.shape)}".encode())
            digest.update(flat[:: max(1, flat.numel() // 64)].float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    # -- capture ---------------------------------------------------------------------------------------------
    def _make_hook(self, index: int):
        def hook(module, args, output):
            store = getattr(self._captured, "store", None)
            if store is not None:
                store[index] = output[0] if isinstance(output, tuple) else output
                if index == getattr(self._captured, "stop_after", None):
                    raise _Enough

        return hook

    @torch.no_grad()
    def _run(self, input_ids: Tensor, last_hidden: bool = True) -> tuple[list[Tensor], Tensor | None]:
        """One plain forward of `[batch, length]` ids; the N layer outputs and the final-normed last state, or None and no
        layer past the last captured one."""
        store: dict[int, Tensor] = {}
        self._captured.store, self._captured.stop_after = store, None if last_hidden else max(self.layer_ids)
        last = None
        try:
            last = self.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        except _Enough:
            pass
        finally:
            self._captured.store = self._captured.stop_after = None
        for index, states in [*store.items(), *([("last", last)] if last_hidden else [])]:
            if states.shape[:2] != input_ids.shape:
                raise TargetError(
                    f"the target gave hidden states for {states.shape[1]} positions (layer {index}) "
                    f"and was given {input_ids.shape[1]} tokens; wanted one row per token, so that "
                    "labels cannot shift"
                )
        return [store[index] for index in self.layer_ids], last

    @torch.no_grad()
    def capture(
        self, input_ids: Tensor, lengths: Tensor | None = None, position_ids: Tensor | None = None, last_hidden: bool = True
    ) -> Features:
        """Features of one pack, each document on its own.

        Args:
            input_ids: `[1, T]`.
            lengths: `[num_documents]`, summing to at most T; None means one document of T tokens.
            position_ids: `[1, T]`, checked to restart at 0 in each document, as the target counts them.
            last_hidden: False leaves `verifier_last_hidden` out, and stops after the last captured layer; enough for hard
                labels.

        Returns:
            `Features`; rows of the padding tail are zero.
        """
        sizes, total = document_sizes(input_ids, lengths, position_ids), input_ids.shape[1]
        ids = to_device(input_ids, self.device)
        starts = [0, *accumulate(sizes)]
        width, hidden = len(self.layer_ids), self.hidden_size
        features = torch.zeros(1, total, width * hidden, dtype=self.dtype, device=self.device)
        last_states = features.new_zeros(1, total, hidden) if last_hidden else None
        if self.fast is not None and sizes:
            self.fast.run(ids[0], sizes, features[0], last_states[0] if last_hidden else None)
            return Features(features, last_states)
        for group in group_documents(sizes, self.max_batch_tokens):
            longest = max(sizes[index] for index in group)
            batch = ids.new_zeros(len(group), longest)
            for row, index in enumerate(group):
                batch[row, : sizes[index]] = ids[0, starts[index] : starts[index] + sizes[index]]
            layers, last = self._run(batch, last_hidden)
            for row, index in enumerate(group):
                here, size = slice(starts[index], starts[index] + sizes[index]), sizes[index]
                if last is not None:
                    last_states[0, here] = last[row, :size]
                for slot, states in enumerate(layers):
                    features[0, here, slot * hidden : (slot + 1) * hidden] = states[row, :size]
        return Features(features, last_states)

    # -- self-test -------------------------------------------------------------------------------------------
    @torch.no_grad()
    def self_test(self, length: int = 24, seed: int = 0) -> float:
        """Check that head(verifier_last_hidden) gives the target's own logits, also for a packed document.

        A final norm that is left out or applied twice, a head that is not the model's, a scale or soft cap
        after the head, and a state that leaks from one document into the next all stop here.

        Returns the largest logit difference over the logits' standard deviation; raises TargetError.
        """
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.embed_weight.shape[0], (1, length), generator=generator).to(self.device)
        split = length // 3
        features = self.capture(ids, torch.tensor([split, length - split]))
        own = torch.cat(
            [self.model(input_ids=part, use_cache=False).logits.float() for part in (ids[:, :split], ids[:, split:])], dim=1
        )
        ours = self.logits(features.verifier_last_hidden).float().to(own.device)
        if ours.shape != own.shape:
            raise TargetError(f"target self-test: the head gives {ours.shape[-1]} logits, the target {own.shape[-1]}")
        difference = float((ours - own).abs().max() / own.std().clamp_min(1e-6))
        if not difference <= _SELF_TEST_TOLERANCE.get(self.dtype, 0.1):  # also true for NaN
            raise TargetError(
                f"target self-test: lm_head(verifier_last_hidden) differs from the target's own logits "
                f"by {difference:.3g} standard deviations ({self.dtype}). The last hidden state must be taken once "
                "through the final norm, documents must not see each other, and the logits must be a plain "
                "linear head (no scale)"
            )
        return difference


def group_documents(sizes: list[int], max_tokens: int, slack: float = 0.75) -> list[list[int]]:
    """Indices of documents to run together: lengths within `slack` of the longest, `max_tokens` padded."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fits = groups and sizes[index] >= slack * longest and (len(groups[-1]) + 1) * longest <= max_tokens
        if fits:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = sizes[index]
    return groups


def document_sizes(input_ids: Tensor, lengths: Tensor | None, position_ids: Tensor | None) -> list[int]:
    """Lengths of the documents of a row [1, T]; see `Target.capture`. Raises TargetError."""
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise TargetError(f"input_ids has shape {tuple(input_ids.shape)}; wanted [1, T]")
    total = input_ids.shape[1]
    sizes = [total] if lengths is None else [int(size) for size in lengths.reshape(-1).tolist() if size]
    if min(sizes, default=1) < 0 or sum(sizes) > total:
        raise TargetError(f"lengths sum to {sum(sizes)}, but the pack has {total} tokens")
    _check_positions(position_ids, sizes, total)
    return sizes


def _check_positions(position_ids: Tensor | None, sizes: list[int], total: int) -> None:
    if position_ids is None:
        return
    if position_ids.shape[-1] != total:
        raise TargetError(f"position_ids has {position_ids.shape[-1]} entries, input_ids {total}")
    wanted = document_positions(sizes)
    got = position_ids.reshape(-1)[: len(wanted)].cpu()
    if not torch.equal(got, wanted):
        at = int((got != wanted).nonzero()[0])
        raise TargetError(
            f"position_ids[{at}] is {int(got[at])}; wanted {int(wanted[at])}, since positions restart at 0 in every document"
        )


def _text_decoder(model: nn.Module, source: str) -> nn.Module:
    """The inner stack of decoder layers, inside a multimodal model too."""
    candidates = [model.get_decoder() if hasattr(model, "get_decoder") else None]
    candidates += [getattr(model, "model", None), getattr(model, "base_model", None)]
    for found in candidates:
        found = getattr(found, "language_model", found)
        if found is not None and isinstance(getattr(found, "layers", None), nn.ModuleList):
            return found
    raise TargetError(
        f"target '{source}' ({type(model).__name__}) has no decoder with a list of `layers`; "
        "wanted a Llama- or Qwen-style causal language model"
    )


def load_target(
    name_or_path: str | Path = DEFAULT_TARGET,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    layer_ids=None,
    attention: str = "auto",
    self_test: bool = True,
    fast: bool = True,
) -> Target:
    """Load a target, check it on its device, and return it ready to capture.

    Args:
        name_or_path: "smollm2" (packaged SmolLM2-135M-Instruct), a model folder, a .gguf file, a hub id, or random
            weights of a shape, as "random:qwen3.6-27b".
        device: where it runs. `dtype`: None takes bfloat16 on a GPU and float32 on the CPU.
        layer_ids: captured layers, checked before any weight is read; None takes `default_layer_ids`.
        attention: transformers' name of an implementation; "auto" takes what the model supports.
        fast: let a dense target on a GPU, and a hybrid one with flash-linear-attention too, capture by `fast_target` where
            that gives the plain forward's features; `describe` says which way it captures.
    """
    device = device_named(device)
    if isinstance(dtype, str):
        dtype = dtype_named(dtype)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    source = resolve_source(name_or_path)
    config = load_config(source)
    if layer_ids is not None:
        validate_layer_ids(layer_ids, config.num_hidden_layers)
    tokenizer = load_tokenizer(source, config)
    try:
        model = load_model(source, dtype, attention, device)
    except TargetError as error:
        if source.server is None:
            raise
        raise TargetError(f"{error}. A server runs this target in training; to decode, it has to be loaded here") from error
    unused = getattr(model, "unused_weights", ())  # biases that this architecture has not, layers past the config's last
    left = f" ({len(unused)} weights of its files are not used, first {unused[0]})" if unused else ""
    target = Target(model, tokenizer, layer_ids, source.name, note=source.size_note + left)
    if self_test and not source.random:  # a random one is what this package made it
        target.self_test()
    if fast:
        from dflash.target import fast_capture as fast_target

        if fast_target.worthwhile(target):
            fast_target.attach(target)
    return target
