"""What a server is given: the target's folder, the export with its card, the lines that serve it, and the upload."""

import json
import re
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from safetensors.torch import load_file
from test_evaluate import tiny_run
from test_target_gguf import write_llama
from tiny_models import random_drafter, tiny_target
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dflash.__main__ import main
from dflash.commands.report import runnable
from dflash.drafter.storage import save_drafter
from dflash.errors import TargetError
from dflash.evaluate.card import interval
from dflash.target import capture
from dflash.target.folder import write_target_folder
from dflash.target.loading import load_model, resolve_source
from dflash.target.serving import next_commands, serve_lines


def test_packaged_target_as_a_folder(tmp_path, smollm2):
    """The weights that training sees, bit for bit; the same ids, the same chat, and the right end token everywhere."""
    out = write_target_folder("smollm2", tmp_path / "target")
    own = smollm2.model.state_dict()
    written = load_file(out / "model.safetensors")
    assert set(own) - set(written) <= {"lm_head.weight"}  # tied
    assert all(torch.equal(value, own[name]) for name, value in written.items())
    tokenizer = AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "What are tides?"}, {"role": "assistant", "content": "Water, moving."}]
    ids = [t.apply_chat_template(messages, tokenize=True, return_dict=False) for t in (tokenizer, smollm2.tokenizer)]
    assert ids[0] == ids[1] and tokenizer.eos_token_id == 2 and tokenizer.decode([2]) == "<|im_end|>"
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] == GenerationConfig.from_pretrained(out).eos_token_id == 2
    assert config["dtype"] == "float32" and "quantization_config" not in config
    assert '"TokenizersBackend"' not in (out / "tokenizer_config.json").read_text()


def test_a_gguf_target_as_a_folder(tmp_path, monkeypatch):
    original = tiny_target(vocab_size=len(chat_tokenizer()))
    write_llama(tmp_path / "tiny.gguf", original.model)
    monkeypatch.setattr(capture, "load_tokenizer", lambda source, config: chat_tokenizer())
    out = write_target_folder(tmp_path / "tiny.gguf", tmp_path / "folder")
    wanted = load_model(resolve_source(tmp_path / "tiny.gguf"), torch.float32)
    again = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.randint(6, 60, (1, 9))
    assert torch.equal(again(input_ids=ids).logits, wanted(input_ids=ids).logits)
    assert again.generation_config.eos_token_id == again.config.eos_token_id == chat_tokenizer().eos_token_id
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert write_target_folder(tmp_path / "tiny.gguf", out) == out  # finished: kept
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "tiny.gguf"]  # nothing half-written


def test_every_end_token_and_the_own_dtype_are_kept(tmp_path):
    target = tiny_target(vocab_size=len(chat_tokenizer()), dtype=torch.bfloat16)
    target.model.config.eos_token_id = [4, 9]
    target.model.generation_config.eos_token_id = 7
    target.model.save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    out = write_target_folder(tmp_path / "target", tmp_path / "folder")
    ends = sorted({4, 9, 7, chat_tokenizer().eos_token_id})
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == ends
    assert GenerationConfig.from_pretrained(out).eos_token_id == ends
    assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


def test_target_folders_that_cannot_be_written(tmp_path):
    target = tiny_target(vocab_size=len(chat_tokenizer()))
    target.model.save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    other = tiny_target()
    other.model.save_pretrained(tmp_path / "other")
    with pytest.raises(TargetError, match="already holds another target"):
        write_target_folder(tmp_path / "target", tmp_path / "other")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    with pytest.raises(TargetError, match="is not empty"):
        write_target_folder(tmp_path / "target", tmp_path / "full")
    with pytest.raises(TargetError, match="random weights"):
        write_target_folder("random:qwen3.6-27b", tmp_path / "new")
    assert not (tmp_path / "new").exists()


# -- the card and the lines ---------------------------------------------------------------------------------------


def test_lines_of_both_layouts():
    lines = serve_lines("zlab", "/my drafter", "/t", 4)
    assert lines["vLLM"].startswith("vllm serve /t --speculative-config '{")
    assert json.loads(lines["vLLM"].split("'")[1]) == {
        "method": "dflash",
        "model": "/my drafter",
        "num_speculative_tokens": 3,
    }
    assert "--speculative-draft-model-path '/my drafter' --speculative-num-draft-tokens 4" in lines["SGLang"]
    assert serve_lines("speculators", "/d", "/t", 4) == {"vLLM": "vllm serve /d"}


