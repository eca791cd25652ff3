"""A byte-level tokenizer built in code, and chat templates of our own that behave like the common ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<think>", "</think>", "<|unused|>"]

CHATML = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
TAGS_AROUND_NOTHING = CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
TAGS_AROUND_ALL = "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"
# Drops the reasoning of every turn before the last user turn; with none, puts an empty thought into the last turn.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|begin|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last and (loop.last or m.get('reasoning_content')) %}"
    "<think>\n{{ (m.get('reasoning_content') or '').strip() }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
NO_PROMPT = "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
# Writes the length of every answer in front: nothing can be marked without changing the render.
UNSPLITTABLE = "{% for m in messages %}{{ m['content'] | length }} {% endfor %}\n" + CHATML
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat_tokenizer(template: str | None = CHATML, more: tuple[str, ...] = (), eos: str = "<|end|>"):
    """One token per byte, six special tokens first (ids 0 to 5), those of `more` last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIAL + alphabet + list(more))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=eos,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        additional_special_tokens=["<think>", "</think>", "<|unused|>", *more],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def ids_of(tokenizer, text: str) -> list[int]:
    """Ids by hand: special tokens by name, everything else byte by byte."""
    table = tokenizer.get_vocab()
    bytes_to_token = dict(zip(_byte_order(), _byte_tokens(), strict=True))
    ids, at = [], 0
    while at < len(text):
        special = next((name for name in SPECIAL if text.startswith(name, at)), None)
        if special:
            ids.append(table[special])
            at += len(special)
        else:
            ids += [table[bytes_to_token[byte]] for byte in text[at].encode()]
            at += 1
    return ids


def _byte_order() -> list[int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [byte for byte in range(256) if byte not in printable]


def _byte_tokens() -> list[str]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + number) for number in range(256 - len(printable))]


def save_material(root: Path, model, tokenizer: PreTrainedTokenizerFast) -> None:
    """What a run needs: the target under `root/target`, and 24 short conversations in `root/data.jsonl`."""
    model.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    words = random.Random(1)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": " ".join(words.choices(["yes", "no", "why", "so"], k=9))},
            ]
        }
        for number in range(24)
    ]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
