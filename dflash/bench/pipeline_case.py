"""A made-up training job for the pipeline: a random target, a drafter for it, random packs, and an engine over devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dflash.bench.shapes import StepShape
from dflash.bench.workload import document_lengths, make_drafter
from dflash.data import Pack
from dflash.distributed.replicas import copy_target, make_replicas
from dflash.distributed.threads import PipelineEngine
from dflash.drafter.masks import document_ids
from dflash.target import fast_capture as fast_target
from dflash.target.capture import Target
from dflash.target.features import OnlineFeatures
from dflash.target.random_weights import SHAPES, random_config
from dflash.train.plan import Planner
from dflash.train.settings import RunConfig, TrainOptions
from dflash.train.step import Replica
from dflash.train.topology import Topology


@dataclass(frozen=True)
class Case:
    """Sizes of the job. `hybrid` builds the target of Qwen3.6's kind, otherwise a Llama of the drafter's sizes."""

    shape: StepShape
    target_layers: int = 4
    hybrid: bool = False
    soft_labels: bool = True
    dtype: torch.dtype = torch.bfloat16
    packs: int = 4
    packs_per_step: int = 1
    lr: float = 1e-3
    fast_capture: bool = True

    @property
    def options(self) -> TrainOptions:
        given = dict(packs_per_step=self.packs_per_step, lr=self.lr, soft_labels=self.soft_labels)
        return RunConfig.from_parameters("story", **given).train

    def captured(self) -> list[int]:
        """Evenly spread layer ids; the last layer is left out where there are enough."""
        last = self.target_layers - 2 if self.target_layers > self.shape.captured else self.target_layers - 1
        return sorted({round(i * last / max(1, self.shape.captured - 1)) for i in range(self.shape.captured)})


def make_target(case: Case, device: torch.device) -> Target:
    """A random target on its device; seeded, so that it is the same at every call."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(_target_config(case), dtype=case.dtype, attn_implementation="sdpa")
    target = Target(model.eval(), layer_ids=case.captured())
    if case.fast_capture:
        fast_target.attach(target)
    return target


def _target_config(case: Case):
    from transformers import LlamaConfig

    sizes = dict(num_hidden_layers=case.target_layers, tie_word_embeddings=True)
    if case.hybrid:
        config = random_config("random:qwen3.6-27b")
        own = {key: case.shape.sizes[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
        return type(config)(**SHAPES["qwen3.6-27b"] | own | sizes)
    special = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaConfig(
        **case.shape.sizes, **sizes, **special, max_position_embeddings=case.shape.tokens, initializer_range=0.05
    )


def make_packs(case: Case, seed: int = 0) -> list[Pack]:
    """Random packs without padding."""
    shape, packs = case.shape, []
    for number in range(case.packs):
        host = torch.Generator().manual_seed(1000 * seed + number)
        lengths = document_lengths(shape.tokens, shape.document, host)
        starts = torch.cumsum(lengths, 0) - lengths
        positions = torch.arange(shape.tokens) - starts[document_ids(lengths, shape.tokens)]
        packs.append(
            Pack(
                torch.randint(0, shape.vocab - 1, (shape.tokens,), generator=host),
                torch.rand(shape.tokens, generator=host) < shape.supervised,
                positions,
                lengths,
                number,
            )
        )
    return packs


def make_planner(case: Case) -> Planner:
    return Planner(make_packs(case), case.options, case.shape.block, case.shape.anchors)


def make_replica(case: Case, target: Target, device: torch.device) -> Replica:
    """A drafter for this target; drawn on the CPU where it is small, so that every device gets the same weights."""
    shape = replace(case.shape, captured=len(target.layer_ids))
    small = shape.config.parameter_count(shape.captured) < 50_000_000
    torch.manual_seed(1)
    drafter = make_drafter(
        shape, (target.embed_weight, target.head_weight), torch.device("cpu") if small else device, case.dtype
    )
    if small:
        drafter = drafter.to(device)
    return Replica(drafter, case.options)


def make_engine(
    case: Case,
    topology: Topology,
    steps: int,
    depth: int = 2,
    target: Target | None = None,
    replica: Replica | None = None,
    wrap=lambda source, worker: source,
) -> PipelineEngine:
    """The threaded engine of a case; `wrap(source, worker)` may put something around a target's source."""
    target = target or make_target(case, topology.targets[0][0])
    replica = replica or make_replica(case, target, topology.drafters[0])
    targets = [target, *(copy_target(target, devices[0]) for devices in topology.targets[1:])]
    sources = [wrap(OnlineFeatures(t), i) for i, t in enumerate(targets)]
    return PipelineEngine(
        make_replicas(replica, topology.drafters),
        sources,
        [d[0] for d in topology.targets],
        make_planner(case),
        steps,
        queue_depth=depth,
        paired=topology.paired,
    )


def target_flops(case: Case, target: Target) -> float:
    """Matrix-product FLOPs of one capture: two for each weight and token, attention scores and the embedding left out."""
    weights = sum(p.numel() for p in target.decoder.layers.parameters() if p.dim() > 1)
    return 2.0 * weights * case.shape.tokens
