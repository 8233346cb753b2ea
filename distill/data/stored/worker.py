"""A process that tokenizes texts for another one, see `encoding.py`.

It runs as a script with the number of its connection's file descriptor, and imports neither torch nor this project, so
that it starts in a fraction of a second, takes little memory, and doesn't depend on how the other process was started.
"""

import signal
import sys
from collections.abc import Sequence
from itertools import chain
from multiprocessing.connection import Connection

import numpy as np
from tokenizers import Tokenizer

Encoding = tuple[np.ndarray, np.ndarray]  # ids of all texts, one after another, int32 [tokens]; lengths, int32 [texts]


def join_ids(rows: Sequence[Sequence[int]]) -> Encoding:
    """Returns the ids of several texts, and the number of each text's ids."""
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum(dtype=np.int64))), lengths


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> Encoding:
    """Returns the ids of texts without special tokens."""
    return join_ids([each.ids for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)])


def load_rules(rules: str, *, split_special_tokens: bool) -> Tokenizer:
    """Returns the tokenizer of rules in JSON, which neither pads nor truncates."""
    tokenizer = Tokenizer.from_str(rules)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = split_special_tokens  # isn't part of the rules
    return tokenizer


def serve(connection: Connection) -> None:
    """Answers requests until the other process closes the connection or ends; an error is an answer, too."""
    rules, split_special_tokens = connection.recv()
    tokenizer = load_rules(rules, split_special_tokens=split_special_tokens)
    while True:
        try:
            texts = connection.recv()
        except EOFError:
            return
        try:
            connection.send(encode_texts(tokenizer, texts))
        except Exception as error:  # noqa: BLE001 - the library raises no other
            connection.send(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the other one closes the connection
    serve(Connection(int(sys.argv[1])))
