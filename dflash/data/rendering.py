"""One chat as token ids and a loss mask that is true on what the assistant wrote, its end token included.

Stock chat templates do not say which tokens are the assistant's, and helpers then return a constant mask (verl and
Megatron-Bridge reports). So the spans are found here. The chat is rendered as a whole, and once more with invisible
marks around each answer and thought: the marks say where they stand in the whole, whatever a template does to earlier
turns because of later ones. An answer begins where the generation prompt of its turn ends and runs through its end
token. An empty thought that the template wrote is not the model's. Where a span cannot be found the chat is refused,
never masked wrongly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from dflash.data.chat import Chat, Turn, UnusableRow, chat_of
from dflash.errors import DataError

_UNSPLITTABLE = "the chat template cannot be split at an assistant turn"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKS = 0xF0000  # first code point of the marks: private, no text has them
_PER_TURN = 6
_OPENINGS = r"<(?:\w+:)?think(?:ing)?>|\[THINK\]|<\|START_THINKING\|>|<\|channel>thought|◁think▷"
_OPENING = re.compile(_OPENINGS)
_OPENED = re.compile(rf"(?:{_OPENINGS})\s*\Z")
_EMPTY_THOUGHT = re.compile(
    r"(?:<((?:\w+:)?think(?:ing)?)>\s*</\1>|\[THINK\]\s*\[/THINK\]|<\|START_THINKING\|>\s*<\|END_THINKING\|>"
    r"|<\|channel>thought\s*<channel\|>|◁think▷\s*◁/think▷)(\s*)"
)

Span = tuple[int, int]


class ConstantMaskError(DataError):
    """A template that marks no token of a chat, or every token."""


@dataclass
class _Places:
    """Where a turn's parts stand in the whole render, in characters; None where the template left one out."""

    thought: int | None
    answer: Span | None
    calls: Span | None  # from the first call's name to the last one's end

    @property
    def first(self) -> int:
        return min(
            at for at in (self.thought, self.answer and self.answer[0], self.calls and self.calls[0]) if at is not None
        )

    @property
    def last(self) -> int:
        return max(span[1] for span in (self.answer, self.calls) if span is not None)


class ChatRenderer:
    """Renders chats with one tokenizer and template.

    Args:
        tokenizer: a transformers tokenizer with a chat template (or give `template`).
        template: replaces the tokenizer's own. template_kwargs: passed on to it (for instance `enable_thinking`).

    `notes` counts what a template left out of chats that are used all the same.
    """

    def __init__(self, tokenizer, template: str | None = None, template_kwargs: dict | None = None):
        self.tokenizer = tokenizer
        self.template = template or tokenizer.chat_template
        self.kwargs = dict(template_kwargs or {})
        self.notes: Counter = Counter()
        if not self.template:
            raise DataError(
                f"tokenizer '{tokenizer.name_or_path}' has no chat template, as a base model has none; give one with "
                "`template`, or rows with token ids (`prompt_ids` and `response_ids`), as `dflash regenerate` writes them"
            )
        if isinstance(self.template, dict):
            self.template = self.template.get("default") or next(iter(self.template.values()))
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        names = dict.fromkeys([*tokenizer.all_special_tokens, *added])
        self._special = [name for name in names if "think" not in name.lower()]  # a thought's markers are ordinary text

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
        if any(turn.role == "assistant" and not _parts(turn)[2].strip() and not turn.calls for turn in chat.turns):
            raise UnusableRow("empty answer")
        try:
            rendering = _Rendering(self, chat)
            spans = rendering.tagged_spans() if _GENERATION_TAG.search(self.template) else rendering.spans()
        except (UnusableRow, DataError):
            raise
        except Exception as error:  # a template may refuse a chat (roles that must alternate, for instance)
            raise _refused(error) from error
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
            return self._encode(_Rendering(self, chat).render(chat.turns, True))
        except UnusableRow:
            raise
        except Exception as error:
            raise _refused(error) from error

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


