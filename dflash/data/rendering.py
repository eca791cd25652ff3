"""One chat as token ids and a loss mask that is true on what the assistant wrote, its end token included.

Stock chat templates do not say which tokens are the assistant's, and helpers then return a constant mask (verl and
Megatron-Bridge reports). So the spans are found in the render (`spans`). Where one cannot be found the chat is refused,
never masked wrongly.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from datetime import datetime

from dflash.data.chat import Chat, UnusableRow, chat_of
from dflash.data.spans import Rendering, Span, parts_of, refused
from dflash.errors import DataError

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


class ConstantMaskError(DataError):
    """A template that marks no token of a chat, or every token."""


class ChatRenderer:
    """Renders chats with one tokenizer and template.

    Args:
        tokenizer: a transformers tokenizer with a chat template (or give `template`).
        template: replaces the tokenizer's own. template_kwargs: passed on to it (for instance `enable_thinking`).
        day: the date that it writes where it asks for today's, as 2026-12-01; empty: today's.

    `notes` counts what a template left out of chats that are used all the same.
    """

    def __init__(self, tokenizer, template: str | None = None, template_kwargs: dict | None = None, day: str = ""):
        self.tokenizer = tokenizer
        self.template = template or tokenizer.chat_template
        self.kwargs = dict(template_kwargs or {})
        self.notes: Counter = Counter()
        if not self.template:
            raise DataError(
                f"tokenizer '{tokenizer.name_or_path}' has no chat template, as a base model has none; put one into its "
                "folder as chat_template.jinja, or give rows with token ids (`prompt_ids` and `response_ids`), as `dflash "
                "regenerate` writes them"
            )
        if isinstance(self.template, dict):
            self.template = self.template.get("default") or next(iter(self.template.values()))
        if day:  # templates take no functions, so the calls are written out
            date = datetime.fromisoformat(day)
            self.template = _NOW.sub(lambda call: json.dumps(date.strftime(call[2])), self.template)
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        names = dict.fromkeys([*tokenizer.all_special_tokens, *added])
        self.special = [name for name in names if "think" not in name.lower()]  # a thought's markers are ordinary text

    @property
    def name(self) -> str:
        """How messages name this template."""
        first = " ".join(self.template.split())[:60]
        return f"chat template of '{self.tokenizer.name_or_path or type(self.tokenizer).__name__}' ({first}...)"

    def __call__(self, chat: Chat | list[dict], tools=None) -> tuple[list[int], list[bool]]:
        """Token ids of the whole chat and the mask of the assistant's tokens.

        Raises UnusableRow (with a reason to count) or ConstantMaskError.
        """
        if not isinstance(chat, Chat):
            chat = chat_of({"messages": chat, "tools": tools})
        if any(turn.role == "assistant" and not parts_of(turn)[2].strip() and not turn.calls for turn in chat.turns):
            raise UnusableRow("empty answer")
        try:
            rendering = Rendering(self, chat)
            spans = rendering.tagged_spans() if _GENERATION_TAG.search(self.template) else rendering.spans()
        except (UnusableRow, DataError):
            raise
        except Exception as error:  # a template may refuse a chat (roles that must alternate, for instance)
            raise refused(error) from error
        ids, mask = self._mask_spans(rendering.whole, spans)
        if all(mask) or not any(mask):
            kind = "every token" if mask and all(mask) else "no token"
            raise ConstantMaskError(
                f"the {self.name} gives a loss mask that marks {kind} of a chat with an assistant turn; "
                "check its generation tags, or use another template"
            )
        self.notes.update(rendering.notes)
        return ids, mask

    def prompt_ids(self, chat: Chat) -> list[int]:
        """Ids that a model is given to answer this chat. Raises UnusableRow where the template refuses it."""
        try:
            return self._encode(Rendering(self, chat).render(chat.turns, True))
        except UnusableRow:
            raise
        except Exception as error:
            raise refused(error) from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _mask_spans(self, whole: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
        """A token is the assistant's when it holds text of a span, and beside it nothing but white space."""
        if not getattr(self.tokenizer, "is_fast", False):
            return self._mask_by_prefix(whole, spans)
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        mask = [
            any(_inside(whole, first, last, start, end) for start, end in spans) for first, last in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), mask

    def _mask_by_prefix(self, whole: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
        """For tokenizers without offsets: token counts of the text up to each border, checked as prefixes."""
        ids = self._encode(whole)
        mask = [False] * len(ids)
        for start, end in spans:
            head, through = self._encode(whole[:start]), self._encode(whole[:end])
            if ids[: len(head)] != head or ids[: len(through)] != through:
                raise UnusableRow("tokens that cross the border of an answer")
            mask[len(head) : len(through)] = [True] * (len(through) - len(head))
        return ids, mask


def prompt_reader(tokenizer, template_kwargs: dict | None = None) -> Callable[[Chat], list[int]]:
    """Reads a chat into the ids that a target is given to answer it; a base model continues a plain prompt."""
    if tokenizer.chat_template:
        return ChatRenderer(tokenizer, template_kwargs=template_kwargs).prompt_ids

    def plain(chat: Chat) -> list[int]:
        if len(chat.turns) != 1:
            raise UnusableRow(
                "a chat for a target without a chat template",
                "is a chat, and this target has no chat template (a base model); give prompts of plain text",
            )
        return list(tokenizer(chat.turns[0].content)["input_ids"])

    return plain


def _inside(whole: str, first: int, last: int, start: int, end: int) -> bool:
    """Whether the token over [first, last) holds text of [start, end) and outside it white space alone."""
    if first == last:
        return start <= first < end
    if last <= start or first >= end:
        return False
    outside = whole[first : max(first, start)] + whole[min(last, end) : last]
    return not outside.strip()
