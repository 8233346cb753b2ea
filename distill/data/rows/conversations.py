"""Data sets of conversations: conversations to train on, and held-out conversations."""

import json
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.rows.chat import Chat, PromptCompletion, is_empty, parse_chats
from distill.data.rows.documents import check_text_settings
from distill.data.sources.tables import read_splits
from distill.data.splits.evaluated import NO_PATH, choose_test
from distill.data.splits.examples import Examples, Splits
from distill.data.splits.findings import Findings
from distill.data.splits.holdout import hold_out_missing, split_at_random
from distill.data.splits.overlap import report_overlap
from distill.errors import InputError


@dataclass(frozen=True)
class Conversations:
    """Conversations, or prompts with completions, all of the same kind."""

    texts: list[Chat]
    pairs: None = None
    labels: tuple[()] = ()

    def __len__(self) -> int:
        return len(self.texts)

    def table(self) -> pa.Table:
        """Returns the conversations as a table; the inverse of `from_table`."""
        if any(isinstance(chat, PromptCompletion) for chat in self.texts):
            return pa.table({name: [vars(chat)[name] for chat in self.texts] for name in ("prompt", "completion")})
        messages = [json.dumps(vars(chat)["messages"], ensure_ascii=False) for chat in self.texts]
        return pa.table({"messages": pa.array(messages, pa.string())})

    def message_texts(self) -> Examples:
        """Returns the content of each conversation as plain text."""
        texts = [
            f"{chat.prompt}{chat.completion}"
            if isinstance(chat, PromptCompletion)
            else "\n".join(str(turn.get("content", "")) for turn in chat.messages)
            for chat in self.texts
        ]
        return Examples(texts, None)

    @classmethod
    def from_table(cls, table: pa.Table) -> "Conversations":
        """Returns the conversations of a table that `table` returned."""
        return cls(parse_chats(table, "data"))


def load_conversations(config: DataConfig, seed: int = 0) -> Splits:
    """Reads every split without empty conversations.

    For a missing validation or test split, conversations are held out of train.

    Raises:
        InputError: `parse_chats` fails, or a split has only empty conversations.
    """
    check_text_settings(config)
    findings = Findings()
    tables = choose_test(_read_tables(config), config, findings)
    chats = {name: parse_chats(table, f"data {config.path!r}, {name}") for name, table in tables.items()}
    rows = {name: [chat for chat in part if not is_empty(chat)] for name, part in chats.items()}
    for name, part in rows.items():
        findings.add_dropped_empty(name, len(chats[name]) - len(part), len(chats[name]))
        if not part:
            raise InputError(
                f"data {config.path!r}, {name}: expected conversations, found {len(chats[name])} empty ones"
            )
    hold_out_missing(rows, findings, config, partial(_hold_out_conversations, seed))
    parts = {name: Conversations(rows[name]) for name in ("train", "validation", "test")}
    report_overlap({name: part.message_texts() for name, part in parts.items()}, findings, "conversations")
    return Splits((), **parts, unlabelled=Conversations([]), notes=findings.counts, remarks=findings.remarks)


def load_all_conversations(config: DataConfig) -> Conversations:
    """Returns every training conversation that isn't empty."""
    chats = parse_chats(_read_tables(config)["train"], f"data {config.path!r}, train")
    return Conversations([chat for chat in chats if not is_empty(chat)])


def _read_tables(config: DataConfig) -> dict[str, pa.Table]:
    if not config.path:
        raise InputError(NO_PATH)
    return read_splits(config.path, config.subset)


def _hold_out_conversations(seed: int, chats: list[Chat], fraction: float) -> tuple[list[Chat], list[Chat], str]:
    remaining, held_out = split_at_random(chats, fraction, seed, "conversations")
    return remaining, held_out, f"{len(held_out)} conversations held out of train, seed {seed}"