class _Rendering:
    """One chat under one template: its whole render, and the spans of the assistant's text in it."""

    def __init__(self, renderer: ChatRenderer, chat: Chat):
        self.renderer, self.chat = renderer, chat
        self.template, self.kwargs = renderer.template, renderer.kwargs
        self.notes: list[str] = []
        self.as_text, self.empty = False, ""
        self.whole = self._settle()
        if chat.tools and not any(_tool_name(tool) in self.whole for tool in chat.tools):
            self.notes.append("tools that the chat template does not write")

    def render(self, turns: tuple[Turn, ...], generation_prompt: bool, **more) -> str:
        messages = [turn.message(self.as_text, self.empty) for turn in turns]
        for message in messages:  # templates read a thought under different names
            if "reasoning_content" in message:
                names = [name for name in ("thinking", "reasoning") if re.search(rf"\b{name}\b", self.template)]
                message.update(dict.fromkeys(names, message["reasoning_content"]))
        return self.renderer.tokenizer.apply_chat_template(
            messages,
            tools=list(self.chat.tools) or None,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **{**self.kwargs, **more},
        )

    def _settle(self) -> str:
        """The whole render, tool calls given as this template reads them: objects or JSON text, "" or null for no text."""
        calls = [call for turn in self.chat.turns for call in turn.calls]
        if not calls:
            return self.render(self.chat.turns, False)
        problem: Exception | None = None
        for self.as_text, self.empty in ((False, ""), (False, None), (True, ""), (True, None)):
            try:
                whole = self.render(self.chat.turns, False)
            except Exception as error:
                problem = problem or _refused(error)
                continue
            as_python = not self.as_text and any(call.arguments and str(call.arguments) in whole for call in calls)
            if not as_python and all(call.name in whole for call in calls):
                return whole
            problem = problem or UnusableRow("tool calls that the chat template does not write")
        raise problem

    def spans(self) -> list[Span]:
        """What the assistant wrote in each of its turns."""
        found, lower = [], 0
        places = self._places()
        for index, here in places.items():
            start = self._start(index, here, lower)
            start = self._empty_thought(here, lower, start) or start
            if start is None:
                raise UnusableRow(_UNSPLITTABLE)
            lower = self._end(index, here)
            found.append((start, lower))
        return found

    def tagged_spans(self) -> list[Span]:
        """What the template's generation tags mark, without the empty thoughts that it wrote."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, marked = render_jinja_template(
            [[turn.message(self.as_text, self.empty) for turn in self.chat.turns]],
            tools=list(self.chat.tools) or None,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **{**self.renderer.tokenizer.special_tokens_map, **self.kwargs},
        )
        if rendered[0] != self.whole:
            raise UnusableRow("a chat template that renders otherwise with its generation tags")
        spans, lower, places = [(int(start), int(end)) for start, end in marked[0]], 0, self._places()
        if not _EMPTY_THOUGHT.search(self.whole):
            return spans
        for index, here in places.items():
            begin = self._empty_thought(here, lower, self._start(index, here, lower))
            if begin:
                parts = [part for start, end in spans for part in ((start, min(end, lower)), (max(start, begin), end))]
                spans = [(start, end) for start, end in parts if start < end]
            lower = here.last
        return spans

    # -- where things stand ----------------------------------------------------------------------------------
    def _places(self) -> dict[int, _Places]:
        """By index of each assistant turn: where its thought, answer and calls stand in the whole."""
        self.marked = tuple(_mark(turn, index) for index, turn in enumerate(self.chat.turns))
        text, at = self.render(self.marked, False), {}
        plain, where = [], 0
        for character in text:
            if ord(character) < _MARKS:
                plain.append(character)
                where += 1
            else:
                at.setdefault(character, []).append(where)
        if "".join(plain) != self.whole:
            raise UnusableRow(_UNSPLITTABLE)
        return {index: self._place(index, at) for index, turn in enumerate(self.chat.turns) if turn.role == "assistant"}

    def _place(self, index: int, at: dict[str, list[int]]) -> _Places:
        thought, answer_open, answer_close, calls_open, calls_close, thought_close = (
            at.get(mark, []) for mark in _marks(index)
        )
        turn = self.chat.turns[index]
        if max(map(len, (thought, answer_open, answer_close))) > 1 or len(answer_open) != len(answer_close):
            raise UnusableRow(_UNSPLITTABLE)
        if _parts(turn)[1].strip() and not thought:
            self.notes.append("thoughts that the chat template leaves out")
        answer = (answer_open[0], answer_close[0]) if answer_open else None
        calls = (calls_open[0], calls_close[0]) if calls_open and calls_close else None  # names may be written again later
        if (turn.calls and not calls) or (answer is None and calls is None) or (answer and answer[0] > answer[1]):
            raise UnusableRow("an answer that the chat template leaves out" if answer is None else _UNSPLITTABLE)
        if answer is None and _parts(turn)[2].strip():
            self.notes.append("text beside tool calls that the chat template leaves out")
        return _Places(thought[0] if thought else None, answer, calls)

    def _start(self, index: int, here: _Places, lower: int) -> int | None:
        """Where the model begins to write: after the longest generation prompt that stands before the turn's text."""
        whole, before = self.whole, self.chat.turns[:index]
        ends, shorter = [], []

        def look(found: list[int], header: str, bare: str) -> None:
            if not header:  # the answer follows the message before it at once: look for how that one ends
                at = max((bare.rfind(token) for token in self.renderer._special), default=-1)
                header = bare[at:] if at >= 0 else ""
            at = whole.rfind(header, lower, here.first) if header.strip() else -1
            found += [at + len(header)] if at >= 0 else []

        if "add_generation_prompt" not in self.template:  # see what it writes before a plain answer
            bare, mark = self.render(before, False), chr(_MARKS - 1)
            prompt = self.render((*before, Turn("assistant", mark)), False).split(mark)[0]
            look(ends, prompt[_common(prompt, bare) :], bare)
            if not ends and here.calls is None:
                opened = _OPENED.search(whole, lower, here.first) if here.thought is not None else None
                return opened.start() if opened else here.first
            return max(ends, default=None)
        for variant in [{}] + [{name: False} for name in ("enable_thinking", "thinking") if name in self.template]:
            bare, prompt = self.render(before, False, **variant), self.render(before, True, **variant)
            if lower <= len(prompt) <= here.first and whole.startswith(prompt):
                ends.append(len(prompt))
            header = prompt[_common(prompt, bare) :]
            look(ends, header, bare)
            opening = _OPENING.search(header)
            if opening:  # an earlier turn, whose thought the template has dropped
                look(shorter, header[: opening.start()] or " ", bare)
        return max(ends or shorter, default=None)

    def _empty_thought(self, here: _Places, lower: int, start: int | None) -> int | None:
        """Where an empty thought that the template wrote before the turn's text ends, its white space included."""
        pairs = list(_EMPTY_THOUGHT.finditer(self.whole, lower, here.first)) if here.thought is None else []
        if not pairs:
            return None
        return start if start is not None and start >= pairs[-1].start(2) else pairs[-1].end()

    def _end(self, index: int, here: _Places) -> int:
        """Where the turn's text ends, its end token included where the whole render has it."""
        until = self.render(self.marked[: index + 1], False)
        marks = _marks(index)
        last = max(until.rfind(marks[2]), until.find(marks[4]))
        tail = "".join(character for character in until[last + 1 :] if ord(character) < _MARKS).rstrip()
        if last >= 0 and self.whole.startswith(tail, here.last):
            return here.last + len(tail)
        closing = self._closing(tail)
        return here.last + len(closing) if self.whole.startswith(closing, here.last) else here.last

    def _closing(self, tail: str) -> str:
        """The part of `tail` up to and including its end token; empty where the template writes none."""
        found = [(tail.find(token), -len(token)) for token in self.renderer._special if token in tail]
        if not found:
            return ""
        at, length = min(found)
        return tail[: at - length] if not tail[:at].strip() else ""


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


