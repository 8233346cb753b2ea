"""Data sets of conversations: conversations to train on, and held-out conversations."""

import json
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.rows.chat import Chat, Completed, chats_of, is_empty
from distill.data.rows.documents import check_plain
from distill.data.sources.tables import read_splits
from distill.data.splits.evaluated import choose_test
from distill.data.splits.findings import Findings
from distill.data.splits.holdout import hold_out_missing, parted
from distill.data.splits.labelled import Examples, Splits
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
        if any(isinstance(chat, Completed) for chat in self.texts):
            return pa.table({name: [vars(chat)[name] for chat in self.texts] for name in ("prompt", "completion")})
        told = [json.dumps(vars(chat)["messages"], ensure_ascii=False) for chat in self.texts]
        return pa.table({"messages": pa.array(told, pa.string())})

    def message_texts(self) -> Examples:
        """Returns the content of each conversation as plain text."""
        said = [
            f"{chat.prompt}{chat.completion}"
            if isinstance(chat, Completed)
            else "\n".join(str(turn.get("content", "")) for turn in chat.messages)
            for chat in self.texts
        ]
        return Examples(said, None)

    @classmethod
    def from_table(cls, table: pa.Table) -> "Conversations":
        return cls(chats_of(table, "data"))


def load_conversations(config: DataConfig, seed: int = 0) -> Splits:
    """Reads every split without empty conversations, and holds some out of train for a missing validation or test
    split.

    Raises:
        InputError: `chats_of` fails, or a split has only empty conversations.
    """
    check_plain(config)
    findings = Findings()
    found = choose_test(tables(config), config, findings)
    read = {name: chats_of(table, f"data {config.path!r}, {name}") for name, table in found.items()}
    rows = {name: [chat for chat in chats if not is_empty(chat)] for name, chats in read.items()}
    for name, kept in rows.items():
        findings.add_dropped_empty(name, len(read[name]) - len(kept), len(read[name]))
        if not kept:
            raise InputError(
                f"data {config.path!r}, {name}: expected conversations, found {len(read[name])} empty ones"
            )
    hold_out_missing(rows, findings, config, partial(held_out, seed))
    parts = {name: Conversations(rows[name]) for name in ("train", "validation", "test")}
    report_overlap({name: part.message_texts() for name, part in parts.items()}, findings, "conversations")
    return Splits((), **parts, unlabelled=Conversations([]), notes=findings.counts, remarks=findings.remarks)


def load_bare_conversations(config: DataConfig) -> Conversations:
    """Returns every training conversation that isn't empty."""
    chats = chats_of(tables(config)["train"], f"data {config.path!r}, train")
    return Conversations([chat for chat in chats if not is_empty(chat)])


def tables(config: DataConfig) -> dict[str, pa.Table]:
    if not config.path:
        raise InputError("data: no path given; name a folder, a file or a hub data set with --data")
    return read_splits(config.path, config.subset)


def held_out(seed: int, chats: list[Chat], fraction: float) -> tuple[list[Chat], list[Chat], str]:
    kept, held = parted(chats, fraction, seed, "conversations")
    return kept, held, f"{len(held)} conversations held out of train, seed {seed}"
