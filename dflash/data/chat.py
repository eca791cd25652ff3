"""The one form that a chat has here, whatever it was stored as: OpenAI messages, ShareGPT turns, JSON text in a column.

`chat_of` reads a row into a `Chat`, `question_of` the part of it that a target is asked to answer. Both raise
`UnusableRow` with the reason that is counted. Templates and servers get messages made from the `Chat`, never the row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
}
_CALLS = ("function_call", "tool_call")  # roles of a turn whose whole text is its calls
_SYSTEM = ("system", "system_prompt", "system_message")  # columns that hold the first turn
_UNTRAINED = ("weight", "loss", "train")  # 0 or false: the data wants no training on this answer
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of a thought, in data and in templates
_READ = {"role", "from", "content", "value", "tool_calls", "function_call", *REASONING}  # the rest is kept as it is


class UnusableRow(Exception):
    """A row that no conversation can be made of: the reason that is counted, and what to say of this row alone."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail or reason


@dataclass(frozen=True)
class ToolCall:
    """One call: its arguments as an object and as the JSON text that the row had. `more`: id, type and the like."""

    name: str
    arguments: dict
    text: str
    more: dict = field(default_factory=dict)

    def message(self, as_text: bool) -> dict:
        return {"type": "function", **self.more} | {
            "function": {"name": self.name, "arguments": self.text if as_text else self.arguments}
        }


@dataclass(frozen=True)
class Turn:
    """One message. `more` holds what else the row says of it (name, tool_call_id ...), nulls left out; `trained` is false
    where it says that this answer is not to be learnt."""

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    more: dict = field(default_factory=dict)
    trained: bool = True

    def message(self, arguments_as_text: bool = False, empty: str | None = "") -> dict:
        """As OpenAI writes it. `empty` is the content of a turn that only calls tools."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or empty
            message["tool_calls"] = [call.message(arguments_as_text) for call in self.calls]
        return message | self.more


@dataclass(frozen=True)
class Chat:
    """Turns, the tools that were offered, and what the row passes to its template (`enable_thinking` and the like)."""

    turns: tuple[Turn, ...]
    tools: tuple[dict, ...] = ()
    template_kwargs: dict = field(default_factory=dict)

    def messages(self, arguments_as_text: bool = False, empty: str | None = "") -> list[dict]:
        return [turn.message(arguments_as_text, empty) for turn in self.turns]

    @property
    def last_question(self) -> str:
        """The text of the last user turn."""
        return next((turn.content for turn in reversed(self.turns) if turn.role == "user"), "")


def chat_of(row: dict) -> Chat:
    """The chat of a data row. Raises UnusableRow where it is no text conversation with an answer."""
    chat = _chat(row, _turns_of(row))
    if not any(turn.role == "assistant" for turn in chat.turns):
        raise UnusableRow("no assistant turn")
    return chat


def question_of(row: dict) -> Chat:
    """The chat without the answers at its end; a `prompt` is a user turn. Raises UnusableRow without a user turn."""
    turns = _turns_of(row) or row.get("prompt")
    try:
        plain = isinstance(turns, str) and turns == row.get("prompt")
        chat = _chat(row, [{"role": "user", "content": turns}] if plain else turns)
    except UnusableRow as error:
        raise UnusableRow(error.reason, f"has no user message that can be read ({error.detail})") from error
    kept = list(chat.turns)
    while kept and kept[-1].role == "assistant":
        kept.pop()
    if not any(turn.role == "user" and turn.content for turn in kept):
        raise UnusableRow("no user message", "has no user message; wanted `messages`, `conversations` or `prompt`")
    return replace(chat, turns=tuple(kept))


def _turns_of(row: dict) -> Any:
    return row.get("messages") or row.get("conversations") or row.get("conversation")


def _chat(row: dict, turns: Any) -> Chat:
    turns = _parsed(turns, "messages")
    if isinstance(turns, dict) and all(isinstance(column, list) for column in turns.values()):  # a list for each field
        turns = [dict(zip(turns, values, strict=False)) for values in zip(*turns.values(), strict=False)]
    if not isinstance(turns, list) or not turns:
        found = ", ".join(map(str, row)) or "nothing"
        raise UnusableRow(
            "no messages, conversations or token ids",
            f"holds {found}; wanted `messages` or `conversations` as a list of turns, or token ids",
        )
    found = [_turn(turn) for turn in turns]
    system = _text(next((row[name] for name in _SYSTEM if row.get(name)), None))
    if system.strip() and found[0].role != "system":
        found.insert(0, Turn("system", system))
    tools, kwargs = _tools(row), _parsed(row.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(kwargs, dict):
        raise UnusableRow("chat_template_kwargs that are no object")
    chat = Chat(tuple(found), tools, {str(name): value for name, value in kwargs.items() if value is not None})
    try:
        json.dumps([chat.messages(), tools], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise UnusableRow("text that is no valid Unicode", f"holds half of a surrogate pair ({error.reason})") from error
    return chat


def _turn(turn: Any) -> Turn:
    if not isinstance(turn, dict):
        raise UnusableRow("a turn that is no object")
    turn = {key: value for key, value in turn.items() if value is not None}
    name = str(turn.get("role") or turn.get("from")).strip().lower()
    role = _ROLES.get(name)
    if role is None:
        raise UnusableRow(f"unknown role '{name}'")
    content = turn.get("content", turn.get("value"))
    if content is None and role in ("user", "system"):
        raise UnusableRow("a turn without content", f"has a {role} turn that holds {', '.join(turn)}; wanted `content`")
    given = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else None)
    if name in _CALLS:
        content, given = "", content
    more = {key: value for key, value in turn.items() if key not in _READ}
    more = json.loads(json.dumps(more, default=str)) if more else {}  # a table may hold times, which JSON has not
    reasoning = next((turn[key] for key in REASONING if isinstance(turn.get(key), str) and turn[key].strip()), "")
    trained = all(turn.get(key, True) for key in _UNTRAINED)
    return Turn(role, _text(content), reasoning if role == "assistant" else "", _calls(given), more, trained)


def _text(content: Any) -> str:
    """Message text; a list of parts is joined when every part is text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else _part(part) for part in content]
        if all(part is not None for part in parts):
            return "".join(parts)
    raise UnusableRow("content that is not text")


