"""Memory and time of a decoder's training step on one long document, whole and in windows of backward passes.

    python -m benchmarks.memory.backward_window  # 110M random weights, 2,048 to 32,768 tokens; --checkpointing full
    python -m benchmarks.memory.backward_window --width 64 --layers 2 --lengths 256 --windows 0 64 --rounds 1

The loss is that of the labels, in blocks of logits. Printed for each length and window (0 is the whole document): the
bytes that torch's allocator held at most above those before the step (weights and gradients exist already), their
share of the whole document's, and the time for each token, in microseconds and as a median of ratios to the whole
document's in the same round. Windows at least as long as the document are left out: they are the whole document. The
step of a whole document is skipped above --longest tokens, where its memory is more than a machine has; the columns of
ratios are then empty. A window needs at least the keys and values of all tokens: 2 x layers x tokens x width of the
keys. Step times on a busy machine mean nothing.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio
from benchmarks.memory.activations import (
    LABELS_ONLY,
    build_decoder,
    draw_batch,
    keep_freed_memory,
    measure_peak,
)
from compress.measure.memory import return_freed_memory
from compress.measure.turns import time_in_turns
from distill.train.activation_checkpointing import checkpoint_layers
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console

WHOLE = 0


def main() -> None:
    """Measures all lengths and windows and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--windows", type=int, nargs="+", default=[WHOLE, 512, 2048])
    parser.add_argument("--longest", type=int, default=8192, help="most tokens of a document that is trained whole")
    parser.add_argument("--checkpointing", default="none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    model = build_decoder(options.width, options.layers, options.vocabulary, dropout=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    console.say(f"{describe_setup()}, {options.threads} threads")
    rows: list[tuple[str, ...]] = []
    for length in options.lengths:
        batch = draw_batch(options.vocabulary, 1, length)
        steps = {
            window: build_step(model, batch, window, options.checkpointing)
            for window in options.windows
            if (length <= options.longest if window == WHOLE else window < length)
        }
        rows += measure_length(length, steps, options.rounds)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.table(
        f"Decoder of {parameters / 1e6:.0f}M parameters, checkpointing {options.checkpointing}",
        ("tokens", "window", "extra MB", "ratio to whole", "µs per token", "time, ratio to whole"),
        rows,
    )


def build_step(
    model: LlamaForCausalLM, batch: dict[str, Tensor], window: int, checkpointing: str
) -> Callable[[], object]:
    """Returns a function that computes the gradients of a batch in place."""
    module = DistillationModule(model, loss=LABELS_ONLY, train=TrainConfig(backward_window=window))

    def step() -> object:
        with checkpoint_layers(model, checkpointing):
            return module.micro_batches.run(
                batch,
                module.compute_loss,
                lambda loss: loss.backward(),
                model.parameters(),
                lambda parts: None,
                module.divide_batch,
            )

    return step


def measure_length(length: int, steps: dict[int, Callable[[], object]], rounds: int) -> list[tuple[str, ...]]:
    """Returns the table's rows for a document of this length."""
    return_freed_memory()
    peaks = {window: measure_peak(step) for window, step in steps.items()}
    keep_freed_memory()
    times = time_in_turns({str(window): step for window, step in steps.items()}, rounds, warmup=0)
    rows = []
    for window, peak in peaks.items():
        seconds, whole_seconds = times[str(window)], times.get(str(WHOLE))
        rows.append(
            (
                f"{length:,}",
                "whole" if window == WHOLE else f"{window:,}",
                f"{peak / 1e6:.1f}",
                f"{peak / peaks[WHOLE]:.2f}" if WHOLE in peaks else "",
                f"{1e6 * statistics.median(seconds) / length:.1f}",
                f"{median_ratio(seconds, whole_seconds):.2f}" if whole_seconds is not None else "",
            )
        )
    return rows


if __name__ == "__main__":
    main()
