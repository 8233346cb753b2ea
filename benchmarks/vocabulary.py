"""What a smaller vocabulary saves and costs: a trained classifier with the words of its training texts only.

    python -m benchmarks.vocabulary --model runs/demo/student --data examples/data/banking77

Words are chosen by the training split; every figure is of the test split, of a checkpoint that was saved and loaded
again, in PyTorch. Bytes are those of the weights and the tokenizer's file. The row `default` is `choose_tokens` as it
is; `coverage` rows keep seen words only, `unseen` rows add words that the corpus lacks, at the default coverage.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from compress.prune.vocabulary.tokenizer import same_pieces
from compress.prune.vocabulary.vocabulary import COVERAGE, UNSEEN, choose_tokens, count_tokens, prune_vocabulary
from distill.data.batches.batches import EvalBatches
from distill.data.batches.encode import encode
from distill.data.config import DataConfig
from distill.data.splits.labelled import Examples, Splits, load_splits
from pipelines.runs.console import Console
from pipelines.settings.this_machine import commit, describe

BATCH = 64
HEADER = ("words", "kept", "MB", "saved", "accuracy", "points", "tokens a text", "texts cut anew", "new [UNK]")


@dataclass(frozen=True)
class Measured:
    """A checkpoint on the test split; accuracy in percent."""

    words: int
    bytes: int
    accuracy: float
    tokens: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a classifier, its labels in the data's order")
    parser.add_argument("--data", required=True)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--validation-fraction", type=float, default=0.05)
    parser.add_argument("--coverage", nargs="*", type=float, default=[0.99, 0.999, 1.0])
    parser.add_argument("--unseen", nargs="*", type=float, default=[0.003, 0.001, 0.0])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console()
    data = DataConfig(given.data, validation_fraction=given.validation_fraction, max_length=given.max_length)
    splits = load_splits(data)
    model, tokenizer = load(Path(given.model))
    labels: dict[Any, str] = model.config.id2label or {}
    if tuple(labels[i] for i in sorted(labels)) != splits.labels:
        parser.error(f"--model {given.model}: its labels aren't the data's in the data's order: accuracy means nothing")
    rows = compared(given, model, tokenizer, splits, console)
    console.table(f"{given.model} on {len(splits.test):,} test texts of {given.data}", HEADER, rows)
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"
    )
    console.say(f"{describe()}, {versions}, {given.threads} threads, batches of {BATCH}, commit {commit()}")


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def compared(
    given: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: Splits,
    console: Console,
) -> list[tuple[str, ...]]:
    counts = count_tokens(tokenizer, texts_of(splits.train))
    console.say(f"{len(splits.train):,} training texts use {int((counts > 0).sum()):,} of {len(counts):,} words")
    before, _ = measured(model, tokenizer, splits.test, given.max_length)
    rows = [row("as it was", before, before, "", "")]
    wanted: list[tuple[str, dict[str, float]]] = [(f"default ({COVERAGE:g}, {UNSEEN:g})", {})]
    wanted += [(f"coverage {c:g}", {"coverage": c, "unseen": 1}) for c in given.coverage]
    wanted += [(f"unseen {u:g}", {"unseen": u}) for u in given.unseen]
    for label, asked in wanted:
        small, words = prune_vocabulary(model, tokenizer, choose_tokens(tokenizer, counts, **asked))  # type: ignore[arg-type]
        after, reloaded = measured(small, words, splits.test, given.max_length)
        texts = texts_of(splits.test)
        anew = np.mean([not same_pieces(tokenizer, reloaded, text) for text in texts])
        unknown = sum(unknowns(reloaded, text) > unknowns(tokenizer, text) for text in texts)
        rows.append(row(label, before, after, f"{anew:.2%}", str(unknown)))
        console.say(f"  {label}: {after.accuracy:.2f} %")
    return rows


def measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, test: Examples, max_length: int
) -> tuple[Measured, PreTrainedTokenizerBase]:
    """Saves, loads again and scores."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        size = sum(file.stat().st_size for file in (*folder.glob("*.safetensors"), folder / "tokenizer.json"))
        model, tokenizer = load(folder)
    encoded, right = encode(tokenizer, test, max_length), 0
    with torch.inference_mode():
        for batch in EvalBatches(encoded, BATCH, int(tokenizer.pad_token_id or 0)):
            labels = batch.pop("labels")
            right += int((model(**batch).logits.argmax(-1) == labels).sum())
    accuracy = 100 * right / len(test)
    return Measured(len(tokenizer), size, accuracy, float(encoded.lengths.mean())), tokenizer


def unknowns(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return tokenizer.tokenize(text).count(tokenizer.unk_token)


def texts_of(examples: Examples) -> list[str]:
    return examples.texts + (examples.pairs or [])


def row(label: str, before: Measured, after: Measured, anew: str, unknown: str) -> tuple[str, ...]:
    return (
        label,
        f"{after.words:,}",
        f"{after.bytes / 1e6:.1f}",
        f"{1 - after.bytes / before.bytes:.1%}",
        f"{after.accuracy:.2f} %",
        f"{after.accuracy - before.accuracy:+.2f}",
        f"{after.tokens:.2f}",
        anew,
        unknown,
    )


if __name__ == "__main__":
    main()