def _part(part: Any) -> str | None:
    plain = isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text")
    return (part.get("text") or "") if plain and isinstance(part.get("text") or "", str) else None


def _parsed(value: Any, name: str) -> Any:
    """A column that may hold its value as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise UnusableRow(f"{name} that are no JSON", f"has {name} as text that is no JSON ({error})") from error


def _calls(value: Any) -> tuple[ToolCall, ...]:
    value = _parsed(value, "tool_calls")
    if not value:
        return ()
    return tuple(_call(call) for call in (value if isinstance(value, list) else [value]))


def _call(value: Any) -> ToolCall:
    call = _parsed(value, "tool_calls")
    function = _parsed(call.get("function") or call, "tool_calls") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UnusableRow("a tool call without a function's name")
    given = function.get("arguments", function.get("parameters"))
    arguments = _parsed(given.strip() if isinstance(given, str) else given, "tool call arguments") if given else {}
    if not isinstance(arguments, dict):
        raise UnusableRow("tool call arguments that are no object")
    text = given if isinstance(given, str) and given.strip() else json.dumps(arguments, ensure_ascii=False)
    unread = ("function", "name", "arguments", "parameters")
    return ToolCall(
        function["name"],
        arguments,
        text,
        {key: item for key, item in call.items() if item is not None and key not in unread},
    )


def _tools(row: dict) -> tuple[dict, ...]:
    value = _parsed(row.get("tools") or None, "tools")
    if not value and row.get("functions"):
        value = [{"type": "function", "function": item} for item in _parsed(row["functions"], "functions")]
    tools = [_parsed(tool, "tools") for tool in (value if isinstance(value, list) else [value])] if value else []
    if not all(isinstance(tool, dict) for tool in tools):
        raise UnusableRow("tools that are no objects")
    return tuple(tools)
