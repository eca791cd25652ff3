"""A vLLM server as a child process: found, started on the loopback interface, watched while it loads, stopped by its pid.

The server lives in an environment of its own and is named by that environment's Python. It runs in a process group that ends
with this process, however that ends (`guard`), and its output is kept in a file.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash.errors import ConfigError, RunError

HOST = "127.0.0.1"
LOADING = 600.0  # seconds that a server may take to load
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": HOST}
_FIND = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') else 3)"
_START = "import sys; sys.argv[0] = 'vllm'; from vllm.entrypoints.cli.main import main; main()"
_GUARD = Path(__file__).with_name("guard.py")
PATIENCE = 20.0  # seconds for a server to end by itself
_ERROR = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:ERROR \S+ \S+ \[[^]]*\] )?((?:[\w.]*(?:Error|Exception)|vllm: error): ?.*)$")
_REASON = re.compile(r"^(?:\(\w+ pid=\d+\) *)?(?:Value error, )?(\S.*?) \[type=\w+, input_value=")


def require_vllm(python: str | Path) -> None:
    """Raises ConfigError where `python` is none, or has no vLLM."""
    try:
        found = subprocess.run([str(python), "-c", _FIND], capture_output=True, timeout=120).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or "no answer in two minutes"
        raise ConfigError(f"{python} is no Python that starts ({why}); give the one of an environment with vLLM") from None
    if found:
        raise ConfigError(
            f"the environment of {python} has no vLLM; make one with `make serve-env`, or give the Python of another"
        )


def choose_port(port: int | None) -> int:
    """`port` if it is free, or any that is. Raises ConfigError for a port in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port or 0))
        except OSError as error:
            raise ConfigError(f"port {port} of {HOST} is in use ({error.strerror}); name another, or none") from None
        return probe.getsockname()[1]


class Server:
    """`vllm serve` with `arguments`, for the time of a `with` block.

    Args:
        python: of the server's environment. log: file for its output. timeout: seconds it may take to load.
        environment: variables beside this process's own.

    Raises: RunError with the server's own last error where it ends while loading or takes too long; it is stopped then.
    """

    def __init__(
        self,
        python: str | Path,
        arguments: Sequence[str],
        log: Path,
        port: int | None = None,
        timeout: float = LOADING,
        environment: Mapping[str, str] = MappingProxyType({}),
    ):
        self.port, self.log, self.timeout, self._more = choose_port(port), log, timeout, environment
        self.url = f"http://{HOST}:{self.port}"
        guard = [sys.executable, "-I", str(_GUARD), str(PATIENCE)]
        self._command = [*guard, str(python), "-c", _START, "serve", *arguments, "--host", HOST, "--port", str(self.port)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1"} | dict(os.environ) | _QUIET
        for name in ("PYTHONPATH", "PYTHONHOME"):  # this environment's packages are not the server's
            environment.pop(name, None)
        environment |= self._more
        with open(self.log, "wb") as out:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _wait(self) -> None:
        end = time.monotonic() + self.timeout
        while not healthy(self.url):
            if self._process.poll() is not None:
                code = self._process.returncode
                known = code - 128 in signal.valid_signals()
                how = f"signal {signal.Signals(code - 128).name}" if known else f"exit code {code}"
                raise RunError(f"the server ended while loading ({how}): {last_error(self.log)}; its log is {self.log}")
            if time.monotonic() > end:
                raise RunError(f"the server did not answer within {self.timeout:.0f} s; its log is {self.log}")
            time.sleep(0.3)

    def stop(self, patience: float = PATIENCE) -> None:
        """End the server and all that it started, which is gone afterwards. `patience`: seconds until it is killed."""
        process = self._process
        if process is None:
            return
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
            if not _signal_group(process.pid, number):
                break
            end = time.monotonic() + seconds
            while time.monotonic() < end and (process.poll() is None or _signal_group(process.pid, 0)):
                time.sleep(0.1)
        process.wait()
        process.stdin.close()
        self._process = None


def _signal_group(group: int, number: int) -> bool:
    """Whether the process group still had a process to signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def healthy(url: str) -> bool:
    """Whether a server answers there."""
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as reply:
            return reply.status == 200
    except (OSError, ValueError):
        return False


def last_lines(log: Path, count: int = 8) -> str:
    """The end of a server's log, as people read it."""
    lines = [line.rstrip()[:300] for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "(it wrote nothing)"


def last_error(log: Path) -> str:
    """The line of a server's log that says what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    found = [match.group(1) for match in map(_ERROR.match, lines) if match]
    # vLLM's outer process ends with an error of its own that only points at the engine's
    told = [text for text in found if "Engine core initialization failed" not in text]
    if told and "validation error" in told[-1]:  # pydantic: the reason follows, before its type and the values it got
        reasons = [match.group(1) for match in map(_REASON.match, lines) if match]
        told += reasons[-1:]
    return (told or found or lines or ["it wrote nothing"])[-1][:300]
