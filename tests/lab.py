"""A JupyterLab on the loopback interface, driven by Chromium through Playwright, for test_browser.py."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from patience import PATIENCE

CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
PLOT = ".js-plotly-plot"
STATIC = ".jp-OutputArea-output img[src^='data:image/png']"
POINTS = """() => { const e = document.querySelector('.js-plotly-plot');
  return e && e.calcdata ? e.calcdata.reduce((n, c) => n + c.length, 0) : 0; }"""
WIDTHS = "() => { const e = document.querySelector('.js-plotly-plot'); return [e._fullLayout.width, e.clientWidth]; }"


class Server:
    """`jupyter lab` in `root` with settings of its own; stopped by `stop`."""

    def __init__(self, root: Path, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        folder = home / "settings" / "@jupyterlab" / "apputils-extension"
        folder.mkdir(parents=True)
        quiet = {"fetchNews": "false", "checkForUpdates": False}
        (folder / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
        adaptive = {"adaptive-theme": True, "preferred-light-theme": "JupyterLab Light"}  # light or dark as the page asks
        themes = {"theme": "JupyterLab Light", "preferred-dark-theme": "JupyterLab Dark", **adaptive}
        (folder / "themes.jupyterlab-settings").write_text(json.dumps(themes))
        environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "OMP_NUM_THREADS": "1",
        }
        self.log = home / "server.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "jupyterlab",
                    "--no-browser",
                    "--allow-root",
                    "--ip=127.0.0.1",
                    f"--port={self.port}",
                    "--IdentityProvider.token=",
                    "--ServerApp.password=",
                    f"--ServerApp.root_dir={root}",
                ],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.time() + PATIENCE
        while time.time() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/status", timeout=2)
                return
            except OSError:
                time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"JupyterLab did not start:\n{self.log.read_text()[-3000:]}")

    def url(self, notebook: str) -> str:
        return f"http://127.0.0.1:{self.port}/lab/tree/{notebook}?reset"

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Notebook:
    """One open notebook: run it, look at its plot, press its buttons, take screenshots."""

    def __init__(self, page, server: Server, name: str, shots: Path) -> None:
        self.page, self.server, self.name, self.shots = page, server, name, shots
        self.open()

    def open(self) -> None:
        self.page.goto(self.server.url(self.name))
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.page.wait_for_selector(".jp-Notebook-ExecutionIndicator:not([data-status=unknown])")
        time.sleep(2)
        self.answer_dialog()

    def answer_dialog(self) -> None:
        """A slow start makes JupyterLab ask for the kernel; the preselected one is right."""
        button = self.page.locator(".jp-Dialog .jp-mod-accept")
        if button.count():
            button.first.click()
            time.sleep(2)

    def run_all(self) -> None:
        self.answer_dialog()
        self.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
        self.page.click(".lm-MenuBar-itemLabel:text-is('Run')")
        self.page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")

    def save(self) -> None:
        self.page.keyboard.press("Control+s")
        time.sleep(1.5)

    def shot(self, name: str) -> Path:
        path = self.shots / f"{name}.png"
        self.page.screenshot(path=str(path))
        return path

    def points(self) -> int:
        return self.page.evaluate(POINTS)

    def press(self, label: str) -> None:
        self.page.click(f".jupyter-button:has-text('{label}'):not([disabled])")

    def sees(self, text: str) -> bool:
        return self.page.locator(f".jp-OutputArea-output:has-text('{text}')").count() > 0
