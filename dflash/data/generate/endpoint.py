"""Ask an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...) for answers, several requests at a time."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from dflash.errors import RunError


class RefusedError(RunError):
    """A server's answer to one request that asking again would not change."""


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
        pause: float = 1.0,
    ):
        self.url = url.rstrip("/") + ("" if url.rstrip("/").endswith("/v1") else "/v1")
        self.max_new_tokens, self.concurrency, self.retries, self.pause = max_new_tokens, concurrency, retries, pause
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=300.0, headers=headers, follow_redirects=True)
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        found = self.call("GET", "/models").get("data") or []
        if not found:
            raise RunError(f"{self.url} serves no model; name one with --model")
        return found[0]["id"]

    def answer(self, questions: list[tuple]) -> list[dict | None]:
        """One result per `(messages, sampling[, tools])`, in order: text, finish_reason, tokens, and ids where given.

        None for a question that the server refused; when it refuses all of them its words are raised as RefusedError.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            replies = list(pool.map(lambda item: self._one(*item), questions))
        if replies and all(isinstance(reply, RefusedError) for reply in replies):
            raise replies[0]
        return [None if isinstance(reply, RefusedError) else reply for reply in replies]

    def _one(self, messages: list[dict], sampling: dict, tools: list[dict] | None = None) -> dict | RefusedError:
        # `return_token_ids` is vLLM's; servers that do not know it ignore it and the ids stay empty.
        body = {"model": self.model, "messages": messages, "max_tokens": self.max_new_tokens, "return_token_ids": True}
        try:
            reply = self.call("POST", "/chat/completions", body | sampling | ({"tools": tools} if tools else {}))
            choice = reply["choices"][0]
            text = choice["message"].get("content") or ""
            text.encode()  # half of a surrogate pair is no text
        except RefusedError as error:
            return error
        except (KeyError, IndexError, TypeError) as error:
            return RefusedError(f"{self.url} answered without a choice: {json.dumps(reply)[:200]} ({type(error).__name__})")
        except UnicodeEncodeError as error:
            return RefusedError(f"{self.url} answered with half of a surrogate pair ({error.reason})")
        ids, prompt = choice.get("token_ids") or [], reply.get("prompt_token_ids") or []
        tokens = (reply.get("usage") or {}).get("completion_tokens") or len(ids)
        found = {"text": text, "finish_reason": choice.get("finish_reason"), "tokens": tokens}
        return found | {"response_ids": ids, "prompt_ids": prompt}

    def call(self, method: str, path: str, body: dict | None = None) -> dict:
        for attempt in range(self.retries + 1):
            try:
                reply = self._client.request(method, self.url + path, json=body)
                if reply.is_success:
                    return reply.json()
                told = f"HTTP {reply.status_code}: {reply.text[:200]}"
                if reply.status_code != 429 and reply.status_code < 500:
                    raise RefusedError(f"{self.url}{path} refused the request with {told}")
            except (httpx.HTTPError, ValueError) as error:  # no connection, a time-out, or half an answer
                told = f"{type(error).__name__}: {error}"
            if attempt < self.retries:
                time.sleep(self.pause * 2**attempt)
        raise RunError(
            f"{self.url}{path} gave no answer in {self.retries + 1} tries, last {told}; what is written "
            "so far is kept, so call again when the server is back"
        )
