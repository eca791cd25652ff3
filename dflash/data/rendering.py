"""One conversation as token ids and a loss mask that is true on what the assistant wrote, its end token
included.

Stock chat templates do not say which tokens are the assistant's, and helpers then return a constant mask
(verl and Megatron-Bridge reports). So the spans are found here: the chat is rendered once as a whole, and
each assistant turn begins where the render of the messages before it (with the generation prompt) ends. That
render must be a prefix of the whole; templates that change earlier turns because of later ones (reasoning
templates do) keep this property as long as the change does not reach past the last user turn. Where it fails
the conversation is refused, never masked wrongly.
"""

from __future__ import annotations

import re

from dflash.data.reading import UnusableRow
from dflash.errors import DataError

_UNSPLITTABLE = "the chat template cannot be split at an assistant turn"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatRenderer:
    """Renders chats with one tokenizer and template.

    Args:
        tokenizer: a transformers tokenizer with a chat template (or give `template`).
        template: replaces the tokenizer's own. template_kwargs: passed on to it (for instance
        `enable_thinking`).
    """

    def __init__(self, tokenizer, template: str | None = None, template_kwargs: dict | None = None):
        self.tokenizer = tokenizer
        self.template = template or tokenizer.chat_template
        self.kwargs = dict(template_kwargs or {})
        if not self.template:
            raise DataError(
                f"tokenizer '{tokenizer.name_or_path}' has no chat template; give one with `template`, "
                "or give ready token ids (`prompt_ids` and `response_ids`)"
            )
        if isinstance(self.template, dict):
            self.template = self.template.get("default") or next(iter(self.template.values()))

    @property
    def name(self) -> str:
        """How messages name this template."""
        first = " ".join(self.template.split())[:60]
        return f"chat template of '{self.tokenizer.name_or_path or type(self.tokenizer).__name__}' ({first}...)"

    def __call__(self, messages: list[dict], tools=None) -> tuple[list[int], list[bool]]:
        """Token ids of the whole chat and the mask of the assistant's tokens.

        Raises UnusableRow (with a reason to count) or DataError (a template that marks nothing or
        everything).
        """
        if _GENERATION_TAG.search(self.template):
            ids, mask = self._tagged(messages, tools)
        else:
            ids, mask = self._split(messages, tools)
        if all(mask) or not any(mask):
            kind = "every token" if mask and all(mask) else "no token"
            raise DataError(
                f"the {self.name} gives a loss mask that marks {kind} of a chat with an assistant turn; "
                "check its generation tags, or use another template"
            )
        return ids, mask

    def prompt_ids(self, messages: list[dict], tools=None) -> list[int]:
        """Ids that a model is given to answer these messages."""
        return self._encode(self._render(messages, tools, True))

    def _render(self, messages: list[dict], tools, generation_prompt: bool, **more) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **{**self.kwargs, **more},
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tagged(self, messages: list[dict], tools) -> tuple[list[int], list[bool]]:
        result = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.kwargs,
        )
        return list(result["input_ids"]), [bool(value) for value in result["assistant_masks"]]

    def _split(self, messages: list[dict], tools) -> tuple[list[int], list[bool]]:
        try:
            whole = self._render(messages, tools, False)
            spans = [
                self._span(whole, messages, index, tools)
                for index, message in enumerate(messages)
                if message["role"] == "assistant"
            ]
        except (UnusableRow, DataError):
            raise
        except Exception as error:  # a template may refuse a chat (roles that must alternate, for instance)
            raise UnusableRow(f"the chat template refused it ({str(error)[:60]})") from error
        return self._mask_spans(whole, spans)

    def _span(self, whole: str, messages: list[dict], index: int, tools) -> tuple[int, int]:
        """Characters of `whole` that the assistant wrote in turn `index`, the end token included."""
        message = messages[index]
        thought, answer = _parts(message)
        if not answer and not message.get("tool_calls"):
            raise UnusableRow("empty answer")
        until = self._render(messages[: index + 1], tools, False)
        start, has_prompt = self._start(whole, messages[:index], tools)
        if not has_prompt:  # the answer's header cannot be rendered alone: begin at the answer's own text
            at = until.rfind(answer) if answer and whole.startswith(until) else -1
            start = min((found for found in (until.find(thought, start) if thought else -1, at) if found >= 0), default=-1)
            if at < start or start < 0:
                raise UnusableRow(_UNSPLITTABLE)
        if whole.startswith(until):
            return start, len(until.rstrip())
        # The template wrote this turn in another way because of what follows: find the answer's text in the
        # whole.
        at = self._locate(whole, answer, start) if answer else None
        if at is not None and thought:
            seen = self._locate(whole, thought, start)
            later = None if seen is None else self._locate(whole, answer, seen + len(thought))
            at = at if later is None else later
        if at is None:
            raise UnusableRow(_UNSPLITTABLE)
        end, closing = at + len(answer), self._closing(until[until.rfind(answer) + len(answer) :])
        return start, end + len(closing) if whole.startswith(closing, end) else end

    def _locate(self, whole: str, text: str, start: int) -> int | None:
        """First `text` at or after `start` with no special token before it, so inside the same turn."""
        at = whole.find(text, start)
        crossed = at >= 0 and any(token in whole[start:at] for token in self._special_tokens())
        return None if at < 0 or crossed else at

    def _start(self, whole: str, before: list[dict], tools) -> tuple[int, bool]:
        """Where an answer begins: the end of the longest rendered prompt that `whole` begins with.

        Also whether the template has a generation prompt at all.
        """
        bare, prompt = self._render(before, tools, False), self._render(before, tools, True)
        prompts = [prompt]
        if "enable_thinking" in self.template and "enable_thinking" not in self.kwargs:
            # Without reasoning, some templates put an empty thought into the prompt: not written by the
            # model.
            prompts.append(self._render(before, tools, True, enable_thinking=False))
        fitting = [text for text in prompts if whole.startswith(text)]
        if not fitting:
            raise UnusableRow(_UNSPLITTABLE)
        return max(map(len, fitting)), prompt != bare

    def _closing(self, tail: str) -> str:
        """The part of `tail` up to and including its end token; empty where the template writes none."""
        found = [(tail.find(token), -len(token)) for token in self._special_tokens() if token in tail]
        if not found:
            return ""
        at, length = min(found)
        return tail[: at - length] if not tail[:at].strip() else ""

    def _special_tokens(self) -> list[str]:
        """Special tokens' texts; markers of a thought are ordinary text here."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        names = dict.fromkeys([*self.tokenizer.all_special_tokens, *added])
        return [name for name in names if "think" not in name.lower()]

    def _mask_spans(self, whole: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        if not getattr(self.tokenizer, "is_fast", False):
            return self._mask_by_prefix(whole, spans)
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        mask = [any(start <= first and last <= end and first < end for start, end in spans) for first, last in offsets]
        return ids, mask

    def _mask_by_prefix(self, whole: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """For tokenizers without offsets: token counts of the text up to each border, checked as prefixes."""
        ids = self._encode(whole)
        mask = [False] * len(ids)
        for start, end in spans:
            head, through = self._encode(whole[:start]), self._encode(whole[:end])
            if ids[: len(head)] != head or ids[: len(through)] != through:
                raise UnusableRow("tokens that cross the border of an answer")
            mask[len(head) : len(through)] = [True] * (len(through) - len(head))
        return ids, mask


def _parts(message: dict) -> tuple[str, str]:
    """A message's thought and its answer; a thought may stand inside the content, before `</think>`."""
    thought, answer = message.get("reasoning_content") or "", message["content"]
    if "</think>" in answer:
        inner, answer = answer.rsplit("</think>", 1)
        thought = thought or inner.rsplit("<think>", 1)[-1]
    return thought.strip(), answer.strip()
