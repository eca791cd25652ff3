"""The docs repeat the code where a tool writes them, their commands parse, and their links lead somewhere."""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WRITE = runpy.run_path(str(ROOT / "tools" / "write_docs.py"))
REFRESH = "run `python tools/write_docs.py` and commit what it writes"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "data" / "README.md"])


def commands() -> list[list[str]]:
    """Every line of the README's sh blocks, as words without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    return [words for line in "".join(blocks).splitlines() if (words := shlex.split(line, comments=True))]


def test_the_readme_is_short_and_its_tree_is_the_package_s():
    text = (ROOT / "README.md").read_text()
    assert text == WRITE["readme"](), REFRESH
    assert len(text.splitlines()) <= 90
    first_screen = "\n".join(text.splitlines()[:33])
    assert "report.png" in first_screen and "**1.59**" in first_screen and "arxiv.org/abs/2602.06036" in first_screen


def test_each_room_says_in_one_line_what_it_holds():
    rooms = [line.split(None, 1) for line in WRITE["tree"]().splitlines() if "/" in line.split(" ")[0]]
    assert {room.rstrip("/") for room, _ in rooms} == {path.parent.name for path in (ROOT / "dflash").glob("*/__init__.py")}
    for room, says in rooms:
        assert 20 < len(says) < 120 and says.endswith("."), room


def test_the_settings_page_lists_every_setting():
    from dflash.train.settings import setting_names

    text = (ROOT / "docs" / "settings.md").read_text()
    assert text == WRITE["settings"](), REFRESH
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.*) \|$", text, flags=re.M)
    assert {name for name, _, _ in rows} >= set(setting_names()) - {"recipe"} and "`-p recipe gpu`" in text
    assert all(default.strip() for _, default, _ in rows)


def test_the_glossary_has_ten_words():
    words = re.findall(r"^\| \*\*(.+?)\*\* \| .{40,} \|$", (ROOT / "docs" / "glossary.md").read_text(), flags=re.M)
    assert len(words) == 10 and {"target", "drafter", "anchor", "acceptance length"} <= set(words)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_readme_s_commands_are_commands(words):
    """Each is understood as it stands; none needs a file that a fresh clone and the lines before it lack."""
    if words[0] == "make":
        found = subprocess.run(["make", "-n", words[1]], cwd=ROOT, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
    elif words[0] == "dflash":
        subparsers = argparse.ArgumentParser().add_subparsers()
        importlib.import_module(f"dflash.commands.{words[1].replace('-', '_')}").add_parser(subparsers)
        given = subparsers.choices[words[1]].parse_args(words[2:])
        notebook = getattr(given, "notebook", None)
        assert notebook is None or (ROOT / notebook).is_file()
    else:
        assert words == ["source", ".venv/bin/activate"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_docs_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
