"""Run a command as the leader of its process group, and end the whole group once the process that started it is gone.

    python guard.py SECONDS COMMAND ...

A server that is told to end while it loads may wait for ever, and one whose parent was killed outright is told nothing. The
parent holds the other end of this process's stdin; when that closes, the group is told to end, and killed SECONDS later.
"""

import os
import signal
import subprocess
import sys
import threading
import time


def main(seconds: float, command: list[str]) -> int:
    """The command's exit code; 128 and the signal's number where a signal ended it, as shells have it."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # for the command alone, which does not inherit a handler
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    alone = threading.Event()

    def watch() -> None:
        os.read(0, 1)
        alone.set()
        os.killpg(0, signal.SIGTERM)
        time.sleep(seconds)
        os.killpg(0, signal.SIGKILL)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    code = child.wait()
    if alone.is_set():  # what the command started may still run
        watcher.join()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
