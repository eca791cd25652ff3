"""serve-check against a stand-in server: what is compared, what is trimmed, what is refused, and that nothing runs on."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import wait_until
from stub_server import fake_environment, stub
from test_evaluate import tiny_run
from tiny_models import random_drafter, slow_greedy, tiny_target

from dflash.__main__ import main
from dflash.drafter.export import export_drafter
from dflash.errors import ConfigError, RunError
from dflash.evaluate.decoding import speculative_generate
from dflash.evaluate.rounds import trimmed
from dflash.evaluate.served import ServeOptions, serve_check
from dflash.target.capture import load_target
from dflash.target.server import Server, last_error
from dflash.train.prepare import prepare_data
from dflash.train.resolve import recall

TOKENS = 12


# -- the end rule -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, accepted, stopped, runs, gains",
    [
        (6, [1, 3], False, [1, 2], [2, 3]),  # 1 + 2 + 4 = 7 tokens for a text of 6: its last token counts as the bonus
        (6, [1, 3], True, [1, 3], [2, 3]),  # the text ends with an accepted draft
        (7, [1, 3], True, [1, 3], [2, 4]),
        (4, [0, 0, 0], False, [0, 0, 0], [1, 1, 1]),
        (4, [0, 3, 2, 1], True, [0, 2], [1, 2]),  # rounds wholly behind the end
        (1, [2], True, [], []),
    ],
)
def test_rounds_are_trimmed_to_the_text(tokens, accepted, stopped, runs, gains):
    found = trimmed(tokens, accepted, stopped)
    assert (found.runs, found.gains) == (runs, gains)
    assert found.anchors == [sum(gains[:n]) for n in range(len(gains))] and sum(gains) == tokens - 1


def test_rounds_that_do_not_make_the_text_are_refused():
    with pytest.raises(RunError, match="2 rounds make 4 of 9 tokens"):
        trimmed(9, [1, 0], False)


@pytest.mark.parametrize("seed", range(2))
def test_a_longer_texts_rounds_trim_to_the_shorter_texts(seed):
    """A server that goes on past the end is our decoding of a longer text; ours of the shorter one is what must be left."""
    target = tiny_target(seed=seed)
    drafter = random_drafter(target, seed=seed + 1)
    drafter.lm_head = target.head_weight
    prompt = [3, 17, 5 + seed, 42]
    longer = speculative_generate(target, drafter, prompt, 40, eos_token_ids=[])
    for limit in range(2, 30, 3):
        ours = speculative_generate(target, drafter, prompt, limit, eos_token_ids=[])
        assert trimmed(limit, longer.accepted, False).runs == ours.accepted
    for end in range(1, 30):  # the token at `end` ends the text
        stop = longer.tokens[end]
        if stop in longer.tokens[:end]:
            continue
        ours = speculative_generate(target, drafter, prompt, 40, eos_token_ids=[stop])
        found = trimmed(end + 1, longer.accepted, True)
        assert len(ours.tokens) == end + 1 and found.runs == ours.accepted
        assert found.gains == [len(chunk) for chunk in ours.chunks[1:]]


# -- the check on a stand-in --------------------------------------------------------------------------------------


def command(run, *arguments):
    """Exit code of a serve-check of few tokens."""
    return main(["serve-check", "--run", str(run), "--max-new-tokens", str(TOKENS), *arguments])


def made(tmp_path, monkeypatch, past_end=2):
    """A tiny run, and the table of a server that agrees with it but counts drafts behind the end of each text."""
    run, _, drafter = tiny_run(tmp_path, monkeypatch)
    resolved = recall(run)
    target = load_target(resolved.target.name, "cpu", torch.float32, drafter.target_layer_ids)
    table = {}
    for item in prepare_data(resolved).held_out:
        ids = list(item.input_ids[: item.loss_mask.index(True)])
        text = slow_greedy(target, ids, TOKENS, target.end_ids)
        longer = speculative_generate(target, drafter, ids, TOKENS + past_end, eos_token_ids=[])
        assert longer.tokens[: len(text)] == text
        table[" ".join(map(str, ids))] = {"tokens": text, "accepted": longer.accepted}
    return run, table


def test_a_server_that_is_up_agrees(tmp_path, monkeypatch, capsys):
    run, table = made(tmp_path, monkeypatch)
    with stub(table) as url:
        code = main(
            ["serve-check", "--run", str(run), "--url", url, "--max-new-tokens", str(TOKENS), "--concurrency", "1,2"]
        )
    out = capsys.readouterr().out
    assert code == 0, out
    saved = json.loads((run / "served/check.json").read_text())
    assert saved["problems"] == [] and saved["compared"] == saved["prompts"] == saved["ours_exact"] == 3
    assert [(e["concurrency"], e["identical"]) for e in saved["servers"]["with the drafter"]] == [(1, 3), (2, 3)]
    assert saved["server"] == saved["ours"] and saved["training"] == saved["ours"]
    calls = [count for entry in table.values() for count in entry["accepted"]]
    assert saved["untrimmed_length"] == pytest.approx(1 + sum(calls) / len(calls))
    both = saved["same_rounds"]
    assert both["differing"] == [] and both["length_ours"] == both["length_server"]
    assert both["rounds"] == saved["ours"]["blocks"] < len(calls)
    assert "counters go on past the end" in out and "PROBLEM" not in out


def test_a_server_that_differs_is_told(tmp_path, monkeypatch, capsys):
    """One wrong token in one text; and drafts that stand where ours do not, with the gap of our logits."""
    run, table = made(tmp_path, monkeypatch)
    first, second, third = list(table)
    table[first]["tokens"][4] = (table[first]["tokens"][4] + 1) % 200
    for name in (second, third):
        table[name]["accepted"] = [1] * TOKENS
    with stub(table) as url:
        code = command(run, "--url", url, "--concurrency", "1")
    out = capsys.readouterr().out
    saved = json.loads((run / "served/check.json").read_text())
    assert code == 1 and saved["compared"] == 2
    assert "PROBLEM: the server with the drafter gives another text for 1 of 3 prompts at concurrency 1" in out
    assert saved["servers"]["with the drafter"][0]["differing"][0]["index"] == 4
    both = saved["same_rounds"]
    assert (
        both["by_slot_server"][0] > both["by_slot_ours"][0]
        and "slot 1 stands" in out
        and "lengths on the same rounds" in out
    )
    assert all(item["slot"] == 1 and (item["ours"], item["server"]) == (0, 1) for item in both["differing"])
    assert both["largest_gap"] == max(item["gap"] for item in both["differing"]) > 0.1 and "prefer ours by" in out


def test_only_the_drafters_server_is_started(tmp_path, monkeypatch, capsys):
    run, table = made(tmp_path, monkeypatch)
    python = fake_environment(tmp_path, {"table": table})
    assert command(run, "--server-python", str(python), "--no-plain", "--concurrency", "2") == 0, capsys.readouterr().out
    seen = (tmp_path / "seen.jsonl").read_text().splitlines()
    assert len(seen) == 1 and "--speculative-config" in json.loads(seen[0])["arguments"]
    assert list(json.loads((run / "served/check.json").read_text())["servers"]) == ["with the drafter"]


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_servers_are_started_with_and_without_and_stopped(tmp_path, monkeypatch, layout):
    run, table = made(tmp_path, monkeypatch)
    child = tmp_path / "child"
    python = fake_environment(tmp_path, {"table": table, "child": str(child)})
    options = ServeOptions(
        str(run), server_python=str(python), layout=layout, max_new_tokens=TOKENS, concurrency=(1,), server_args="--extra 1"
    )
    summary = serve_check(options, say=lambda line: None)
    assert summary["problems"] == [] and list(summary["servers"]) == ["without a drafter", "with the drafter"]
    assert all(passes[0]["identical"] == 3 for passes in summary["servers"].values())
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    plainly, drafted = (entry["arguments"] for entry in seen)
    target = str(tmp_path / "target")
    assert plainly[:2] == ["serve", target] and "--speculative-config" not in plainly
    assert plainly[-6:-4] == ["--extra", "1"] and plainly[-4:-2] == ["--host", "127.0.0.1"]
    if layout == "zlab":
        export = str((run / "served/zlab").resolve())
        settings = json.loads(drafted[drafted.index("--speculative-config") + 1])
        assert drafted[1] == target and settings == {"method": "dflash", "model": export, "num_speculative_tokens": 3}
    else:
        assert drafted[1] == str((run / "served/speculators").resolve()) and "--speculative-config" not in drafted
        written = json.loads((run / "served/speculators/config.json").read_text())
        assert written["speculators_config"]["verifier"]["name_or_path"] == target
    for pid in [entry["pid"] for entry in seen] + [int(child.read_text())]:
        assert not alive(pid), f"process {pid} runs on"
    assert {path.name for path in (run / "served").glob("*.log")} == {f"{layout}-with.log", f"{layout}-without.log"}


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- bad input ----------------------------------------------------------------------------------------------------


def test_environments_without_vllm_are_refused(tmp_path, monkeypatch, capsys):
    run, _, _ = tiny_run(tmp_path, monkeypatch)
    capsys.readouterr()
    for python, words in ((sys.executable, "has no vLLM"), (str(tmp_path / "none"), "is no Python that starts")):
        assert command(run, "--server-python", python) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1
    assert command(run) == 2 and "--server-python" in capsys.readouterr().err
    assert not (run / "served").exists()


def test_a_port_in_use_and_a_server_that_is_not_up(tmp_path, monkeypatch, capsys):
    run, _, _ = tiny_run(tmp_path, monkeypatch)
    capsys.readouterr()
    python = fake_environment(tmp_path, {})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert command(run, "--server-python", str(python), "--port", str(port)) == 2
        err = capsys.readouterr().err
        assert f"port {port} of 127.0.0.1 is in use" in err and err.count("\n") == 1
    assert command(run, "--url", f"http://127.0.0.1:{port}") == 2
    assert "no server answers at" in capsys.readouterr().err


def test_a_server_that_dies_while_loading(tmp_path, monkeypatch, capsys):
    run, _, _ = tiny_run(tmp_path, monkeypatch)
    capsys.readouterr()
    python = fake_environment(tmp_path, {"die": "no such layer"})
    assert command(run, "--server-python", str(python), "--limit", "1") == 2
    err = capsys.readouterr().err
    log = run / "served/zlab-without.log"
    assert err == f"RunError: the server ended while loading (exit code 1): ValueError: no such layer; its log is {log}\n"
    assert "INFO loading" in log.read_text()
    pid = json.loads((tmp_path / "seen.jsonl").read_text())["pid"]
    assert not alive(pid)


def test_a_server_that_takes_too_long_is_stopped(tmp_path):
    python = fake_environment(tmp_path, {})
    sleeps = "    pathlib.Path(os.environ['STUB']).write_text(str(os.getpid()))\n    time.sleep(600)\n"
    main_file = tmp_path / "fake/vllm/entrypoints/cli/main.py"
    main_file.write_text("import os, pathlib, time\ndef main():\n" + sleeps)
    server = Server(python, [], tmp_path / "log", None, timeout=3.0)
    with pytest.raises(RunError, match="did not answer within 3 s"), server:
        pass
    written = (tmp_path / "stub.json").read_text()
    assert server.pid is None and not (written.isdigit() and alive(int(written)))


@pytest.mark.parametrize("deaf", [False, True])
def test_a_killed_check_leaves_no_server(tmp_path, deaf):
    """SIGKILL gives no chance to clean up, and a server may not heed being told to end."""
    python = fake_environment(tmp_path, {"deaf": deaf, "child": str(tmp_path / "child")})
    script = (
        "import pathlib, sys, time; from dflash.target import server; server.PATIENCE = 1.0\n"
        "with server.Server(sys.argv[1], [], pathlib.Path(sys.argv[2]), None, timeout=200.0):\n"
        "    print('up', flush=True); time.sleep(600)\n"
    )
    command_line = [sys.executable, "-c", script, str(python), str(tmp_path / "log")]
    process = subprocess.Popen(command_line, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert process.stdout.readline() == b"up\n"
    pids = [json.loads((tmp_path / "seen.jsonl").read_text())["pid"], int((tmp_path / "child").read_text())]
    assert all(map(alive, pids))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(map(alive, pids)), "the server and its child to end")


def test_a_server_that_is_killed_while_loading_is_told_by_its_signal(tmp_path):
    python = fake_environment(tmp_path, {})
    main_file = tmp_path / "fake/vllm/entrypoints/cli/main.py"
    main_file.write_text("import os, signal\ndef main():\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(RunError, match=r"ended while loading \(signal SIGKILL\): it wrote nothing"):
        with Server(python, [], tmp_path / "log", None, timeout=200.0):
            pass


def test_a_drafter_of_another_target_and_too_long_a_block(tmp_path, monkeypatch, capsys):
    run, table = made(tmp_path, monkeypatch)
    capsys.readouterr()
    other = random_drafter(tiny_target())  # 61 tokens, the run's target has more
    export_drafter(other, tmp_path / "other", "zlab", "x", num_target_layers=4)
    with stub(table) as url:
        assert command(run, "--url", url, "--drafter", str(tmp_path / "other")) == 2
        err = capsys.readouterr().err
        assert "is the drafter of another target than" in err and "vocab_size 61 against" in err and err.count("\n") == 1
        assert command(run, "--url", url, "--draft-tokens", "4") == 2
        err = capsys.readouterr().err
        assert "block of 4 has 3 drafts; give 1 to 3" in err and err.count("\n") == 1
        assert command(run, "--url", url, "--draft-tokens", "2", "--concurrency", "one") == 2
        assert command(run, "--url", url, "--device", "tpu") == 2 and "there is no device" in capsys.readouterr().err
    with stub(table, drafted=False) as url:
        assert command(run, "--url", url) == 2
        assert "--per-request-spec-decode-metrics detailed" in capsys.readouterr().err


def test_a_drafter_in_another_layout_is_not_served(tmp_path, monkeypatch, capsys):
    run, _ = made(tmp_path, monkeypatch)
    capsys.readouterr()
    python = str(fake_environment(tmp_path, {}))
    checkpoint = run / "checkpoints/step-00000002"
    assert main(["export", "--run", str(run), "--format", "speculators", "--out", str(tmp_path / "s")]) == 0
    for drafter, words in ((tmp_path / "s", "--format speculators serves it"), (checkpoint, "`dflash export` writes one")):
        assert command(run, "--server-python", python, "--drafter", str(drafter)) == 2
        err = capsys.readouterr().err
        assert "is no drafter in the zlab layout" in err and words in err and err.count("\n") == 1


def test_options_that_cannot_work():
    for changes, words in (
        ({"server_python": "x"}, "not both or none"),
        ({"layout": "dflash"}, "layout must be one of"),
        ({"concurrency": ()}, "concurrency is empty"),
        ({"concurrency": (0,)}, "concurrency must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            ServeOptions("run", url="http://127.0.0.1:1", **changes)


@pytest.mark.parametrize(
    "lines, told",
    [
        (["(EngineCore pid=7) ERROR 12-01 00:58:27 [core.py:1] ValueError: head size 8", "x"], "ValueError: head size 8"),
        (
            ["torch.OutOfMemoryError: no room", "RuntimeError: Engine core initialization failed. See above"],
            "torch.OutOfMemoryError: no room",
        ),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
                "  Value error, Runner V1 does not support: heads [type=value_error, input_value=Args(()), input_type=A]",
                "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
            ],
            "Runner V1 does not support: heads",
        ),
        (["vllm: error: unrecognized arguments: --x"], "vllm: error: unrecognized arguments: --x"),
        (["only this"], "only this"),
        ([], "it wrote nothing"),
    ],
)
def test_the_line_that_says_what_went_wrong(tmp_path, lines, told):
    (tmp_path / "log").write_text("\n".join(lines))
    assert last_error(tmp_path / "log") == told


def test_prompts_of_a_file(tmp_path, monkeypatch):
    """Any file that `regenerate` reads; each is rendered as the target is asked."""
    run, _, drafter = tiny_run(tmp_path, monkeypatch)
    target = load_target(recall(run).target.name, "cpu", torch.float32, drafter.target_layer_ids)
    (tmp_path / "p.txt").write_text("who\nwhen\n")
    table = {}
    for word in ("who", "when"):
        messages = [{"role": "user", "content": word}]
        ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        text = speculative_generate(target, drafter, ids, 6)
        table[" ".join(map(str, ids))] = {"tokens": text.tokens, "accepted": text.accepted}
    with stub(table) as url:
        options = ServeOptions(str(run), url=url, prompts=str(tmp_path / "p.txt"), max_new_tokens=6, concurrency=(1,))
        summary = serve_check(options, say=lambda line: None)
    assert summary["problems"] == [] and summary["compared"] == summary["prompts"] == 2
