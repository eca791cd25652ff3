"""Which device does what: read `gpus` as people and papermill write it, and decide who drafts and who feeds.

Defaults: no GPU means the CPU, one GPU is shared by target and drafter, of N GPUs the last three eighths (at least
one) draft and all others run the target. `gpus="cpu:3", target_gpus="cpu:5"` stands for three and five workers on the
CPU, so that a topology of many devices can be tried without any.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflash.errors import ConfigError
from dflash.runs.tables import Table

if TYPE_CHECKING:
    from dflash.train.settings import RuntimeOptions

CPU = torch.device("cpu")
MOST_CPU_WORKERS = 64
_CPU_WORKERS = re.compile(r"cpu(?::([0-9]+))?")
_INDEX = re.compile(r"(?:cuda:)?([0-9]+)")
FORMS = "'5,6,7', 5, [5, 6, 7], 'all', 'cpu', 'cpu:3' (three CPU workers), or nothing for the default"


@dataclass(frozen=True)
class Topology:
    """Who runs where. One drafter replica a device in `drafters`; one target over each tuple in `targets`.

    `shared`: some device runs a target and a drafter. `paired`: every drafter has a target of its own on its own
    device, so no features cross between devices. `reason`: how it came to this, one sentence.
    """

    drafters: tuple[torch.device, ...]
    targets: tuple[tuple[torch.device, ...], ...]
    shared: bool
    reason: str

    @property
    def paired(self) -> bool:
        return self.shared and self.targets == tuple((device,) for device in self.drafters)

    @property
    def serial(self) -> bool:
        """One target and one drafter on one device: nothing runs at the same time, so nothing needs a worker."""
        return self.paired and len(self.drafters) == 1

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device in use, once."""
        everyone = (*self.drafters, *(device for target in self.targets for device in target))
        return tuple(sorted(set(everyone), key=lambda d: (d.type, d.index or 0)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `resolved.yaml`."""
        targets = [[str(device) for device in target] for target in self.targets]
        return {"drafters": [*map(str, self.drafters)], "targets": targets, "shared": self.shared, "reason": self.reason}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Topology:
        """Inverse of `to_dict`."""
        targets = tuple(tuple(map(torch.device, target)) for target in values["targets"])
        return cls(tuple(map(torch.device, values["drafters"])), targets, values["shared"], values["reason"])

    def __str__(self) -> str:
        targets = ", ".join("+".join(map(str, target)) for target in self.targets)
        return f"targets on {targets}; drafters on {', '.join(map(str, self.drafters))} ({self.reason})"

    def table(self, memory: Mapping[torch.device, Any] | None = None) -> str:
        """A line a device: its roles and, with an estimate of `memory.estimate`, what it will hold."""
        rows = []
        for device in self.devices:
            roles = [f"target[{i}]" for i, target in enumerate(self.targets) if device in target]
            roles += [f"drafter[{i}]" for i, drafter in enumerate(self.drafters) if device == drafter]
            rows.append((device, " ".join(roles), *([memory[device]] if memory else [])))
        return f"{Table(rows, ('device', 'roles', 'memory')[: len(rows[0])])}\n{self.reason}"


def available_gpus() -> int:
    """CUDA devices that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_cpu(value: Any) -> bool:
    """Whether a value of `gpus` asks for the CPU."""
    return isinstance(value, str) and _CPU_WORKERS.fullmatch(value.strip().lower()) is not None


def parse_gpus(value: Any, available: int, name: str = "gpus") -> list[int] | str | None:
    """GPU indices from whatever a person, YAML or papermill hands over.

    Args:
        value: None, '', an int, a list or tuple of ints and strings, '5', '5,6,7', '[5, 6]', 'cuda:5', 'all', 'cpu'
            or 'cpu:N'.
        available: number of GPUs there are.
        name: the parameter's name, for messages.

    Returns: distinct indices in the order given; "cpu" or "cpu:N" as it was; None where nothing is asked for.

    Raises: ConfigError, one sentence: what was asked, what is there, what to do.
    """
    if value is None:
        return None
    if isinstance(value, str):
        text = value.strip().lower()
        if _CPU_WORKERS.fullmatch(text):
            _cpu_count(text, name)
            return text
        if text == "all":
            if not available:
                raise ConfigError(
                    f"{name}=all asks for every GPU, but this machine has 0 GPUs; run without {name} "
                    f"(uses the CPU) or with {name}=cpu"
                )
            return list(range(available))
        parts = [part for part in re.split(r"[\s,;]+", re.sub(r"[\[\](){}'\"]", " ", text)) if part]
        if not parts:
            return None
    elif isinstance(value, (list, tuple)):
        if not value:
            return None
        parts = list(value)
    else:
        parts = [value]
    indices = [_index(part, value, name) for part in parts]
    for index in indices:
        if indices.count(index) > 1:
            raise ConfigError(f"{name}={_show(value)} names GPU {index} twice; name each GPU once")
        if index >= available:
            there = f"{available} GPU{'' if available == 1 else 's'}"
            known = f" (0 to {available - 1})" if available > 1 else " (0)" if available else ""
            known += _hidden(available, name)
            what_to_do = (
                f"choose among them, or run with {name}=cpu"
                if available
                else (f"run without {name} (uses the CPU) or with {name}=cpu")
            )
            raise ConfigError(
                f"{name}={_show(value)} asks for GPU {index}, but this machine has {there}{known}; {what_to_do}"
            )
    return indices


def _hidden(available: int, name: str) -> str:
    """What CUDA_VISIBLE_DEVICES has to do with it, where it is set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ""
    if not available:
        return f", since CUDA_VISIBLE_DEVICES={visible!r} hides all it may have"
    numbers = ", ".join(f"{i} is {gpu.strip()}" for i, gpu in enumerate(visible.split(",")[:available]))
    return f": CUDA_VISIBLE_DEVICES={visible} leaves these, and {name} counts them from 0 ({numbers})"


def _index(part: Any, value: Any, name: str) -> int:
    """One index; bools, floats, negatives and everything else that is no plain index are refused."""
    if isinstance(part, str):
        found = _INDEX.fullmatch(part.strip().lower())
        if found:
            return int(found[1])
    elif not isinstance(part, bool) and hasattr(part, "__index__"):
        index = operator.index(part)
        if index >= 0:
            return index
    raise ConfigError(f"{name}={_show(value)} holds {part!r}, which is no GPU index; write {FORMS}")


def _show(value: Any) -> str:
    return (
        value if isinstance(value, str) else ",".join(map(str, value)) if isinstance(value, (list, tuple)) else repr(value)
    )


def _cpu_count(text: str, name: str) -> int:
    count = int(_CPU_WORKERS.fullmatch(text)[1] or 1)
    if count < 1:
        raise ConfigError(f"{name}={text} asks for no worker at all; write cpu for one, or cpu:N for N")
    if count > MOST_CPU_WORKERS:
        raise ConfigError(
            f"{name}={text} asks for {count} workers on one CPU; at most {MOST_CPU_WORKERS} make sense, as "
            "many as the GPUs that they stand for"
        )
    return count


def decide(runtime: RuntimeOptions, available: int | None = None) -> Topology:
    """The topology that `gpus`, `target_gpus` and `gpus_per_target` ask for.

    Args:
        available: number of GPUs; None counts them.

    Raises: ConfigError where the request and the machine do not fit.
    """
    count = available_gpus() if available is None else available
    drafters = parse_gpus(runtime.gpus, count, "gpus")
    targets = parse_gpus(runtime.target_gpus, count, "target_gpus")
    if isinstance(drafters, str) or isinstance(targets, str) or not count:
        return _with_cpu(drafters, targets, count, runtime.gpus_per_target)
    reason = []
    if drafters is None and targets is None:
        if count == 1:
            drafters, targets = [0], [0]
            reason.append("1 GPU is shared by target and drafter")
        else:
            first = count - default_drafters(count)
            drafters, targets = list(range(first, count)), list(range(first))
            reason.append(f"by default the last {len(drafters)} of {count} GPUs draft")
    elif drafters is None:
        drafters = [i for i in range(count) if i not in targets] or targets[-1:]
        reason.append(
            f"target_gpus={_show(runtime.target_gpus)}, drafters on "
            + ("the others" if not set(drafters) & set(targets) else "the last of them, no GPU is left")
        )
    elif targets is None:
        targets = [i for i in range(count) if i not in drafters]
        reason.append(
            f"gpus={_show(runtime.gpus)} draft, "
            + ("the others run the target" if targets else "and no GPU is left, so they run the target too")
        )
        targets = targets or list(drafters)
    else:
        reason.append(f"gpus={_show(runtime.gpus)} and target_gpus={_show(runtime.target_gpus)} as asked")
    size = runtime.gpus_per_target
    if len(targets) < size:
        raise ConfigError(
            f"gpus_per_target={size} needs {size} GPUs for one target, but {len(targets)} of {count} are "
            f"left for targets; use gpus_per_target={max(1, len(targets))}, or fewer drafter gpus"
        )
    groups = [targets[i : i + size] for i in range(0, len(targets) - size + 1, size)]
    idle = targets[len(groups) * size :]
    if idle:
        reason.append(f"GPU {', '.join(map(str, idle))} stays idle: targets take {size} GPUs each")
    return _topology([_cuda(i) for i in drafters], [[_cuda(i) for i in group] for group in groups], "; ".join(reason))


def default_drafters(count: int) -> int:
    """How many of `count` GPUs draft when nobody says: three eighths, at least one."""
    return max(1, count * 3 // 8)


def _with_cpu(drafters: list[int] | str | None, targets: list[int] | str | None, count: int, size: int) -> Topology:
    """At least one side on the CPU."""

    def devices(value: list[int] | str | None, name: str) -> list[torch.device]:
        if isinstance(value, list):
            return [_cuda(i) for i in value]
        return [CPU] * _cpu_count(value or "cpu", name)

    if size != 1:
        raise ConfigError(
            f"gpus_per_target={size} spreads a target over GPUs, and here a side runs on the CPU; use gpus_per_target=1"
        )
    drafts, feeds = devices(drafters, "gpus"), devices(targets, "target_gpus")
    if targets is None:
        feeds = list(drafts)  # each drafter with a target of its own
    asked = isinstance(drafters, str) or isinstance(targets, str)
    apart = isinstance(targets, str) and ":" in targets  # workers that stand for devices of their own
    reason = (
        f"{count} GPUs, so everything runs on the CPU"
        if not asked
        else (f"{len(drafts)} drafter and {len(feeds)} target workers, CPU by request")
    )
    return _topology(drafts, [[device] for device in feeds], reason, apart)


def _cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


def on_one(device: torch.device) -> Topology:
    """Target and drafter together on one device."""
    return Topology((device,), ((device,),), True, f"target and drafter on {device}")


def _topology(drafters: list[torch.device], targets: list[list[torch.device]], reason: str, apart: bool = False) -> Topology:
    used = {device for target in targets for device in target}
    return Topology(tuple(drafters), tuple(map(tuple, targets)), bool(used & set(drafters)) and not apart, reason)
