"""Help of every command: plain, with an example that works, and there before anything heavy is imported."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from dflash.__main__ import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["", *COMMANDS, *(f"bench {bench}" for bench in ("step", "kinds", "attention", "target", "pipeline"))]
SCRIPT = """
import contextlib, io, json, sys
from dflash.__main__ import main
pages = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as page:
        try:
            main([*words.split(), "--help"])
        except SystemExit as end:
            assert end.code == 0
    pages[words] = page.getvalue()
heavy = {"torch", "transformers", "numpy", "papermill", "nbformat", "plotly", "matplotlib", "yaml"} & set(sys.modules)
print(json.dumps([pages, sorted(heavy)]))
"""


@pytest.fixture(scope="module")
def pages():
    words = [sys.executable, "-c", SCRIPT, json.dumps(PAGES)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return json.loads(done.stdout)


def test_help_imports_nothing_heavy(pages):
    assert pages[1] == []


@pytest.mark.parametrize("words", PAGES)
def test_every_help_page_has_an_example_that_its_own_parser_takes(pages, words, tmp_path, monkeypatch):
    page = pages[0][words]
    example = page.rpartition("example:\n")[2].strip()
    assert example.startswith(f"dflash {words}".strip()) and "\n" not in example, page
    monkeypatch.chdir(tmp_path)
    parsed = build_parser().parse_args(shlex.split(example)[1:])
    assert callable(parsed.run)
    assert "==SUPPRESS==" not in page and "python -m" not in page


def test_a_shell_is_told_what_could_follow(tmp_path):
    pytest.importorskip("argcomplete")
    for line, wanted in (("dflash tr", "train"), ("dflash train --rec", "--recipe")):
        out = tmp_path / "out"
        environment = os.environ | {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        words = [sys.executable, "-m", "dflash"]
        subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, timeout=PATIENCE)
        assert wanted in out.read_text()
