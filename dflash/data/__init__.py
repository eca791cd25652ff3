"""Conversations to token ids, loss masks and packs; answers written by the target.

`load_conversations` reads a file (`reading`), keeps its token ids or renders its chats (`rendering`), and
reports (`report`); `split_held_out` and `make_packs` (`packing`) make training rows of them.
"""

from dflash.data.conversations import cache_key, iter_conversations, load_conversations, tokenizer_fingerprint
from dflash.data.packing import Conversation, Pack, make_packs, split_held_out, stream_packs
from dflash.data.random_ids import random_conversations, random_packs
from dflash.data.rendering import ChatRenderer
from dflash.data.report import DataReport

__all__ = [
    "ChatRenderer",
    "Conversation",
    "DataReport",
    "Pack",
    "cache_key",
    "iter_conversations",
    "load_conversations",
    "make_packs",
    "random_conversations",
    "random_packs",
    "split_held_out",
    "stream_packs",
    "tokenizer_fingerprint",
]
