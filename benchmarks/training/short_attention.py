"""A training step in bfloat16 on a CPU: attention to short texts by products, beside torch's fused kernel.

    python -m benchmarks.training.short_attention
    python -m benchmarks.training.short_attention --hidden 384 --layers 6 --ffn 1536 --lengths 20 128 256 512

Both steps take turns on one BERT without dropout, in autocast, half of whose rows are padding for half of their length.
Printed are the median times, the ratio, and a lower bound: the time of the step's products at the rate of the largest
square product, without anything else.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.common.timing import median_ratio
from compress.measure.precision_speed import measure_peak_flops
from compress.measure.turns import time_in_turns
from distill.models import short_attention
from distill.models.short_attention import attend_to_short_texts
from pipelines.runs.console import Console
from pipelines.settings.this_machine import find_processor

HEADER = ("tokens", "fused, ms", "products, ms", "fused / products", "lower bound, ms")


def main() -> None:
    """Times both steps at each length, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--ffn", type=int, default=768)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[20, 45, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    short_attention.MOST_TOKENS = max(options.lengths)  # times products beyond the length up to which runs use them
    model = build_model(options)
    peak = measure_peak_flops(torch.device("cpu"), torch.bfloat16)
    table = []
    for length in options.lengths:
        step = make_step(model, options.rows, length)
        times = time_in_turns({"fused": step, "products": by_products(step)}, options.rounds, warmup=2)
        with FlopCounterMode(display=False) as counter:
            by_products(step)()
        medians = [f"{1e3 * statistics.median(each):.0f}" for each in times.values()]
        ratio = f"{median_ratio(times['fused'], times['products']):.2f}"
        table.append((str(length), *medians, ratio, f"{1e3 * counter.get_total_flops() / peak:.0f}"))
    title = f"{options.rows} rows, {options.threads} threads, {find_processor()}, torch {torch.__version__}"
    Console().table(title, HEADER, table)


def build_model(options: argparse.Namespace) -> BertForSequenceClassification:
    """Returns a BERT of random weights, in training mode and without dropout."""
    config = BertConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=options.ffn,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config).train()


def make_step(model: BertForSequenceClassification, rows: int, length: int) -> Callable[[], Tensor]:
    """Returns a function that runs the forward and backward pass of a batch in autocast."""
    ids, mask = torch.randint(1000, 30000, (rows, length)), torch.ones(rows, length, dtype=torch.long)
    mask[: rows // 2, length // 2 :] = 0

    def step() -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(input_ids=ids, attention_mask=mask).logits.float().square().mean()
        loss.backward()
        return loss

    return step


def by_products(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns a function that runs the step with attention by products."""

    def run() -> Tensor:
        with attend_to_short_texts():
            return step()

    return run


if __name__ == "__main__":
    main()
