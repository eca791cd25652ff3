"""A hidden-states connector for vLLM: a safetensors file a request, with `hidden_states` [tokens, layers, H], `token_ids`.

It is vLLM's own connector with two changes. It also runs on a CPU, and a file appears under its name whole, with what the
reader has to know of the server as its metadata. This module imports vLLM and runs in the server's environment.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Copied:
    """Stands for the CUDA event of a copy that has been made."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class DFlashHiddenStates(ExampleHiddenStatesConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.use_lock = False
        layers = vllm_config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        about = {
            "layer_ids": [layer - 1 for layer in layers],  # an id here means the output of that layer
            "prefix_caching": bool(vllm_config.cache_config.enable_prefix_caching),
            "chunked_prefill": bool(vllm_config.scheduler_config.enable_chunked_prefill),
            "quantization": vllm_config.model_config.quantization,
        }
        self._about = {"dflash": json.dumps(about)}

    def _submit_async_write(self, pending: Any) -> None:
        if self._kv_cache.is_cuda or not self._is_tp_rank_zero:
            super()._submit_async_write(pending)
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)[:, None]
        slots = (blocks * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids}
        future = self._executor.submit(self._write_tensors, tensors, _Copied(), pending.filename, None)
        self._req_copy_events[pending.req_id] = _Copied()
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda done, name=pending.req_id: self._on_write_done(name, done))

    def _write_tensors(self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        event.synchronize()
        part = f"{filename}.part"
        os.makedirs(os.path.dirname(filename), exist_ok=True)
        try:
            save_file(tensors, part, metadata=self._about)
            os.replace(part, filename)
        except Exception as error:
            if os.path.exists(part):
                os.remove(part)
            with open(f"{filename}.failed", "w") as file:
                file.write(f"{type(error).__name__}: {error}")
            raise
