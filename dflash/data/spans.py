"""Where in a chat's render the assistant's text stands.

The chat is rendered as a whole, and once more with invisible marks around each answer, thought and tool call: the marks
say where these stand in the whole, whatever a template does to earlier turns because of later ones. An answer begins where
the generation prompt of its turn ends and runs through its end token. An empty thought that the template wrote is not the
model's. What cannot be found is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dflash.data.chat import Chat, Turn, UnusableRow

if TYPE_CHECKING:
    from dflash.data.rendering import ChatRenderer

_UNSPLITTABLE = "the chat template cannot be split at an assistant turn"
_UNWRITTEN = "tool calls that the chat template does not write"
_MARKS = 0x100000  # first code point of the marks: the last private plane, which no font uses
_PER_TURN = 6
_OPENINGS = r"<(?:\w+:)?think(?:ing)?>|\[THINK\]|<\|START_THINKING\|>|<\|channel>thought|◁think▷"
_OPENING = re.compile(_OPENINGS)
_OPENED = re.compile(rf"(?:{_OPENINGS})\s*\Z")
_EMPTY_THOUGHT = re.compile(
    r"(?:<((?:\w+:)?think(?:ing)?)>\s*</\1>|\[THINK\]\s*\[/THINK\]|<\|START_THINKING\|>\s*<\|END_THINKING\|>"
    r"|<\|channel>thought\s*<channel\|>|◁think▷\s*◁/think▷)(\s*)"
)

Span = tuple[int, int]


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


class Rendering:
    """One chat under one template: its whole render, and the spans of the assistant's text in it."""

    def __init__(self, renderer: ChatRenderer, chat: Chat):
        self.renderer, self.chat = renderer, chat
        self.template, self.kwargs = renderer.template, {**chat.template_kwargs, **renderer.kwargs}
        self.notes: list[str] = []
        self.as_text, self.empty = False, ""
        self.whole = self._settle()
        if chat.tools and not any(_tool_name(tool) in self.whole for tool in chat.tools):
            self.notes.append("tools that the chat template does not write")
        if any(turn.content.strip() not in self.whole for turn in chat.turns if turn.role in ("user", "system")):
            self.notes.append("a user or system turn whose text the chat template leaves out or changes")

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
                problem = problem or refused(error)
                continue
            as_python = not self.as_text and any(call.arguments and str(call.arguments) in whole for call in calls)
            if not as_python and all(call.name in whole for call in calls):
                return whole
            problem = problem or UnusableRow(_UNWRITTEN)
        raise problem

    def spans(self) -> list[Span]:
        """What the assistant wrote in each of its turns that are trained."""
        if self.chat.turns[0].role == "assistant":
            raise UnusableRow("a chat that begins with an answer")
        found, lower = [], 0
        places = self._places()
        for index, here in places.items():
            start = self._start(index, here, lower)
            start = self._empty_thought(here, lower, start) or start
            if start is None:
                raise UnusableRow(_UNSPLITTABLE)
            lower = self._end(index, here)
            if self.chat.turns[index].trained:
                found.append((start, lower))
        return found

    def tagged_spans(self) -> list[Span]:
        """What the template's generation tags mark, without the empty thoughts that it wrote and answers not trained."""
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
        if all(turn.trained for turn in self.chat.turns) and not _EMPTY_THOUGHT.search(self.whole):
            return spans
        for index, here in places.items():
            through = self._end(index, here)
            if self.chat.turns[index].trained:
                begin = self._empty_thought(here, lower, self._start(index, here, lower))
            else:
                begin = through
            if begin:
                parts = [part for start, end in spans for part in ((start, min(end, lower)), (max(start, begin), end))]
                spans = [(start, end) for start, end in parts if start < end]
            lower = through
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
        if parts_of(turn)[1].strip() and not thought:
            self.notes.append("thoughts that the chat template leaves out")
        answer = (answer_open[0], answer_close[0]) if answer_open else None
        calls = (calls_open[0], calls_close[0]) if calls_open and calls_close else None  # names may be written again later
        if turn.calls and not calls:  # none of them, or not the last
            raise UnusableRow(_UNWRITTEN)
        if answer is None and calls is None:
            raise UnusableRow("an answer that the chat template leaves out")
        if answer and answer[0] > answer[1]:
            raise UnusableRow(_UNSPLITTABLE)
        if answer is None and parts_of(turn)[2].strip():
            self.notes.append("text beside tool calls that the chat template leaves out")
        return _Places(thought[0] if thought else None, answer, calls)

    def _start(self, index: int, here: _Places, lower: int) -> int | None:
        """Where the model begins to write: after the longest generation prompt that stands before the turn's text."""
        whole, before = self.whole, self.chat.turns[:index]
        ends, shorter = [], []

        def look(found: list[int], header: str, bare: str) -> None:
            if not header:  # the answer follows the message before it at once: look for how that one ends
                at = max((bare.rfind(token) for token in self.renderer.special), default=-1)
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
        found = [(tail.find(token), -len(token)) for token in self.renderer.special if token in tail]
        if not found:
            return ""
        at, length = min(found)
        return tail[: at - length] if not tail[:at].strip() else ""


def refused(error: Exception) -> UnusableRow:
    text = " ".join(str(error).split())
    return UnusableRow(f"the chat template refused it ({text[:60]})", f"was refused by the chat template: {text[:200]}")


def parts_of(turn: Turn) -> tuple[str, str, str]:
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
    before, thought, answer = parts_of(turn)
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
