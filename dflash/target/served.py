"""A target that a vLLM server runs: features by request, head, embedding and final norm from its folder's files.

Every document is a request of its own, several in flight; nothing else of the target is in this process. What a server says
of itself and what it gives are checked at the start and with every answer (`check`, `_refuse`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import safe_open
from torch import Tensor

from dflash.drafter.warm_start import WarmStartError
from dflash.errors import RunError, ServerLostError, TargetError
from dflash.target.capture import Features, Target, document_sizes, load_target
from dflash.target.choices import validate_layer_ids
from dflash.target.head import find_embedding_weights, find_final_norm
from dflash.target.hosting import ServerOptions, hidden_state_flags, serve_line, start, states_given
from dflash.target.loading import Source, declared_end_ids, load_config, load_tokenizer
from dflash.target.server import Server, healthy, last_lines

_IN_FLIGHT = 8  # requests
_SMALL = 2**30  # bytes of weights that transformers loads too, for a comparison and for a warm start
_PATIENCE = 60.0  # seconds between an answer and its file, from a server that is well
_TOLERANCE = {torch.float32: 1e-4}  # of features, relative to their norm; other dtypes: 0.1
_HEAD_TOLERANCE = {torch.float32: 1e-2}  # of log-probabilities; other dtypes: 0.5
_TEXT = "A server's tokenizer, 12,345 times?\n  naïve “quotes” — 你好 🙂 <|im_start|>user"


class ServedTarget:
    """Stands where a `Target` stands, for everything but decoding.

    Args:
        url: of the server. layer_ids: captured layers. dtype: of what is read from the folder, and of features.
        server: where it is this process's, and `close` stops it; states: its folder of files. log: the server's output.
    """

    is_hybrid = False
    device = torch.device("cpu")

    def __init__(
        self,
        source: Source,
        url: str,
        layer_ids: Sequence[int],
        dtype: torch.dtype,
        server: Server | None = None,
        states: Path | None = None,
        log: Path | None = None,
    ):
        self.source, self.folder, self.url, self.server, self.log = source.name, Path(source.location), url, server, log
        self.stop = weakref.finalize(self, _stop, server, states)  # at the latest when this process ends
        self.config = load_config(source)
        self.tokenizer = load_tokenizer(source, self.config)
        self.end_ids = declared_end_ids(source, self.config, self.tokenizer)
        self.num_layers = self.config.num_hidden_layers
        self.layer_ids = validate_layer_ids(layer_ids, self.num_layers)
        self.given = states_given(self.layer_ids, self.num_layers)
        self._columns = [self.given.index(layer) for layer in self.layer_ids]
        embed, head = find_embedding_weights(self.folder)
        self.embed_weight = embed.to(dtype)
        self.head_weight = self.embed_weight if head is embed else head.to(dtype)
        self._norm, self._eps = find_final_norm(self.folder).float(), getattr(self.config, "rms_norm_eps", 1e-6)
        self._client = httpx.Client(base_url=url, timeout=httpx.Timeout(None, connect=10.0))  # a slow server is waited for
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="states")
        self._model = str(self.folder)
        self.found = ""  # what `check` found

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def hidden_size(self) -> int:
        return self.embed_weight.shape[1]

    @property
    def decoder(self) -> torch.nn.Module:
        """The target's layers, for a warm start: read for as long as somebody looks at them. Raises WarmStartError."""
        try:
            return self._in_process(self.dtype).decoder
        except TargetError as error:
            raise WarmStartError(f"a server runs the target, and its layers are not read here: {error}") from None

    def describe(self) -> str:
        return f"{self.source}: vLLM at {self.url}, {self.num_layers} layers; {self.found}; captured layers " + ", ".join(
            map(str, self.layer_ids)
        )

    def fingerprint(self) -> str:
        """Hash of what decides the features: config, sizes and samples of the weights, layer ids and dtype."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        digest.update(repr(("vllm", self.layer_ids, str(self.dtype))).encode())
        for file in sorted(self.folder.glob("*.safetensors")):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with open(file, "rb") as reader:
                for part in range(64):
                    reader.seek(size * part // 64)
                    digest.update(reader.read(64))
        return digest.hexdigest()[:16]

    def close(self) -> None:
        """Stop the server where it is ours, and drop the connections to it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        self.stop()

    # -- capture -----------------------------------------------------------------------------------------------------

    def capture(
        self, input_ids: Tensor, lengths: Tensor | None = None, position_ids: Tensor | None = None, last_hidden: bool = True
    ) -> Features:
        """As `Target.capture`. Raises ServerLostError where the server is gone, TargetError for what else it may give."""
        sizes = document_sizes(input_ids, lengths, position_ids)
        ids, starts = input_ids[0].tolist(), [0, *accumulate(sizes)]
        features = torch.zeros(1, len(ids), len(self.layer_ids) * self.hidden_size, dtype=self.dtype)
        last = features.new_zeros(1, len(ids), self.hidden_size) if last_hidden else None
        rows = [ids[first : first + size] for first, size in zip(starts, sizes, strict=False)]
        for first, states in zip(starts, self._pool.map(lambda row: self._states(row)[0], rows), strict=False):
            here = slice(first, first + len(states))
            features[0, here] = states[:, self._columns].flatten(1)
            if last is not None:
                last[0, here] = self._normed(states[:, -1]).to(self.dtype)
        return Features(features, last)

    def _normed(self, states: Tensor) -> Tensor:
        """After the final norm [n, H], in float32."""
        states = states.float()
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self._eps) * self._norm

    def _states(self, ids: list[int], **more: Any) -> tuple[Tensor, dict]:
        """Outputs of the `given` layers for one document, [n, layers, H]; and the server's answer."""
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, **more}
        reply = self._call("POST", "/v1/completions", body)
        path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if path is None:
            raise self._wrong("gives no hidden states with its answers", "layers", "connector")
        file = Path(path)
        self._wait_for(file)
        with safe_open(file, "pt") as reader:
            about = json.loads((reader.metadata() or {}).get("dflash", "null"))
            states, tokens = (reader.get_tensor(name) for name in ("hidden_states", "token_ids"))
        file.unlink()
        self._refuse(about, states, tokens.tolist(), ids)
        return states, reply

    def _call(self, method: str, path: str, body: dict | None = None) -> dict:
        try:
            reply = self._client.request(method, path, json=body)
            if reply.status_code < 400:
                return reply.json()
            said = f"HTTP {reply.status_code}: {reply.text[:300]}"
        except (httpx.HTTPError, ValueError, RuntimeError) as error:  # a closed client, too
            raise self._lost(f"{type(error).__name__}: {error}") from None
        if reply.status_code >= 500:
            raise self._lost(said)
        raise TargetError(f"the server at {self.url} refused a request of target '{self.source}' with {said}")

    def _wait_for(self, file: Path) -> None:
        """Until the server has written the file that it named."""
        failed, began, pause = Path(f"{file}.failed"), time.monotonic(), 0.001
        while not file.exists():
            if failed.exists():
                said = failed.read_text()
                failed.unlink()
                raise TargetError(f"the server of target '{self.source}' could not write hidden states to {file}: {said}")
            waited = time.monotonic() - began
            if waited > 1.0 and not (self.server.running if self.server else healthy(self.url)):
                raise self._lost("it ended before it wrote an answer's states")
            if waited > _PATIENCE and healthy(self.url):
                raise TargetError(
                    f"the server of target '{self.source}' names {file}, and no such file appears here; start it with a "
                    "shared_storage_path (in --kv-transfer-config) that this machine sees too"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _lost(self, why: str) -> ServerLostError:
        told = self.log is not None and self.log.exists()
        lines = f"\nits last lines:\n{last_lines(self.log)}" if told else "; its output is where it was started"
        return ServerLostError(f"the server of target '{self.source}' at {self.url} is gone ({why}){lines}")

    # -- what is refused ---------------------------------------------------------------------------------------------

    def _refuse(self, about: dict | None, states: Tensor, tokens: list[int], ids: list[int]) -> None:
        """Raises TargetError for states that cannot be those of `ids`, and names the flag that mends it."""
        if about is None:
            raise self._wrong("uses another hidden-states connector", "connector")
        if about["layer_ids"] != self.given:
            said = f"gives the outputs of layers {about['layer_ids']}, and this run needs {self.given}"
            raise self._wrong(said, "layers")
        if about["prefix_caching"]:
            raise self._wrong("caches prefixes: it computes no states for positions it has seen before", "prefix_caching")
        if about["chunked_prefill"]:
            raise self._wrong("prefills in chunks, so that states depend on what else is asked", "chunked_prefill")
        if tokens != ids:
            raise TargetError(f"the server at {self.url} gave states of other tokens than it got: rows would be shifted")
        if states.shape[0] != len(ids):
            said = f"gave {states.shape[0]} rows of states for {len(ids)} tokens"
            raise self._wrong(said, "prefix_caching", "chunked_prefill")
        if tuple(states.shape[1:]) != (len(self.given), self.hidden_size):
            raise self._wrong_model(f"states of {list(states.shape[1:])}, wanted [{len(self.given)}, {self.hidden_size}]")

    def _wrong(self, what: str, *flags: str) -> TargetError:
        known = hidden_state_flags(self.given, "/dev/shm/dflash-states")
        named = " ".join(word if word.startswith("--") else f"'{word}'" for flag in flags for word in known[flag])
        return TargetError(
            f"the server at {self.url} {what}; start it with {named}. The whole line: {serve_line(self.folder, self.given)}"
        )

    def _wrong_model(self, what: str) -> TargetError:
        return TargetError(
            f"the server at {self.url} serves another model than {self.folder}: {what}. Name the folder of its own model, "
            f"or start it with this one: {serve_line(self.folder, self.given)}"
        )

    # -- the check at the start --------------------------------------------------------------------------------------

    def check(self, longest: int, compare: bool = True) -> None:
        """Ask the server who it is, and whether its features are the folder's model's. Raises TargetError.

        Args:
            longest: tokens of the longest document. compare: run the model here too, where it is small enough.
        """
        self._check_identity(longest)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, min(self.config.vocab_size, len(self.embed_weight)), (48,), generator=generator).tolist()
        states, reply = self._states(ids, logprobs=20, return_tokens_as_token_ids=True)
        again = _relative(self._states(ids)[0], states)
        tolerance = _TOLERANCE.get(states.dtype, 0.1)
        if not again <= tolerance:
            raise TargetError(
                f"the server at {self.url} gave other features to the same row asked twice: {again:.2g} of their norm, "
                f"wanted {tolerance}; {serve_line(self.folder, self.given)} computes one row at a time"
            )
        self._check_head(states[-1, -1], reply["choices"][0]["logprobs"]["top_logprobs"][0])
        self.found = f"a row asked twice gives {'the same bits' if again == 0 else f'features {again:.1g} apart'}, "
        self.found += self._compared(ids, states, tolerance) if compare else "head as the server's"

    def _check_identity(self, longest: int) -> None:
        models = self._call("GET", "/v1/models").get("data") or [{"id": "no model"}]
        own = [m for m in models if self.folder.resolve() in (Path(str(m.get("root"))).resolve(), Path(m["id"]).resolve())]
        model = (own or models)[0]
        self._model = model["id"]
        most = model.get("max_model_len") or longest + 1
        if most <= longest:
            raise TargetError(
                f"the server at {self.url} takes {most - 1} tokens and one more, and a document may have {longest}; start "
                f"it with --max-model-len {longest + 1}"
            )
        try:
            asked = {"model": self._model, "prompt": _TEXT, "add_special_tokens": False}
            there = self._call("POST", "/tokenize", asked).get("tokens")
        except TargetError:  # a server without a tokenizer takes ids as they come
            return
        here = self.tokenizer.encode(_TEXT, add_special_tokens=False)
        if there != here:
            raise TargetError(
                f"the server at {self.url} has another tokenizer than {self.folder}: one makes {len(here)} tokens of a text "
                f"and the other {len(there)}; start it with --tokenizer {self.folder}, and with the model of that folder"
            )

    def _check_head(self, last: Tensor, told: dict[str, float]) -> None:
        """The folder's norm and head on the last layer's output [H] give the server's own log-probabilities.

        Some models scale by their norm's weight, others by one more than it; the server's numbers tell which.
        """
        wanted = {int(name.rpartition(":")[2]): value for name, value in told.items()}
        ids, values = list(wanted), torch.tensor(list(wanted.values()))
        cap = getattr(self.config, "final_logit_softcapping", None)
        found = []
        for norm in (self._norm, self._norm + 1):
            self._norm = norm
            logits = self._normed(last[None])[0] @ self.head_weight.float().T
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            found.append((float((logits.log_softmax(-1)[ids] - values).abs().max()), norm))
        difference, self._norm = min(found, key=lambda pair: pair[0])
        if not difference <= _HEAD_TOLERANCE.get(last.dtype, 0.5):
            raise self._wrong_model(
                f"its log-probabilities differ by {difference:.2g} from those of this folder's RMS norm and head"
            )

    def _compared(self, ids: list[int], states: Tensor, tolerance: float) -> str:
        """The features against transformers', where it can load the model."""
        try:
            plain = self._in_process(states.dtype)
        except TargetError as error:
            return f"not compared with transformers: {error}"
        own = plain.capture(torch.tensor([ids])).all_hidden_states[0]
        differ = _relative(states[:, self._columns].flatten(1), own)
        if not differ <= tolerance:
            raise self._wrong_model(f"its features are {differ:.2g} of their norm from transformers', wanted {tolerance}")
        return f"{differ:.1g} of its norm away from transformers"

    def _in_process(self, dtype: torch.dtype) -> Target:
        """The model as transformers loads it. Raises TargetError where it is large, or cannot be loaded."""
        size = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))
        if size > _SMALL:
            raise TargetError(f"its weights are {size / 2**30:.1f} GiB, and more than 1 GiB is not loaded twice")
        return load_target(self.folder, "cpu", dtype, self.layer_ids, self_test=False, fast=False)


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-12))


