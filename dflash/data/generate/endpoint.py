"""Ask an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...) for answers, several requests at a time."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from dflash.errors import RunError


class Endpoint:
    """Chat completions of one server and model.

    Args:
        url: base URL, with or without `/v1`. model: the name that the server serves; None asks it for its first.
        concurrency: requests in flight. key: sent as a bearer token if given. retries: tries after a failure that
        may pass (no connection, HTTP 429 or 5xx).
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        max_new_tokens: int = 192,
        concurrency: int = 8,
        key: str | None = None,
        retries: int = 4,
        timeout: float = 300.0,
        pause: float = 1.0,
    ):
        self.url = url.rstrip("/") + ("" if url.rstrip("/").endswith("/v1") else "/v1")
        self.max_new_tokens, self.concurrency = max_new_tokens, concurrency
        self.key, self.retries, self.timeout, self.pause = key, retries, timeout, pause
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        found = self._call("/models", None).get("data") or []
        if not found:
            raise RunError(f"{self.url} serves no model; name one with --model")
        return found[0]["id"]

    def answer(self, questions: list[tuple[list[dict], dict]]) -> list[dict]:
        """One result per `(messages, sampling)`, in order: text, finish_reason, tokens, and ids where given."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(lambda item: self._one(*item), questions))

    def _one(self, messages: list[dict], sampling: dict) -> dict:
        # `return_token_ids` is vLLM's; servers that do not know it ignore it and the ids stay empty.
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_new_tokens,
            "return_token_ids": True,
            **sampling,
        }
        reply = self._call("/chat/completions", body)
        try:
            choice = reply["choices"][0]
            text = choice["message"].get("content") or ""
        except (KeyError, IndexError, TypeError) as error:
            raise RunError(f"{self.url} answered without a choice: {json.dumps(reply)[:200]}") from error
        ids, prompt = choice.get("token_ids") or [], reply.get("prompt_token_ids") or []
        tokens = (reply.get("usage") or {}).get("completion_tokens") or len(ids)
        return {
            "text": text,
            "finish_reason": choice.get("finish_reason"),
            "tokens": tokens,
            "response_ids": ids,
            "prompt_ids": prompt,
        }

    def _call(self, path: str, body: dict | None) -> dict:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(self.retries + 1):
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                told = f"HTTP {error.code}: {error.read()[:200].decode(errors='replace')}"
                if error.code != 429 and error.code < 500:
                    raise RunError(f"{self.url}{path} refused the request with {told}") from error
            except (OSError, ValueError) as error:  # no connection, a time-out, or half an answer
                told = f"{type(error).__name__}: {error}"
            if attempt < self.retries:
                time.sleep(self.pause * 2**attempt)
        raise RunError(
            f"{self.url}{path} gave no answer in {self.retries + 1} tries, last {told}; what is written "
            "so far is kept, so call again when the server is back"
        )