def test_the_two_commands_after_a_run(tmp_path, monkeypatch, capsys):
    """The report and its command print what takes a run to a server; with a GGUF target the folder is part of it."""
    monkeypatch.chdir(tmp_path)
    run, _, _ = tiny_run(tmp_path, monkeypatch)
    (run / "metrics.jsonl").write_text('{"kind": "run_end", "t": 1.0, "status": "completed"}\n')
    export, serve = next_commands(run)
    assert export == "dflash export --run runs/one --format zlab --out runs/one/drafter"
    assert serve.startswith(f"vllm serve {tmp_path / 'target'} ") and '"num_speculative_tokens": 3' in serve
    assert main(["report", str(run), "--static"]) == 0
    assert export in capsys.readouterr().out and export in (run / "report.html").read_text()
    monkeypatch.setenv("PATH", str(tmp_path))  # neither environment is active
    for folder in (".venv/bin", ".venv-serve/bin"):
        Path(folder).mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    assert [runnable(line) for line in (export, serve)] == [export, serve]  # no environments here
    Path(".venv/bin/dflash").touch()
    Path(".venv-serve/bin/vllm").touch()
    assert main(["report", str(run), "--static"]) == 0
    assert f"  .venv/bin/{export}\n  VLLM_CPU_KVCACHE_SPACE=1 .venv-serve/bin/{serve}\n" in capsys.readouterr().out
    settings = run / "checkpoints/step-00000002/drafter.json"
    for target, lines in (("smollm2", 2), ("/x/y.gguf", 2), ("random:qwen3.6-27b", 0)):
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"target": target}))
        found = next_commands(run)
        assert len(found) == lines
        assert not lines or (found[0].endswith("--target-folder runs/one/target") and "serve runs/one/target " in found[1])
    assert next_commands(tmp_path) == []


@pytest.mark.parametrize(
    "share, count, low, high", [(0.5, 100, 0.4038, 0.5962), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0)]
)
def test_interval_of_a_share(share, count, low, high):
    """Against published values of Wilson's interval."""
    assert interval(share, count) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_card_and_printed_lines(tmp_path, monkeypatch, capsys):
    run, data, _ = tiny_run(tmp_path, monkeypatch)
    record = {"kind": "eval", "t": 1.0, "step": 2, "acceptance_length": 1.25, "acceptance_by_slot": [0.2, 0.05, 0.0]}
    later = record | {"step": 9, "acceptance_length": 9.0, "blocks": 7}
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (record | {"blocks": 400}, later)))
    command = ["export", "--run", str(run), "--format", "zlab", "--out", str(tmp_path / "x")]
    assert main([*command, "--target-folder", str(tmp_path / "served")]) == 0
    out, card = capsys.readouterr().out, (tmp_path / "x/README.md").read_text()
    line = serve_lines("zlab", str(tmp_path / "x"), str(tmp_path / "served"), 4)["vLLM"]
    assert line in out and line in card and "sglang.launch_server" in out and "sglang.launch_server" in card
    assert "| 1 | 20.0% | 16.4 to 24.2% |" in card and "length 1.250 (tokens gained per target call" in card
    assert "9.000" not in card  # measured after the exported step
    assert "Conversations of `data.jsonl`, 2 steps." in card and "pack_length 128" in card and "## Limits" in card
    assert card.startswith("---\ntags:") and str(tmp_path / "data.jsonl") not in card
    assert (tmp_path / "served/model.safetensors").is_file()


def test_a_gguf_target_needs_a_folder(tmp_path, capsys):
    """A hub model of the same name has other weights, so none is named."""
    save_drafter(random_drafter(tiny_target()), tmp_path / "own", "some.gguf")
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    command = [
        "export",
        "--drafter",
        str(tmp_path / "own"),
        "--target",
        str(tmp_path / "some.gguf"),
        "--num-target-layers",
        "4",
    ]
    assert main([*command, "--format", "zlab", "--out", str(tmp_path / "z")]) == 0
    out = capsys.readouterr().out
    assert "servers load no GGUF: --target-folder DIR" in out and "vllm serve" not in out


