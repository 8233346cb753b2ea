"""Tokenization of texts in parallel processes, in the order of the texts."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from distill.data.batches.prefetch import Prefetcher
from distill.data.stored import worker
from distill.data.stored.worker import Encoding

CHARACTERS, ROWS = 1 << 19, 4096  # maximum sizes of what is tokenized together; a longer text is tokenized alone
_AHEAD = 3  # chunks per process that wait or are done


def count_processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_in_order(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, processes: int | None = None
) -> Iterator[Encoding]:
    """Yields the ids of texts without special tokens, a chunk of the texts at a time, in their order.

    Args:
        tokenizer: The tokenizer.
        texts: The texts; few chunks of them exist at a time.
        processes: Number of processes; as many as processors by default, and 0 for this process alone. Rules that are
            Python code always run in this process.

    Raises:
        RuntimeError: A process ended, or the tokenizer failed on a text.
    """
    count = count_processors() if processes is None else processes
    chunks = chunk_texts(texts)
    if not count or not is_stock(tokenizer):
        for chunk in chunks:
            yield worker.join_ids(tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"])
        return
    with TokenizerProcesses(tokenizer, count) as pool:
        yield from Prefetcher(pool.encode, chunks, threads=count, depth=_AHEAD * count)


def chunk_texts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields the texts in lists of at most ROWS texts and, if there are several, about CHARACTERS characters."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= CHARACTERS or len(chunk) == ROWS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def is_stock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the rules of `tokenizers` alone turn text into ids, without Python code of the tokenizer's class.

    Rules with components written in Python can't be sent to another process either.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    tokenizer_class = type(tokenizer)
    if (
        tokenizer_class._encode_plus is not PreTrainedTokenizerFast._encode_plus
        or tokenizer_class.__call__ is not _CALL
    ):
        return False
    try:
        tokenizer.backend_tokenizer.to_str()
    except Exception:  # noqa: BLE001 - the library raises no other
        return False
    return True


_CALL = PreTrainedTokenizerFast.__call__


class TokenizerProcesses:
    """Processes that tokenize, each with one thread; a context manager that starts and ends them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, count: int):
        self.rules = tokenizer.backend_tokenizer.to_str()
        self.split_special_tokens = bool(tokenizer.split_special_tokens)
        self.count = count
        self.idle: SimpleQueue[Connection] = SimpleQueue()
        self.connections: list[Connection] = []
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "TokenizerProcesses":
        """Starts the processes."""
        for _ in range(self.count):
            connection, other = Pipe()
            # -P: the script's folder isn't searched for modules.
            command = [sys.executable, "-P", str(Path(worker.__file__)), str(other.fileno())]
            environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
            self.started.append(subprocess.Popen(command, env=environment, pass_fds=[other.fileno()]))  # noqa: S603
            other.close()
            self.connections.append(connection)
            connection.send((self.rules, self.split_special_tokens))
            self.idle.put(connection)
        return self

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Returns the ids of texts, computed by an idle process; may be called on several threads.

        Raises:
            RuntimeError: The process ended, or the tokenizer failed on a text.
        """
        connection = self.idle.get()
        try:
            connection.send(texts)
            reply = connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("tokenization: a process ended before its answer, perhaps for lack of memory") from error
        finally:
            self.idle.put(connection)
        if isinstance(reply, str):
            raise RuntimeError(f"tokenization: {reply}")
        ids, lengths = reply
        return ids, lengths

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the processes, which read the end of their connection after the chunk that they tokenize."""
        for connection in self.connections:
            connection.close()
        for process in self.started:
            process.wait()
