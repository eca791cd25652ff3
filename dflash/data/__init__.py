"""Conversations to token ids, loss masks and packs; answers written by the target.

`load_conversations` reads a file (`reading`), brings each row into one form (`chat`), keeps its token ids or renders it
(`rendering`, `spans`), and reports (`report`); `split_held_out` and `make_packs` (`packing`) make training rows of them.
"""

from dflash.data.chat import UnusableRow, chat_of, question_of
from dflash.data.conversations import iter_conversations, load_conversations
from dflash.data.packing import Conversation, Pack, make_packs, split_held_out
from dflash.data.random_ids import random_conversations, random_packs
from dflash.data.rendering import ChatRenderer, prompt_reader
from dflash.data.report import DataReport

__all__ = [
    "ChatRenderer",
    "Conversation",
    "DataReport",
    "Pack",
    "UnusableRow",
    "chat_of",
    "iter_conversations",
    "load_conversations",
    "make_packs",
    "prompt_reader",
    "question_of",
    "random_conversations",
    "random_packs",
    "split_held_out",
]