def _refused(error: Exception) -> UnusableRow:
    text = " ".join(str(error).split())
    return UnusableRow(f"the chat template refused it ({text[:60]})", f"was refused by the chat template: {text[:200]}")


def _parts(turn: Turn) -> tuple[str, str, str]:
    """What stands before a turn's thought in its content, the thought, and the answer with what leads to it."""
    if turn.reasoning or "</think>" not in turn.content:
        return "", turn.reasoning, turn.content
    head, answer = turn.content.rsplit("</think>", 1)
    before, opening, thought = head.rpartition("<think>")
    return before + opening, thought, answer


def _marks(index: int) -> list[str]:
    """Of turn `index`: its thought begins, its answer begins and ends, its calls begin and end, its thought ends."""
    return [chr(_MARKS + _PER_TURN * index + offset) for offset in range(_PER_TURN)]


def _mark(turn: Turn, index: int) -> Turn:
    """The turn with marks around its thought, answer and first and last call's name, white space outside them."""
    if turn.role != "assistant":
        return turn
    thought_open, answer_open, answer_close, calls_open, calls_close, thought_close = _marks(index)
    before, thought, answer = _parts(turn)
    thought, answer = _wrapped(thought, thought_open, thought_close), _wrapped(answer, answer_open, answer_close)
    calls = list(turn.calls)
    if calls:
        calls[0] = replace(calls[0], name=calls_open + calls[0].name)
        calls[-1] = replace(calls[-1], name=calls[-1].name + calls_close)
    if turn.reasoning:
        return replace(turn, reasoning=thought, content=answer, calls=tuple(calls))
    closing = "</think>" if "</think>" in turn.content else ""
    return replace(turn, content=before + (thought if closing else "") + closing + answer, calls=tuple(calls))


def _wrapped(text: str, first: str, last: str) -> str:
    core = text.strip()
    at = text.find(core)
    return text[:at] + first + core + last + text[at + len(core) :] if core else text


def _tool_name(tool: dict) -> str:
    return str((tool.get("function") if isinstance(tool.get("function"), dict) else tool).get("name") or "")


def _common(first: str, second: str) -> int:
    """Length of the common start of two texts."""
    size = min(len(first), len(second))
    return next((at for at in range(size) if first[at] != second[at]), size) if first[:size] != second[:size] else size


def _inside(whole: str, first: int, last: int, start: int, end: int) -> bool:
    """Whether the token over [first, last) holds text of [start, end) and outside it white space alone."""
    if first == last:
        return start <= first < end
    if last <= start or first >= end:
        return False
    outside = whole[first : max(first, start)] + whole[min(last, end) : last]
    return not outside.strip()
