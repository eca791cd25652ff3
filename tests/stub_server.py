"""A stand-in for a server: it answers prompts from a table, as vLLM words its answers.

In a thread for `--url`, or as the `vllm` of a made-up environment (`fake_environment`).
"""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FAKE = """
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
from stub_server import serve_as_vllm

def main():
    serve_as_vllm(sys.argv[1:])
"""


class Handler(BaseHTTPRequestHandler):
    """`table`: "ids of the prompt" -> {"tokens", "accepted"}; `drafted`: whether accepted counts are told."""

    table: dict = {}
    drafted = True

    def do_GET(self):
        self._reply({"data": [{"id": "target"}]} if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        entry = self.table[" ".join(map(str, body["prompt"]))]
        assert body["temperature"] == 0 and body["return_token_ids"] is True
        tokens = entry["tokens"][: body["max_tokens"]]
        answer = {"choices": [{"token_ids": tokens, "finish_reason": "length"}]}
        if self.drafted:
            answer["metrics"] = {"speculative_decoding": {"per_step_accepted": entry["accepted"]}}
        self._reply(answer)

    def _reply(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def handler(table, drafted=True):
    return type("Told", (Handler,), {"table": table, "drafted": drafted})


@contextmanager
def stub(table, drafted=True):
    """The stub's address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(table, drafted))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def serve_as_vllm(arguments):
    """What `vllm serve` of the made-up environment does; the file STUB says how."""
    plan = json.loads(Path(os.environ["STUB"]).read_text())
    with open(plan["seen"], "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "arguments": arguments}) + "\n")
    if plan.get("die"):
        print("INFO loading")
        raise ValueError(plan["die"])
    if plan.get("deaf"):  # as a server that waits for its engine
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if plan.get("child"):  # a process of its own, as an engine core is one
        import subprocess

        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(plan["child"]).write_text(str(process.pid))
    drafted = "--speculative-config" in arguments or "--per-request-spec-decode-metrics" in arguments
    port = int(arguments[arguments.index("--port") + 1])
    host = arguments[arguments.index("--host") + 1]
    ThreadingHTTPServer((host, port), handler(plan["table"], drafted)).serve_forever()


def fake_environment(folder: Path, plan: dict) -> Path:
    """A Python whose `vllm` is this stub, following `plan`; what it was asked goes to the file `plan["seen"]`."""
    package = folder / "fake" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").write_text("")
    (package / "main.py").write_text(FAKE)
    (package / "stub_server.py").write_text(Path(__file__).read_text())
    plan = {"seen": str(folder / "seen.jsonl"), "table": {}} | plan
    (folder / "stub.json").write_text(json.dumps(plan))
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{folder / "fake"}" STUB="{folder / "stub.json"}" exec "{sys.executable}" "$@"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python
