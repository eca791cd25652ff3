"""Settings that a run's devices or its drafter's shape cannot serve, refused by config files alone: before the data is
read and before any weight is."""

from __future__ import annotations

from pathlib import Path

from dflash.devices import compute_dtype
from dflash.drafter import fp8_head
from dflash.drafter.attention import refuse_backend
from dflash.drafter.config import DrafterConfig, create_drafter_config
from dflash.drafter.export import drafter_layout
from dflash.errors import ConfigError
from dflash.target.loading import load_config, resolve_source
from dflash.train.settings import RunConfig
from dflash.train.topology import Topology


def refuse_run(config: RunConfig, topology: Topology) -> None:
    """Raises ConfigError, with the setting to change, for a head precision or an attention that cannot run here, or a
    cache folder that cannot be written.

    Looks at nothing where neither is asked for; a target that is not there is a TargetError.
    """
    if config.train.cache_dir is not None:
        try:
            Path(config.train.cache_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cache_dir {config.train.cache_dir} cannot be made ({error.strerror}); name a folder that "
                "can be written, or leave it empty to keep features in memory"
            ) from None
    options = config.drafter
    if options.head_precision == "fp8" or options.attention in ("triton", "flex"):
        shape = drafter_shape(config)
        for device in topology.drafters:
            if options.head_precision == "fp8":
                fp8_head.refuse(device, compute_dtype(config.train.dtype, device), shape.hidden_size)
            if options.attention == "flex" and device.type == "cpu":
                raise ConfigError(
                    "attention='flex' has no backward on a CPU, so it cannot train there; use "
                    "attention='auto' or 'sdpa_chunked', or a GPU for drafters (gpus)"
                )
            refuse_backend(
                options.attention,
                device,
                shape.num_attention_heads,
                shape.num_key_value_heads,
                shape.head_dim,
                options.block_size,
            )


def drafter_shape(config: RunConfig) -> DrafterConfig:
    """The shape that the run's drafter will have: the target's, or that of the drafter it starts from."""
    if config.drafter.start_from is not None:
        return DrafterConfig.from_dict(drafter_layout(config.drafter.start_from)["config"])
    return create_drafter_config(load_config(resolve_source(config.target.target)), config.drafter.drafter_layers)