def _stop(server: Server | None, states: Path | None) -> None:
    if server is not None:
        server.stop(5.0)
    if states is not None:
        shutil.rmtree(states, ignore_errors=True)


def open_served(
    source: Source,
    layer_ids: Sequence[int],
    dtype: torch.dtype,
    options: ServerOptions,
    url: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ServedTarget:
    """The target of a `vllm` name, ready to capture: its server asked, or started first, and checked.

    Args:
        url: of a server that another process of this run has started and compared.
    """
    server = states = None
    address = url or source.server
    if not address:
        config = load_config(source)
        given = states_given(layer_ids, config.num_hidden_layers)
        needed = options.longest * len(given) * config.hidden_size * dtype.itemsize * (_IN_FLIGHT + 1)
        say(f"starting vLLM for {source.name}" + (f", its log is {options.log}" if options.log else ""))
        server, states = start(source.location, given, str(dtype).removeprefix("torch."), options, needed)
        address = server.url
    elif not healthy(address):
        raise RunError(f"no server answers at {address}/health; start it: {_line_of(source, layer_ids)}")
    try:
        target = ServedTarget(source, address, layer_ids, dtype, server, states, server.log if server else options.log)
        target.check(options.longest, compare=url is None)
    except BaseException:
        _stop(server, states)
        raise
    return target


def _line_of(source: Source, layer_ids: Sequence[int]) -> str:
    return serve_line(source.location, states_given(layer_ids, load_config(source).num_hidden_layers))
