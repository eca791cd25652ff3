"""A page as a PNG, by a Chromium without a window: `python tools/screenshot.py runs/<id>/report.html report.png`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --virtual-time-budget=15000".split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="1200,1500", help="width,height in pixels")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("there is no Chromium here; apt-get install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={options.size}"]
        page = options.page.resolve().as_uri()
        subprocess.run(
            [*command, f"--screenshot={options.out.resolve()}", page], check=True, timeout=120, capture_output=True
        )
    print(f"{options.out} ({options.out.stat().st_size / 1e3:.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
