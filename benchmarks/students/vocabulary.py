"""Size and accuracy of a trained classifier whose vocabulary is pruned to the tokens of its training texts.

    python -m benchmarks.students.vocabulary --model runs/demo/student --data examples/data/banking77

The tokens are selected on the training split of a classification data set. Each pruned checkpoint is saved, loaded
again and scored on the test split in PyTorch. Printed per selection: the number of tokens, the MB of the weights and of
tokenizer.json, the share of these that is saved, the test accuracy and its change in points, the mean tokens per text,
the share of the texts that are tokenized differently, and the number of texts with more unknown tokens. The row
`default` uses the settings of `choose_tokens`; `coverage` rows keep seen tokens only; `unseen` rows add tokens that the
texts lack, at the default coverage. The baseline is the unpruned model's own row.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import tokenizers
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common.machine import describe_setup
from compress.prune.vocabulary.tokenizer import have_same_tokens
from compress.prune.vocabulary.vocabulary import (
    DEFAULT_COVERAGE,
    DEFAULT_UNSEEN,
    choose_tokens,
    count_tokens,
    prune_vocabulary,
)
from distill.data.batches.batches import EvalBatches
from distill.data.batches.encode import encode_samples
from distill.data.config import DataConfig
from distill.data.splits.examples import Examples, Splits
from distill.data.splits.labelled import load_splits
from pipelines.runs.console import Console

BATCH = 64
HEADER = (
    "selection", "tokens", "MB", "saved", "accuracy", "points", "tokens per text", "tokenized differently",
    "more [UNK]",
)  # fmt: skip


class Selection(TypedDict, total=False):
    """Arguments of `choose_tokens`."""

    coverage: float
    unseen: float


@dataclass(frozen=True)
class Measurement:
    """A checkpoint on the test split; accuracy in percent, tokens per text."""

    vocabulary: int
    bytes: int
    accuracy: float
    tokens: float


def main() -> None:
    """Prunes the vocabulary with each selection and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a classifier with the data's labels in their order")
    parser.add_argument("--data", required=True)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--validation-fraction", type=float, default=0.05)
    parser.add_argument("--coverage", nargs="*", type=float, default=[0.99, 0.999, 1.0])
    parser.add_argument("--unseen", nargs="*", type=float, default=[0.003, 0.001, 0.0])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console()
    data = DataConfig(options.data, validation_fraction=options.validation_fraction, max_length=options.max_length)
    splits = load_splits(data)
    model, tokenizer = load_model(Path(options.model))
    labels = cast("dict[int, str]", model.config.id2label or {})
    if tuple(labels[i] for i in sorted(labels)) != splits.labels:
        parser.error(
            f"--model {options.model}: expected the data's labels in their order, found others: the accuracy would be "
            "meaningless"
        )
    rows = compare(options, model, tokenizer, splits, console)
    console.table(f"{options.model} on {len(splits.test):,} test texts of {options.data}", HEADER, rows)
    packages = (transformers, tokenizers)
    versions = ", ".join(f"{package.__name__} {package.__version__}" for package in packages)
    console.say(f"{describe_setup()}, {versions}, {options.threads} threads, batches of {BATCH}")


def load_model(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the classifier of a folder in eval mode, and its tokenizer."""
    return AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def compare(
    options: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: Splits,
    console: Console,
) -> list[tuple[str, ...]]:
    """Returns a table row for the model as it is and for each selection of tokens."""
    counts, texts = count_tokens(tokenizer, list_texts(splits.train)), list_texts(splits.test)
    console.say(f"{len(splits.train):,} training texts use {int((counts > 0).sum()):,} of {len(counts):,} tokens")
    before, _ = measure(model, tokenizer, splits.test, options.max_length)
    rows = [format_row("unpruned", before, before, "", "")]
    selections = [(f"default ({DEFAULT_COVERAGE:g}, {DEFAULT_UNSEEN:g})", Selection())]
    selections += [(f"coverage {share:g}", Selection(coverage=share, unseen=1)) for share in options.coverage]
    selections += [(f"unseen {share:g}", Selection(unseen=share)) for share in options.unseen]
    for label, selection in selections:
        pruned = prune_vocabulary(model, tokenizer, choose_tokens(tokenizer, counts, **selection))
        after, reloaded = measure(*pruned, splits.test, options.max_length)
        different = np.mean([not have_same_tokens(tokenizer, reloaded, text) for text in texts])
        unknown = sum(count_unknown(reloaded, text) > count_unknown(tokenizer, text) for text in texts)
        rows.append(format_row(label, before, after, f"{different:.2%}", str(unknown)))
        console.say(f"  {label}: {after.accuracy:.2f} %")
    return rows


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, test: Examples, max_length: int
) -> tuple[Measurement, PreTrainedTokenizerBase]:
    """Saves a model, loads it again and scores it; returns the measurement and the reloaded tokenizer."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        size = sum(file.stat().st_size for file in (*folder.glob("*.safetensors"), folder / "tokenizer.json"))
        model, tokenizer = load_model(folder)
    encoded, correct = encode_samples(tokenizer, test, max_length), 0
    with torch.inference_mode():
        for batch in EvalBatches(encoded, BATCH, int(tokenizer.pad_token_id or 0)):
            labels = batch.pop("labels")
            correct += int((model(**batch).logits.argmax(-1) == labels).sum())
    accuracy = 100 * correct / len(test)
    return Measurement(len(tokenizer), size, accuracy, float(encoded.lengths.mean())), tokenizer


def count_unknown(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Returns the number of unknown tokens of a text."""
    return tokenizer.tokenize(text).count(tokenizer.unk_token)


def list_texts(examples: Examples) -> list[str]:
    """Returns all texts of a split, including the second ones of pairs."""
    return [*examples.texts, *(examples.pairs or ())]


def format_row(label: str, before: Measurement, after: Measurement, different: str, unknown: str) -> tuple[str, ...]:
    """Returns a row of the table."""
    return (
        label,
        f"{after.vocabulary:,}",
        f"{after.bytes / 1e6:.1f}",
        f"{1 - after.bytes / before.bytes:.1%}",
        f"{after.accuracy:.2f} %",
        f"{after.accuracy - before.accuracy:+.2f}",
        f"{after.tokens:.2f}",
        different,
        unknown,
    )


if __name__ == "__main__":
    main()
