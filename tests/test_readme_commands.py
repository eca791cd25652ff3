"""tools/readme_commands.py: what it reads from the README, and that a failing command is seen. The README itself takes
minutes and a package index; `python tools/readme_commands.py` runs it."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOL = runpy.run_path(str(ROOT / "tools" / "readme_commands.py"))


def test_commands_are_the_lines_of_the_sh_blocks_without_comments():
    text = "```sh\n# first\nmake train     # a comment\ndflash run n.ipynb \\\n    out.ipynb\n```\n"
    text += "```\nnot me\n```\n```sh\nexport A=b#c\n```\n"
    assert TOOL["commands"](text) == ["make train", "dflash run n.ipynb      out.ipynb", "export A=b#c"]


def test_every_command_of_the_readme_that_takes_long_has_a_smaller_form():
    forms = {command: TOOL["smaller"](command) for command in TOOL["commands"]((ROOT / "README.md").read_text())}
    assert {"make train", "make lab"} <= set(forms)
    for command, form in forms.items():
        if "05_train" in command or command in ("make train", "dflash doctor") or command.startswith("dflash evaluate"):
            assert form != command and form.startswith(command.split()[0])
        else:
            assert form == command or form.startswith("make -n"), command


def test_what_fails_or_hangs_is_seen_and_a_sourced_file_stays_in_force(tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "set.sh").write_text("NAME=there\n")
    run = TOOL["run"]
    assert run('test "$NAME" = there', ["source set.sh"], clone, 60.0)[0]
    assert run("echo broken; false", [], clone, 60.0) == (False, "broken\n")
    assert not run("true", ["false"], clone, 60.0)[0]
    good, text = run("sleep 600", [], clone, 0.5)
    assert not good and "not done after 0 s" in text
    assert run(
        "make lab", ["make() { echo 'http://x:8888/lab/tree/notebooks/index.ipynb?token=1'; sleep 600; }"], clone, 60.0
    )[0]
