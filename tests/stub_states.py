"""A stand-in for a vLLM with the hidden-states connector: a tiny model behind the same requests and the same files.

In a thread (`serving`), with the faults of real ones. Its states are transformers' own `hidden_states`.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from chat_tokenizer import chat_tokenizer
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 4


def tiny_folder(root: Path, seed: int = 0, hidden: int = 32, save: bool = True):
    """A model of four layers in a folder, with its tokenizer. Returns the folder and the model."""
    torch.manual_seed(seed)
    tokenizer = chat_tokenizer()
    sizes = dict(hidden_size=hidden, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    config = LlamaConfig(vocab_size=len(tokenizer) + 2, num_hidden_layers=LAYERS, max_position_embeddings=512, **sizes)
    config.initializer_range, config.tie_word_embeddings = 0.3, False
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, tokenizer.eos_token_id, 0
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):  # a norm of ones says nothing
            weight.data.uniform_(0.5, 1.5)
    if save:
        model.save_pretrained(root / "model")
        tokenizer.save_pretrained(root / "model")
    return root / "model", model


class States(ThreadingHTTPServer):
    """The server's side. Attributes that a test may change at any time:

    `about`: the files' metadata. `connector` False: no path in answers. `change(tensors)`: edits a file's tensors.
    `delay`: seconds a request takes. `left`: requests until it is gone. `lose`: the file never comes. `fail`: writing fails.
    """

    daemon_threads = True

    def __init__(self, model, folder: Path, states: Path, given: list[int], port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.folder, self.states = model, folder, states
        self.about = {"layer_ids": given, "prefix_caching": False, "chunked_prefill": False, "quantization": None}
        self.connector, self.lose, self.fail, self.delay, self.left = True, False, False, 0.0, None
        self.change = lambda tensors: None
        self.tokenize = chat_tokenizer().encode
        self.longest = 8192
        self.asked, self.together, self.most = 0, 0, 0  # requests; at the same time now, and at most
        self.turn = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def target(self) -> str:
        return f"vllm+{self.url}{self.folder}"

    def die(self):
        """Refuse connections from now on, those that are open too."""
        self.left = 0
        threading.Thread(target=lambda: (self.shutdown(), self.server_close())).start()

    @torch.no_grad()
    def complete(self, body: dict) -> dict:
        ids = body["prompt"]
        out = self.model(torch.tensor([ids]), output_hidden_states=True)
        streams = [*out.hidden_states[:-1], None]
        with torch.no_grad():  # the last entry there is after the final norm
            streams[-1] = self.last_output(ids)
        tensors = {
            "hidden_states": torch.stack([streams[layer + 1][0] for layer in self.about["layer_ids"]], 1).contiguous(),
            "token_ids": torch.tensor(ids),
        }
        self.change(tensors)
        path = self.states / f"cmpl-{time.monotonic_ns()}-{threading.get_ident()}.safetensors"
        if self.fail:
            Path(f"{path}.failed").write_text("OSError: No space left on device")
        elif not self.lose:
            metadata = None if self.about.get("foreign") else {"dflash": json.dumps(self.about)}
            save_file(tensors, f"{path}.part", metadata=metadata)
            Path(f"{path}.part").rename(path)
        top = out.logits[0, -1].log_softmax(-1).topk(20)
        told = {f"token_id:{i}": v for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)}
        answer = {"choices": [{"text": "", "logprobs": {"top_logprobs": [told]}}]}
        return answer | ({"kv_transfer_params": {"hidden_states_path": str(path)}} if self.connector else {})

    def last_output(self, ids):
        kept = []
        hook = self.model.model.layers[-1].register_forward_hook(
            lambda m, a, o: kept.append(o[0] if type(o) is tuple else o)
        )
        self.model(torch.tensor([ids]))
        hook.remove()
        return kept[0]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        root = str(self.server.folder)
        models = {"data": [{"id": root, "root": root, "max_model_len": self.server.longest}]}
        self._reply(200, models if self.path == "/v1/models" else {})

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self._reply(200, {"tokens": server.tokenize(body["prompt"], add_special_tokens=False)})
        assert body["max_tokens"] == 1 and body["temperature"] == 0 and all(type(i) is int for i in body["prompt"])
        with server.turn:
            server.together += 1
            server.most = max(server.most, server.together)
        time.sleep(server.delay)
        with server.turn:  # one forward at a time, as a server of ours computes
            server.asked += 1
            if server.left is not None:
                server.left -= 1
            gone = server.left is not None and server.left < 0
            answer = None if gone else server.complete(body)
            server.together -= 1
        if gone:
            server.die()
            self.close_connection = True
            return self.connection.close()
        self._reply(200, answer)

    def _reply(self, code, content):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (OSError, ValueError):  # the connection was closed above
            self.close_connection = True


@contextmanager
def serving(model, folder: Path, root: Path, given=(0, 2, 3), port: int = 0):
    """A `States` that answers."""
    states = root / "states"
    states.mkdir(exist_ok=True)
    server = States(model, folder, states, list(given), port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
