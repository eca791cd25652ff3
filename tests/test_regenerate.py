"""Answers written by the target: right ids, nothing lost or doubled by a kill, any engine, a server too."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from chat_tokenizer import chat_tokenizer, ids_of
from patience import wait_until
from tiny_models import slow_greedy
from transformers import LlamaConfig, LlamaForCausalLM

from dflash.commands import regenerate as regenerate_command
from dflash.data import load_conversations
from dflash.data.generate import answers as regenerate
from dflash.data.generate.endpoint import Endpoint
from dflash.data.generate.engines import ENGINES, Generator, Sampling, tokens_per_second
from dflash.data.generate.prompts import make_prompts, prompts_in, templates_and_topics
from dflash.errors import ConfigError, DataError, RunError
from dflash.target.capture import Target

ROOT = Path(__file__).resolve().parents[1]


def chat_target(seed=0):
    """A tiny random target over the byte tokenizer, with end token 2."""
    tokenizer = chat_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.6,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    return Target(LlamaForCausalLM(config), tokenizer, [0], source="tiny chat")


@pytest.fixture
def saved_target(tmp_path):
    target = chat_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-new-tokens", 0, "max_new_tokens must be at least 1, got 0"),
        ("--batch-size", -1, "batch_size must be at least 1, got -1"),
        ("--limit", 0, "limit must be at least 1, got 0"),
        ("--seconds", -1, "seconds must be at least 0"),
        ("--trial-seconds", "nan", "trial_seconds must be at least 0"),
        ("--sampled-share", 2, "sampled_share is 2.0; wanted a share of the prompts, 0 to 1"),
        ("--top-p", 0, "top_p is 0.0"),
        ("--temperature", "inf", "temperature is inf"),
        ("--seed", 10**20, "seed must be between -2\\*\\*63 and 2\\*\\*63 - 1, got 1"),
    ],
)
def test_numbers_that_cannot_work_are_refused_before_the_target_is_loaded(tmp_path, monkeypatch, option, value, message):
    monkeypatch.setattr(regenerate, "load_target", lambda *given: pytest.fail("the target was loaded"))
    with pytest.raises(ConfigError, match=message):
        run("--out", tmp_path / "f", option, value)
    assert not list(tmp_path.iterdir())


def prompts_file(tmp_path, count=12):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"question {number}\n" for number in range(count)))
    return path


def run(*arguments):
    parser = argparse.ArgumentParser()
    regenerate_command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["regenerate", *map(str, arguments)])
    return options.run(options)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_writes_what_plain_greedy_writes(engine):
    target = chat_target()
    prompts = [[1, 70, 80], [1, 70, 81, 90, 91, 92, 93], [1] + [77] * 20, [1, 99], [1, 60, 61]]
    wanted = [slow_greedy(target, prompt, 12, stops=target.end_ids) for prompt in prompts]
    generator = Generator(target.model, target.end_ids, 0, engine, batch_size=8, max_new_tokens=12, prompt_width=8)
    answers = generator(prompts, Sampling())
    assert [answer.response_ids for answer in answers] == wanted
    assert [answer.finish_reason for answer in answers] == ["stop" if ids[-1] == 2 else "length" for ids in wanted]


def test_an_end_token_ends_the_answer_and_stays_in_it():
    target = chat_target()
    prompt = [1, 70, 80]
    free = slow_greedy(target, prompt, 12)
    stop = free[4]
    first = free.index(stop)
    generator = Generator(target.model, [2, stop], 0, "plain", 4, 12)
    answer = generator([prompt], Sampling())[0]
    assert answer.response_ids == free[: first + 1] and answer.finish_reason == "stop"


def test_sampling_is_seeded_and_differs_from_greedy():
    target = chat_target()
    generator = Generator(target.model, [], 0, "plain", 4, 16)

    def draw(seed, temperature=1.0):
        torch.manual_seed(seed)
        return generator([[1, 70, 80]], Sampling(temperature))[0].response_ids

    assert draw(0) == draw(0) != draw(1)
    assert draw(0, 0.0) == draw(1, 0.0) == slow_greedy(target, [1, 70, 80], 16)
    assert Sampling().record() == {"temperature": 0.0}
    assert Sampling(0.8, 0.9, 3).record() == {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    for bad in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}):
        with pytest.raises(ConfigError):
            Sampling(**bad)
    with pytest.raises(ConfigError, match="engine 'warp' is unknown; wanted one of static, continuous, plain"):
        Generator(target.model, [], 0, "warp")


def test_a_trial_reports_its_rate_and_a_failing_one_counts_as_zero():
    told = []
    generator = Generator(chat_target().model, [2], 0, "plain", 2, 4)
    assert tokens_per_second(generator, [[1, 70]] * 3, 0.01, told.append) > 0 and "tokens/s" in told[-1]
    generator.engine = "none"
    generator.model = None
    assert tokens_per_second(generator, [[1, 70]], 0.01, told.append) == 0.0 and "failed" in told[-1]


def test_rows_hold_ids_text_reason_and_load_as_training_data(tmp_path, saved_target, capsys):
    out = tmp_path / "out.jsonl"
    run(
        "--target",
        saved_target,
        "--prompts",
        prompts_file(tmp_path),
        "--out",
        out,
        "--max-new-tokens",
        10,
        "--sampled-share",
        0.5,
        "--batch-size",
        5,
    )
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = rows_of(out)
    assert summary["conversations"] == len(rows) == 18 and summary["remaining"] == 0
    assert summary["tokens"] == sum(len(row["response_ids"]) for row in rows) and summary["tokens_per_second"] > 0
    target = chat_target()
    for row in rows:
        question = row["messages"][0]["content"]
        assert row["prompt_ids"] == ids_of(target.tokenizer, f"<|begin|>user\n{question}<|end|>\n<|begin|>assistant\n")
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == 2 else "length")
        assert row["dtype"] == "float32"
        if row["sampling"]["temperature"] == 0:
            assert row["response_ids"] == slow_greedy(target, row["prompt_ids"], 10, stops=[2])
    assert sum(row["sampling"]["temperature"] > 0 for row in rows) == 6
    conversations, report = load_conversations(out, target.tokenizer, 128)
    assert report.kept_ids == len(conversations) + sum(report.skipped.values()) - sum(report.skipped.values())
    assert conversations[0].input_ids == rows[0]["prompt_ids"] + rows[0]["response_ids"]


def test_a_torn_last_line_is_cut_off_and_the_rest_is_written_once(tmp_path, saved_target, capsys):
    out, prompts = tmp_path / "out.jsonl", prompts_file(tmp_path)
    arguments = ("--target", saved_target, "--prompts", prompts, "--out", out, "--max-new-tokens", 6, "--batch-size", 4)
    run(*arguments)
    whole = out.read_bytes()
    wanted = sorted(json.dumps(row) for row in rows_of(out))
    lines = whole.splitlines(keepends=True)
    for keep in (len(b"".join(lines[:5])) + 30, len(b"".join(lines[:7])), 10, len(whole) - 1, 0):
        out.write_bytes(whole[:keep])
        run(*arguments)
        assert sorted(json.dumps(row) for row in rows_of(out)) == wanted, keep
    run(*arguments)
    assert len(rows_of(out)) == 12 and json.loads(capsys.readouterr().out.splitlines()[-1])["conversations"] == 0


def test_a_question_asked_twice_is_answered_twice(tmp_path, saved_target):
    out, prompts = tmp_path / "out.jsonl", tmp_path / "p.txt"
    prompts.write_text("same\nsame\nother\n")
    for _ in range(2):
        run("--target", saved_target, "--prompts", prompts, "--out", out, "--max-new-tokens", 4)
    assert sorted(row["messages"][0]["content"] for row in rows_of(out)) == ["other", "same", "same"]


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_and_doubles_nothing(tmp_path, saved_target):
    out, prompts = tmp_path / "out.jsonl", prompts_file(tmp_path, 40)
    command = [
        sys.executable,
        "-m",
        "dflash",
        "regenerate",
        "--target",
        str(saved_target),
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        "--max-new-tokens",
        "24",
        "--batch-size",
        "2",
        "--device",
        "cpu",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for wanted in (6, 16):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

        def written(wanted=wanted, process=process) -> bool:
            return process.poll() is not None or (out.exists() and out.read_bytes().count(b"\n") >= wanted)

        wait_until(written, f"{wanted} lines", every=0.005)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "ended before it could be killed"
    with open(out, "ab") as lines:
        lines.write(b'{"messages":[{"role":"us')
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert sorted(row["messages"][0]["content"] for row in rows_of(out)) == sorted(
        f"question {number}" for number in range(40)
    )


def test_continuing_with_other_settings_or_over_a_damaged_file_is_refused(tmp_path, saved_target):
    out, prompts = tmp_path / "out.jsonl", prompts_file(tmp_path, 3)
    base = ("--target", saved_target, "--prompts", prompts, "--out", out, "--max-new-tokens")
    run(*base, 4)
    with pytest.raises(ConfigError, match="was begun with max_new_tokens=4, now it is 5"):
        run(*base, 5)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + b"{}\n" + lines[2])
    before = out.read_bytes()
    with pytest.raises(DataError, match="line 2 is no conversation"):
        run(*base, 4)
    assert out.read_bytes() == before


def test_prompt_files_of_every_kind(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        'plain\n{"prompt": "one"}\n'
        + json.dumps(
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "u"},
                    {"role": "assistant", "content": "a"},
                ]
            }
        )
    )
    assert [[turn.content for turn in chat.turns] for _, chat in regenerate.read_prompts(path).chats] == [
        ["plain"],
        ["one"],
        ["s", "u"],
    ]
    for text, message in (
        ('{"prompt": \n', "line 1 is not valid JSON"),
        ('{"x": 1}\n', "line 1 has no user message"),
        ('{"messages": "hi"}\n', "line 1 has no user message"),
        ('{"messages": [{"role": "user"}]}\n', "line 1 has no user message"),
        ("fine\n\xff\n", "line 2 is not UTF-8"),
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=message):
            regenerate.read_prompts(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="no prompts in"):
        run("--prompts", path, "--out", tmp_path / "o.jsonl")
    with pytest.raises(DataError, match="no prompts file .*absent.txt; give a file"):
        run("--prompts", tmp_path / "absent.txt", "--out", tmp_path / "o.jsonl")


def test_batches_hold_one_sampling_each_and_interleave():
    greedy, drawn = Sampling(), Sampling(0.8)
    jobs = [
        regenerate.Job((), (number,), sampling) for sampling, count in ((greedy, 12), (drawn, 6)) for number in range(count)
    ]
    parts = regenerate.batches(jobs, 3)
    assert sorted(len(part) for part in parts) == [3] * 6
    assert [part[0].sampling.temperature for part in parts] == [0, 0.8, 0, 0, 0.8, 0]
    assert all(len({job.sampling for job in part}) == 1 for part in parts)


def test_our_prompts_are_many_distinct_and_new():
    known = prompts_in(ROOT / "data" / "smollm2_conversations.jsonl")
    prompts = make_prompts(known)
    assert len(known) == 600 and len(prompts) == len(set(prompts)) >= 12000
    assert not known & set(prompts)
    assert prompts == make_prompts(known) and make_prompts(known, 7) == prompts[:7]
    templates, topics = templates_and_topics()
    assert len(topics) == len(set(topics)) == 606 and all(topic.strip() == topic and topic for topic in topics)
    written = ROOT / "data" / "smollm2_greedy.parquet"
    if written.exists():
        assert prompts_in(written) == set(prompts)  # what the file's README says
    first = prompts[: len(templates)]
    assert len({prompt.split()[0] + prompt.split()[-1] for prompt in first}) == len(first)  # topics differ too


class FakeServer(BaseHTTPRequestHandler):
    """Upper-cases the question; the first two requests fail with 503."""

    def do_GET(self):
        self._send(200, {"data": [{"id": "served"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        if self.server.mode == "refuse":
            return self._send(400, {"error": "max_tokens too large"})
        if self.server.mode == "empty":
            return self._send(200, {"choices": []})
        if self.server.mode == "down" or len(self.server.seen) <= self.server.failures:
            return self._send(503, {"error": "busy"})
        text = body["messages"][-1]["content"].upper()
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        reply = {"choices": [choice], "usage": {"completion_tokens": len(text)}}
        if self.server.mode == "ids":
            choice["token_ids"] = [*text.encode(), 2]
            reply["prompt_token_ids"] = [1, 2, 3]
        self._send(200, reply)

    def _send(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    found.seen, found.failures, found.mode = [], 0, "text"
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def address(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize("mode", ["text", "ids"])
def test_an_endpoint_answers_and_is_continued_like_a_local_target(tmp_path, server, mode):
    server.mode = mode
    out, prompts = tmp_path / "out.jsonl", prompts_file(tmp_path, 9)
    arguments = (
        "--endpoint",
        address(server),
        "--prompts",
        prompts,
        "--out",
        out,
        "--batch-size",
        2,
        "--temperature",
        0.7,
        "--max-new-tokens",
        33,
    )
    run(*arguments)
    rows = rows_of(out)
    assert sorted(row["messages"][1]["content"] for row in rows) == sorted(f"QUESTION {n}" for n in range(9))
    body = server.seen[0]
    assert body["model"] == "served" and body["max_tokens"] == 33 and body["temperature"] == 0.7
    assert rows[0]["sampling"]["temperature"] == 0.7 and rows[0]["finish_reason"] == "stop"
    assert ("response_ids" in rows[0]) == (mode == "ids")
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:4]))
    server.seen.clear()
    run(*arguments)
    assert len(server.seen) == 5 and len(rows_of(out)) == 9


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(server):
    server.failures = 2
    endpoint = Endpoint(address(server) + "/v1/", retries=3, pause=0.01)
    assert endpoint.answer([([{"role": "user", "content": "x"}], {"temperature": 0.0})])[0]["text"] == "X"
    assert len(server.seen) == 3
    for mode, message in (
        ("down", "gave no answer in 2 tries, last HTTP 503"),
        ("refuse", "HTTP 400: .*too large"),
        ("empty", "answered without a choice"),
    ):
        server.mode = mode
        with pytest.raises(RunError, match=message):
            Endpoint(address(server), "m", retries=1, pause=0.01).answer([([{"role": "user", "content": "x"}], {})])
    with pytest.raises(RunError, match="gave no answer in 1 tries"):
        Endpoint("http://127.0.0.1:9", retries=0, pause=0.01)
