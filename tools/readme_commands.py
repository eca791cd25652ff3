"""Run the README's commands in a fresh clone, in order, as a reader pastes them.

    python tools/readme_commands.py             what takes long runs small; about a quarter of an hour on two cores
    python tools/readme_commands.py --whole     every command as it stands

The lines of each ```sh block run one after another in a new bash; `source`, `cd` and `export` stay in force for later ones.
A line that takes long has a smaller form in SMALLER and is reported as "small". `make lab` is ended once its server answers.
The exit code is the number of commands that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "-p recipe cpu -p steps 4 -p max_conversations 12 -p held_out 2 -p eval_every 4 -p min_acceptance 0 -p decode_prompts 1"
)
SMALLER = (
    (r"^make train$", f"make train PARAMETERS='{TINY}'"),
    (r"^make (test|test-all|test-gpu|test-browser|soak|story|train-gpu)\b.*$", r"make -n \1"),
    (r"^((?:dflash run|papermill|.*&& papermill) .*05_train\.ipynb .*)$", rf"\1 {TINY}"),
    (r"^(dflash evaluate .*)$", r"\1 --limit 1 --max-new-tokens 8 --parity 1"),
    (r"^dflash doctor$", "dflash doctor --quick"),
)
STAYS = re.compile(r"^(source|\.|cd|export)\s")
UP = re.compile(r"https?://\S*/lab/tree/notebooks/index\.ipynb\?token=")  # what `make lab` prints for the index


def commands(text: str) -> list[str]:
    """Every command of the ```sh blocks, without comments; lines that end in a backslash are joined."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            if line := re.sub(r"(^|\s)#.*", "", line).strip():
                found.append(line)
    return found


def smaller(command: str) -> str:
    """The command in its quick form; as it is where it needs none."""
    for pattern, form in SMALLER:
        if re.match(pattern, command):
            return re.sub(pattern, form, command)
    return command


def run(command: str, before: list[str], clone: Path, limit: float) -> tuple[bool, str]:
    """Whether it ends with 0, and what it printed last. A server ends with Ctrl-C as soon as it prints its address."""
    script = "\n".join([*before, command])
    environment = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS")
    }
    log = clone.parent / "output.txt"
    server = command.startswith("make lab")
    with open(log, "w") as out:
        options = dict(cwd=clone, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        child = subprocess.Popen(["bash", "-e", "-c", script], **options)
        end = time.monotonic() + limit
        while child.poll() is None and time.monotonic() < end and not (server and UP.search(log.read_text())):
            time.sleep(0.2)
        ended = child.poll()
        if ended is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    text = log.read_text()
    good = bool(UP.search(text)) if server else ended == 0
    return good, text[-2000:] if ended is not None or server else f"{text[-2000:]}\nnot done after {limit:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="nothing in its smaller form")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for one command")
    options = parser.parse_args()
    failed, before = 0, []
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        for command in commands((clone / "README.md").read_text()):
            form = command if options.whole else smaller(command)
            began = time.monotonic()
            good, text = run(form, before, clone, options.limit)
            how = "whole" if form == command else "dry" if " -n " in form else "small"
            print(f"{'ok    ' if good else 'FAILED'} {how:5} {time.monotonic() - began:6.0f} s  {command}", flush=True)
            if not good:
                failed += 1
                print("    " + text.strip().replace("\n", "\n    "), flush=True)
            if STAYS.match(command):
                before.append(command)
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
