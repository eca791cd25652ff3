"""Where a pack's target features come from: captured at every request, or captured once and kept.

Several epochs over cached features cost one pass of the target. What is kept is bounded in bytes: packs that do
not fit are captured again each time (counted), so a long run neither fills the disk nor the memory.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.errors import ConfigError, ServerLostError, TargetError
from dflash.target.capture import Features, Target

if TYPE_CHECKING:
    from dflash.data import Pack

_SPARE = 0.15  # of a GPU's memory, which kept features leave to what else runs on it

Progress = Callable[[int, int, float], None]
"""Called as `progress(packs done, packs in all, tokens per second so far)`."""


class FeatureSource(Protocol):
    """Anything with `get(pack) -> Features` of shapes `[1, T, N*H]` and `[1, T, H]` (or None)."""

    def get(self, pack: Pack) -> Features: ...

    def close(self) -> None: ...


class OnlineFeatures:
    """Runs the target for every request; keeps nothing.

    `last_hidden` False is for hard labels: `verifier_last_hidden` is None, and no layer past the last captured one runs.
    """

    def __init__(
        self,
        target: Target,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        last_hidden: bool = True,
    ):
        self.target, self.dtype, self.device, self.last_hidden = target, dtype, device, last_hidden
        self._lock = threading.Lock()

    def get(self, pack: Pack) -> Features:
        with self._lock:  # one forward at a time: two would only share the same device and twice its memory
            features = self.target.capture(
                pack.input_ids.unsqueeze(0), pack.lengths, pack.position_ids, last_hidden=self.last_hidden
            )
        check_features(features, pack, self.target)
        device, dtype = self.device or self.target.device, self.dtype or self.target.dtype
        return features.to(device, dtype)

    def close(self) -> None:
        pass


class UntilLost:
    """A source for training steps that does not fail when a target's server is gone: its features are NaN from then on.

    A step over them changes no weight, on any engine and in any rank. Who drives the engine then finds `lost`, or what
    `tell` passed on, and ends the run with a checkpoint of the step before.
    """

    def __init__(self, source: FeatureSource, tell: Callable[[ServerLostError], None] = lambda error: None):
        self.source, self.tell = source, tell
        self.lost: ServerLostError | None = None
        self._like: list[tuple] | None = None

    def get(self, pack: Pack) -> Features:
        try:
            if self.lost is None:
                features = self.source.get(pack)
                self._like = [(t.shape, t.dtype, t.device) for t in features.tensors]
                return features
        except ServerLostError as error:
            if self._like is None:
                raise
            self.lost = error
            self.tell(error)
        return Features(*(torch.full(s, math.nan, dtype=kind, device=device) for s, kind, device in self._like))

    def close(self) -> None:
        self.source.close()


@dataclass
class CacheStats:
    """What a cache did: requests answered from it, captured anew, captured because the bound was reached."""

    hits: int = 0
    captured: int = 0
    not_kept: int = 0
    packs: int = 0
    bytes: int = 0

    def as_dict(self) -> dict:
        return asdict(self)


class CachedFeatures:
    """Keeps the features of each pack after its first capture.

    The key of an entry is a hash of the pack's token ids and document lengths, which hold everything that data,
    tokenizer, template and length decide, beside the target's fingerprint (config, weights, layer ids, dtype).

    Args:
        target: the target to capture with.
        max_bytes: bound on what is kept (memory or disk); the rest is captured at each request.
        directory: keep on disk, here; None keeps in memory.
        dtype: what is stored, bfloat16 by default (half the size of float32).
        keep_last_hidden: False when only hard labels are used: a sixth less to keep with 5 layers, and
            `verifier_last_hidden` is then None.
        device: where features are returned; None leaves them where they are kept.
        storage: where rows are kept in memory ("cpu", or the drafter's GPU where that has the room).
    """

    def __init__(
        self,
        target: Target,
        max_bytes: int,
        directory: str | Path | None = None,
        dtype: torch.dtype = torch.bfloat16,
        keep_last_hidden: bool = True,
        device: torch.device | str | None = None,
        storage: torch.device | str = "cpu",
    ):
        if max_bytes < 0:
            raise ConfigError(f"feature cache bound is {max_bytes} bytes; wanted 0 or more")
        self.target, self.max_bytes, self.dtype = target, max_bytes, dtype
        self.keep_last_hidden, self.device = keep_last_hidden, device
        self.stats = CacheStats()
        self.where = f"on {storage}" if directory is None else f"in {directory}"
        self._online = OnlineFeatures(target, dtype, "cpu" if directory is not None else storage, keep_last_hidden)
        self._lock = threading.Lock()
        self._memory: dict[str, Tensor] = {}
        self._folder: Path | None = None
        if directory is not None:
            kind = f"{target.fingerprint()}-{str(dtype).removeprefix('torch.')}{'' if keep_last_hidden else '-hard'}"
            self._folder = Path(directory).expanduser() / f"features-{kind}"
            self._folder.mkdir(parents=True, exist_ok=True)
            found = [file.stat().st_size for file in self._folder.glob("*.safetensors")]
            self.stats.packs, self.stats.bytes = len(found), sum(found)

    def bytes_needed(self, packs: Iterable[Pack]) -> int:
        """Bytes that keeping all of `packs` would take; padding is not kept."""
        width = (len(self.target.layer_ids) + self.keep_last_hidden) * self.target.hidden_size
        return sum(pack.num_tokens for pack in packs) * width * self.dtype.itemsize

    def prepare(self, packs: list[Pack], progress: Progress | None = None) -> CacheStats:
        """Capture every pack that is not kept yet, so that training starts without waiting."""
        start, tokens = time.perf_counter(), 0
        for number, pack in enumerate(packs, 1):
            if self._read(pack_key(pack)) is None:
                self._capture(pack, pack_key(pack))
                tokens += pack.num_tokens
            if progress:
                progress(number, len(packs), tokens / max(time.perf_counter() - start, 1e-9))
        return self.stats

    def get(self, pack: Pack) -> Features:
        key = pack_key(pack)
        rows = self._read(key)
        if rows is None:
            rows = self._capture(pack, key)
        else:
            self.stats.hits += 1
        return self._unpack(rows, pack)

    def close(self) -> None:
        """Drop what is held in memory; files on disk stay for the next run."""
        self._memory.clear()

    def _capture(self, pack: Pack, key: str) -> Tensor:
        features = self._online.get(pack)
        rows = torch.cat([part[0, : pack.num_tokens] for part in features.tensors], dim=-1)  # [tokens, (N+1)*H]
        self.stats.captured += 1
        with self._lock:
            fits = self.stats.bytes + rows.nbytes <= self.max_bytes and _has_room(rows.device)
            self.stats.not_kept += not fits
            if fits:
                self.stats.packs += 1
                self.stats.bytes += rows.nbytes
        if fits:
            self._write(key, rows)
        return rows

    def _write(self, key: str, rows: Tensor) -> None:
        if self._folder is None:
            self._memory[key] = rows
            return
        file = self._folder / f"{key}.safetensors"
        temporary = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        save_file({"rows": rows}, temporary)
        temporary.replace(file)  # a killed run leaves a .tmp, never half an entry

    def _read(self, key: str) -> Tensor | None:
        if self._folder is None:
            return self._memory.get(key)
        file = self._folder / f"{key}.safetensors"
        if not file.is_file():
            return None
        try:
            return load_file(file)["rows"]
        except (SafetensorError, OSError):  # damaged on disk: capture it again
            return None

    def _unpack(self, rows: Tensor, pack: Pack) -> Features:
        total, hidden = len(pack.input_ids), self.target.hidden_size
        width = len(self.target.layer_ids) * hidden
        if rows.shape[0] != pack.num_tokens or rows.shape[1] != width + self.keep_last_hidden * hidden:
            raise TargetError(
                f"cached features have shape {tuple(rows.shape)}; wanted "
                f"({pack.num_tokens}, {width + self.keep_last_hidden * hidden}) for pack "
                f"{pack.pack_id}: delete {self._folder or 'the cache'}"
            )
        rows = rows.to(self.device or rows.device)
        features = rows.new_zeros(1, total, width)
        features[0, : pack.num_tokens] = rows[:, :width]
        if not self.keep_last_hidden:
            return Features(features)
        last = rows.new_zeros(1, total, hidden)
        last[0, : pack.num_tokens] = rows[:, width:]
        return Features(features, last)


def _has_room(device: torch.device) -> bool:
    """Whether a GPU may keep more: other processes on it take memory, too."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free >= _SPARE * total


def check_features(features: Features, pack: Pack, target: Target) -> None:
    """Refuse features whose rows are not the pack's tokens: paired all the same, labels would be shifted."""
    total, hidden, width = len(pack.input_ids), target.hidden_size, len(target.layer_ids)
    for name, value, last in (
        ("all_hidden_states", features.all_hidden_states, width * hidden),
        ("verifier_last_hidden", features.verifier_last_hidden, hidden),
    ):
        if value is not None and tuple(value.shape) != (1, total, last):
            raise TargetError(
                f"{name} of pack {pack.pack_id} has shape {tuple(value.shape)}; the pack has {total} "
                f"tokens, so wanted (1, {total}, {last})"
            )


def pack_key(pack: Pack) -> str:
    """Hash of a pack's ids and document lengths."""
    digest = hashlib.sha256(pack.input_ids[: pack.num_tokens].numpy().tobytes())
    digest.update(pack.lengths.numpy().tobytes())
    return digest.hexdigest()[:32]


def make_source(
    target: Target,
    packs: list[Pack],
    mode: str = "auto",
    max_bytes: int = 4 * 2**30,
    directory: str | Path | None = None,
    room: int = 0,
    **options,
) -> FeatureSource:
    """ "offline" keeps features (within `max_bytes`), "online" never does, "auto" keeps them if all packs fit.

    `room`: bytes that `device` has to spare. Where all packs fit there, they are kept there, and none is copied again.
    """
    if mode not in ("auto", "offline", "online"):
        raise ConfigError(f"features is '{mode}'; wanted auto, offline or online")
    device = options.pop("device", None)
    if mode != "online":
        cached = CachedFeatures(target, max_bytes, directory, device=device, **options)
        need = cached.bytes_needed(packs)
        if directory is None and need <= room:
            return CachedFeatures(target, room, device=device, storage=device, **options)
        if mode == "offline" or need <= max_bytes:
            return cached
    return OnlineFeatures(target, options.get("dtype"), device, options.get("keep_last_hidden", True))
