"""Public chat templates against kinds of chat: what is trained, what is dropped and why. Makes the table of docs/data.md.

python tests/template_matrix.py     writes it
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from chat_tokenizer import chat_tokenizer  # noqa: E402

from dflash.data import ChatRenderer, UnusableRow, chat_of  # noqa: E402

TEMPLATES = ROOT / "tests" / "templates"
PAGE = ROOT / "docs" / "data.md"
BEGIN, END = "<!-- templates: made by tests/template_matrix.py -->", "<!-- end of templates -->"
_TOKENS = r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_turn>|\[gMASK\]|<sop>"

# Name, file, end token, and what the model writes in a render: the group of a regex written from the model's own markers.
_CHATML = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"
_OPENED = r"<\|im_start\|>assistant\n(?:<think>\n(?:\n</think>\n\n)?)?(.*?<\|im_end\|>)"
_DEEPSEEK = r"(?:<｜Assistant｜>|<｜tool▁outputs▁end｜>)(.*?<｜end▁of▁sentence｜>)"
_HARMONY = (
    r"<\|start\|>assistant((?:<\|channel\|>analysis.*?(?:<\|return\|>|<\|call\|>))"
    r"|.*?(?:<\|return\|>|<\|call\|>|(?=<\|end\|>)))"
)
MODELS = {
    "Qwen2.5": ("qwen2_5", "<|im_end|>", _CHATML),
    "Qwen3": ("qwen3", "<|im_end|>", r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)"),
    "Qwen3-Thinking-2507": ("qwen3", "<|im_end|>", _OPENED),
    "Qwen3.5": ("qwen3_5", "<|im_end|>", _OPENED),
    "Qwen3.6": ("qwen3_6", "<|im_end|>", _OPENED),
    "Llama 3 (ours)": (
        "llama3_like",
        "<|eot_id|>",
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
    ),
    "Gemma 3 (ours)": ("gemma3_like", "<end_of_turn>", r"<start_of_turn>model\n(.*?<end_of_turn>)"),
    "Mistral Small 3.2": ("mistral_small_3_2", "</s>", r"\[/(?:INST|TOOL_RESULTS)\](?!\[INST\])(.*?</s>)"),
    "GLM-4.5": ("glm4_5", "<|endoftext|>", r"<\|assistant\|>(?:\n<think></think>)?(.*?)(?=<\|user\|>|<\|observation\|>|\Z)"),
    "gpt-oss": ("gpt_oss", "<|return|>", _HARMONY),
    "DeepSeek-V3": ("deepseek_v3", "<｜end▁of▁sentence｜>", _DEEPSEEK),
    "SmolLM3": ("smollm3", "<|im_end|>", r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n)?(.*?<\|im_end\|>)"),
    "Phi-4": ("phi4", "<|im_end|>", r"<\|im_start\|>assistant<\|im_sep\|>(.*?<\|im_end\|>)"),
}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
    },
}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text} | more


def called(city, text="", **more):
    call = {"type": "function", "id": "abcdef123", "function": {"name": "weather", "arguments": {"city": city}}}
    return said(text, tool_calls=[call], **more)


def told(text):
    return {"role": "tool", "name": "weather", "tool_call_id": "abcdef123", "content": text}


KINDS = {
    "single turn": {"messages": [user("Why?"), said("So.")]},
    "multi-turn": {"messages": [user("Why?"), said("So."), user("And?"), said("No."), user("Yes?"), said("Yes.")]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, user("Why?"), said("So.")]},
    "tools": {"messages": [user("Rain?"), called("Rome"), told("dry"), said("It is dry.")], "tools": [TOOL]},
    "tools, multi-turn": {
        "messages": [
            user("Rain?"),
            called("Rome"),
            told("dry"),
            said("It is dry."),
            user("And Oslo?"),
            called("Oslo"),
            told("wet"),
            said("It is wet."),
        ],
        "tools": [TOOL],
    },
    "reasoning": {
        "messages": [
            user("Why?"),
            said("So.", reasoning_content="It is so."),
            user("And?"),
            said("No.", reasoning_content="No idea."),
        ]
    },
    "empty reasoning": {
        "messages": [user("Why?"), said("So.", reasoning_content=""), user("And?"), said("No.", reasoning_content="")]
    },
}


def template_of(model: str) -> str:
    text = (TEMPLATES / f"{MODELS[model][0]}.jinja").read_text()
    if model == "Qwen3-Thinking-2507":
        head, prompt = text.split("{%- if add_generation_prompt %}")
        assert "enable_thinking" in prompt
        return head + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    return text


def tokenizer_of(model: str):
    template, end = template_of(model), MODELS[model][1]
    specials = dict.fromkeys([end, *re.findall(_TOKENS, template)])
    return chat_tokenizer(template, tuple(name for name in specials if name not in ("<|end|>",)), eos=end)


def outcome(model: str, kind: str) -> str:
    """What becomes of a chat: trained, with the thoughts that the template left out, or dropped with the reason."""
    renderer = ChatRenderer(tokenizer_of(model))
    try:
        renderer(chat_of(KINDS[kind]))
    except UnusableRow as reason:
        return f"dropped: {reason}"
    assert all(note == "thoughts that the chat template leaves out" for note in renderer.notes)
    left_out = renderer.notes.total()
    return f"trained, {left_out} of 2 thoughts left out" if left_out else "trained"


def table() -> str:
    lines = [f"| template | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    for model in MODELS:
        lines.append(f"| {model} | {' | '.join(outcome(model, kind) for kind in KINDS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
