"""The tokens stage: texts larger than memory, tokenized once for all stages that train on them, and later runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.data.batches.packing import require_end_token
from distill.data.sources.stored_texts import StoredTexts
from distill.data.stored.tokens import StoredTokens, TokenizedTexts, write_tokens
from distill.tasks.task import Task
from distill.teacher.fingerprint import tokenizer_fingerprint
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Run

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def tokens_stage(
    run: Run, tokenizer: PreTrainedTokenizerBase, source: str, texts: Callable[[], Iterator[str]], count: int
) -> StoredTokens:
    """Returns the token ids of texts, each with an end token; written by the first process if they don't exist yet.

    The files serve every length, packing, order and seed. Every process calls this, also inside another stage's work.

    Args:
        run: The run.
        tokenizer: A fast tokenizer.
        source: Identifies the texts by their content.
        texts: Yields the texts; called only if they have to be tokenized.
        count: Number of texts, for the progress; more than there are if some are empty.
    """
    settings: JsonObject = {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "end": require_end_token(tokenizer),
        "split_special_tokens": bool(tokenizer.split_special_tokens),
    }

    def work(folder: Path) -> JsonObject:
        with run.console.track("tokens: tokenizing in parallel", count, "texts") as advance:
            header: JsonObject = write_tokens(folder, tokenizer, texts(), on_texts=advance)
        return header

    done = run.stage("tokens", settings, {"texts": source}, work, version=VERSION, seeded=False)
    return StoredTokens.open(done.folder)


@dataclass(frozen=True)
class SplitEncoder:
    """Encodes the splits of a run as its task does; texts that may not fit into memory by the tokens stage.

    Every process of the run has to encode, as the tokens stage is one of all processes.
    """

    run: Run
    task: Task

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Any:
        """Returns a split as rows to evaluate on; see `Task.encode`."""
        return self.task.encode(tokenizer, self.tokenize(tokenizer, part), max_length)

    def encode_train(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Any:
        """Returns a split as rows to train on; see `Task.encode_train`."""
        return self.task.encode_train(tokenizer, self.tokenize(tokenizer, part), max_length)

    def tokenize(self, tokenizer: PreTrainedTokenizerBase, part: Any) -> Any:
        """Returns a split whose texts are tokens in a file if they are texts in a file, and otherwise as it is."""
        texts = getattr(part, "texts", None)
        if not isinstance(texts, StoredTexts) or not tokenizer.is_fast:
            return part
        digest = self.run.content_hash(texts.file)
        return TokenizedTexts(tokens_stage(self.run, tokenizer, digest, lambda: iter(texts), len(texts)))