def test_speculators_of_a_gguf_target_name_no_hub_model(tmp_path, capsys, monkeypatch):
    target = tiny_target(vocab_size=len(chat_tokenizer()))
    write_llama(tmp_path / "tiny.gguf", target.model)
    monkeypatch.setattr(capture, "load_tokenizer", lambda source, config: chat_tokenizer())
    save_drafter(random_drafter(target), tmp_path / "own", str(tmp_path / "tiny.gguf"))
    command = ["export", "--drafter", str(tmp_path / "own"), "--format", "speculators", "--out", str(tmp_path / "s")]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "servers load no GGUF" in err and "--target-folder DIR" in err and err.strip().count("\n") == 0
    assert main([*command, "--target-folder", str(tmp_path / "folder")]) == 0
    config = json.loads((tmp_path / "s/config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "folder")
    assert f"vllm serve {tmp_path / 's'}" in capsys.readouterr().out


def test_an_export_without_its_target_can_be_asked_for_again(tmp_path, capsys):
    """Nothing is written where the target's folder cannot be, so the corrected command runs."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert exported(tmp_path, "--target-folder", str(tmp_path / "full")) == 2
    assert "is not empty" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_a_drafter_of_another_target_is_not_exported(tmp_path, capsys):
    save_drafter(random_drafter(tiny_target()), tmp_path / "own", "x")
    other = tiny_target(vocab_size=len(chat_tokenizer()))
    other.model.save_pretrained(tmp_path / "target")
    command = [
        "export",
        "--drafter",
        str(tmp_path / "own"),
        "--target",
        str(tmp_path / "target"),
        "--out",
        str(tmp_path / "x"),
    ]
    assert main([*command, "--format", "speculators"]) == 2
    err = capsys.readouterr().err
    assert "is the drafter of another target than" in err and "vocab_size 61 against 262" in err
    assert not (tmp_path / "x").exists()


# -- the upload ---------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload needs; weights go through its storage for large files."""

    def __getattr__(self, name):
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _answer(self):
        seen, path = self.server.seen, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        seen.append((self.command, path))
        here = f"http://127.0.0.1:{self.server.server_address[1]}"
        status, content = 200, {}
        if self.server.refuse:
            status, content = 403, {"error": self.server.refuse}
        elif path == "/api/repos/create":
            self.server.created = json.loads(body)
            content = {"url": f"{here}/me/drafter"}
        elif "/preupload/" in path:
            large = [name["path"].endswith(".safetensors") for name in json.loads(body)["files"]]
            kinds = ["lfs" if value else "regular" for value in large]
            files = [n["path"] for n in json.loads(body)["files"]]
            content = {
                "files": [{"path": p, "uploadMode": k, "shouldIgnore": False} for p, k in zip(files, kinds, strict=True)]
            }
        elif path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            content = {
                "transfer": "basic",
                "objects": [o | {"actions": {"upload": {"href": f"{here}/put/{o['oid']}"}}} for o in objects],
            }
        elif path.startswith("/put/"):
            self.server.stored[path.removeprefix("/put/")] = body
        elif "/commit/" in path:
            self.server.commit = [json.loads(line) for line in body.splitlines()]
            content = {"commitUrl": f"{here}/me/drafter/commit/abc", "commitOid": "abc", "success": True}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def hub(monkeypatch, refuse=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.stored, server.created, server.commit, server.refuse = [], {}, None, None, refuse
    threading.Thread(target=server.serve_forever, daemon=True).start()
    import huggingface_hub
    from huggingface_hub import constants

    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    real = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: real(endpoint=address, token="hf_test"))
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def exported(tmp_path, *arguments):
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    save_drafter(random_drafter(target), tmp_path / "own", str(tmp_path / "target"))
    command = ["export", "--drafter", str(tmp_path / "own"), "--format", "zlab", "--out", str(tmp_path / "x")]
    return main([*command, *arguments])


def test_push_uploads_the_export_and_nothing_else(tmp_path, monkeypatch, capsys):
    with hub(monkeypatch) as server:
        assert exported(tmp_path, "--push", "me/drafter") == 0
    assert "pushed to" in capsys.readouterr().out
    assert server.created["name"] == "drafter" and server.created["organization"] == "me"
    assert server.created.get("private") is True or server.created.get("visibility") == "private"
    entries = [line["value"] for line in server.commit if line["key"] in ("file", "lfsFile")]
    assert {entry["path"] for entry in entries} == {"README.md", "config.json", "model.safetensors"}
    weights = next(entry for entry in entries if entry["path"] == "model.safetensors")
    assert server.stored[weights["oid"]] == (tmp_path / "x/model.safetensors").read_bytes()


def test_nothing_is_uploaded_unless_asked(tmp_path, monkeypatch):
    with hub(monkeypatch) as server:
        assert exported(tmp_path) == 0
    assert server.seen == []


@pytest.mark.parametrize("name, refuse", [("me/drafter", "not yours"), ("a/b/c", None)])
def test_a_refused_push_is_one_line(tmp_path, monkeypatch, capsys, name, refuse):
    with hub(monkeypatch, refuse):
        assert exported(tmp_path, "--push", name) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert re.match(rf"ConfigError: the hub did not take {name}: .+; the export is in {tmp_path / 'x'}$", err)
