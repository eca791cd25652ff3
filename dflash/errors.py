"""Errors that callers can catch, and the checks that several rooms raise them with. Each message says what was got, what
was wanted and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SEEDS = range(-(2**63), 2**63)  # what torch's generators take


class DFlashError(RuntimeError):
    """Root of every error this package raises on purpose."""


class ConfigError(DFlashError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(DFlashError, ValueError):
    """Training text that cannot be used."""


class TargetError(DFlashError, ValueError):
    """A target model that cannot be loaded, or whose features are not what they claim to be."""


class RunError(DFlashError):
    """A run folder or a running job is in a state that forbids the request."""


class ServerLostError(RunError):
    """The server that runs the target has ended; what was trained so far is good."""


class ResumeError(RunError):
    """A run cannot go on from its checkpoints with these settings."""


def worker_of(error: BaseException, default: str = "main") -> str:
    """Which worker an exception came from."""
    return getattr(error, "dflash_worker", default)


def one_of(what: str, name: str, known: tuple[str, ...], word: str) -> str:
    """`name`, or ConfigError with the names there are; `word` is the parameter's value for no choice."""
    if name not in known:
        raise ConfigError(f"{what} has {name!r}; wanted {word}, or of {', '.join(known)}")
    return name


def refuse_below(least: float, **numbers: float) -> None:
    """Raises ConfigError naming the first parameter that is less than `least`, or no number."""
    for name, value in numbers.items():
        if not value >= least:
            raise ConfigError(f"{name} must be at least {least:g}, got {value:g}")


def refuse_seed(seed: int) -> None:
    """Raises ConfigError for a seed that torch's generators have no room for."""
    if seed not in SEEDS:
        raise ConfigError(f"seed must be between -2**63 and 2**63 - 1, got {seed}")


def refuse_unknown(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise ConfigError for the first name that is not known, with the nearest known one."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown {what} {name!r}; {hint}")
