"""Errors that callers can catch. Each message says what was got, what was wanted and what to do next."""


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


class ResumeError(RunError):
    """A run cannot go on from its checkpoints with these settings."""
