"""The environment that `make env` makes, or finds and fills."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def make_env(monkeypatch):
    """The tool, with pip's commands collected instead of run."""
    spec = importlib.util.spec_from_file_location("make_env", ROOT / "tools/make_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.asked = []
    monkeypatch.setattr(module.subprocess, "run", lambda command, **options: module.asked.append(command))
    return module


def run(module, monkeypatch, folder) -> None:
    monkeypatch.setattr(sys, "argv", ["make_env.py", str(folder), "--torch", "torch==0.0"])
    assert module.main() == 0


@pytest.mark.parametrize("shared", [False, True])
def test_an_environment_that_is_here_is_kept_and_filled(make_env, monkeypatch, tmp_path, shared):
    """Also one of `python -m venv`, whose python is a link; making it anew over itself is an error of the venv module."""
    folder = tmp_path / "env"
    arguments = ["--system-site-packages"] if shared else []
    subprocess.Popen([sys.executable, "-m", "venv", "--without-pip", "--symlinks", *arguments, str(folder)]).wait(PATIENCE)
    (folder / "mine").write_text("kept")
    monkeypatch.setattr(make_env, "existing_torch", lambda: "2.13.0")
    run(make_env, monkeypatch, folder)
    assert (folder / "mine").exists() and (folder / "bin/python").is_symlink()
    installs_torch = any("torch==0.0" in command for command in make_env.asked)
    assert installs_torch is not shared, "the base Python's torch counts only where it can be seen"
    assert any("requirements.txt" in command for command in make_env.asked)
