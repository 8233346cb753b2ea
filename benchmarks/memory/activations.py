"""Memory and time of a decoder's training step with activation checkpointing and offload, on labels alone.

    python -m benchmarks.memory.activations  # 110M random weights, 32,000 tokens of vocabulary, 4 x 1,024
    python -m benchmarks.memory.activations --layers 2 --rows 1 --length 256 --rounds 2

The plain step is timed twice, once with all logits at a time. Printed per mode: the bytes that torch's allocator held
at most above those before the step (weights and gradients exist already); the most that the process held above what it
held before, as memory without a file behind it (RssAnon in /proc/self/status, every 2 ms), and in all (VmHWM, where the
mapped pages of the file for offloaded activations count, although the system can take them back); the time as a median
of ratios in the same round; and the largest difference of loss and gradients from those of the plain step, with
dropout, as a share of each tensor's largest value. On a GPU only its allocator's bytes are printed. The lower bound is
the input of each layer. Pages of the file that aren't mapped are in no column: they are in the system's cache of files.
The file is in --folder, which should be on a disk. Step times on a busy machine mean nothing.
"""

import argparse
import ctypes
import gc
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio, synchronize
from benchmarks.distributed.sharded_memory import record_memory
from compress.measure.memory import read_peak_memory, reset_peak_memory, return_freed_memory
from compress.measure.turns import time_in_turns
from distill.losses.config import LossConfig
from distill.train.activation_checkpointing import checkpoint_layers
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console
from pipelines.runs.memory.step_cost import measure_call

MODES = ("none", "selective", "every=2", "full")
ALL_LOGITS = "none, all logits at once"
OFFLOADED = ("none, offloaded", "full, offloaded")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LABELS_ONLY = LossConfig(kl=0, ce=1)


def main() -> None:
    """Measures all modes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.1, help="of attention, for the comparison of gradients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="of offloaded activations")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return_freed_memory()
    console, device = Console(), torch.device(options.device)
    model = build_decoder(options.width, options.layers, options.vocabulary, options.dropout).to(options.device)
    drawn = draw_batch(options.vocabulary, options.rows, options.length)
    batch = {name: value.to(device) for name, value in drawn.items()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.say(f"{describe_setup()}, {options.device}, {options.threads} threads")
    steps = {mode: build_step(model, batch, mode, options.folder) for mode in (ALL_LOGITS, *MODES, *OFFLOADED)}
    loss, gradients = steps["none"]()
    expected = loss, [gradient.clone() for gradient in gradients]
    differences, resident = {}, {}
    for mode, step in steps.items():
        differences[mode], resident[mode] = measure_resident(step, expected)
    del expected, gradients
    on_gpu = device.type == "cuda"
    peaks = {mode: measure_call(step, device).peak if on_gpu else measure_peak(step) for mode, step in steps.items()}
    keep_freed_memory()
    wait = partial(synchronize, device)
    times = time_in_turns(steps, options.rounds, warmup=0, before=wait, after=wait)
    inputs = 4 * options.rows * options.length * options.width * options.layers
    rows = [
        (mode, f"{peaks[mode] / 1e6:.0f}", f"{peaks[mode] / peaks['none']:.2f}",
         *(f"{each / 1e6:.0f}" for each in resident[mode] if not on_gpu),
         f"{median_ratio(times[mode], times['none']):.2f}", f"{differences[mode]:.1g}")
        for mode in steps
    ]  # fmt: skip
    columns = () if on_gpu else ("RssAnon MB", "VmHWM MB")
    header = ("checkpointing", "extra MB", "ratio to none", *columns, "time, ratio to none", "difference of gradients")
    sizes = f"{options.rows} x {options.length} tokens"
    console.table(f"Decoder of {parameters / 1e6:.0f}M parameters, {sizes}", header, rows)
    console.say(f"Inputs of all layers: {inputs / 1e6:.0f} MB")


def build_decoder(width: int, layers: int, vocabulary: int, dropout: float) -> LlamaForCausalLM:
    """Returns a decoder with random weights, in training mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=(8 * width // 3 + 63) // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def draw_batch(vocabulary: int, rows: int, length: int) -> dict[str, Tensor]:
    """Returns random tokens, each labelled with the next."""
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.roll(-1, 1)}


def keep_freed_memory() -> None:
    """Sets the C library's thresholds to where its own adaptation takes them in a process that trains."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 32 << 20)
        ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, 64 << 20)


def build_step(
    model: LlamaForCausalLM, batch: dict[str, Tensor], mode: str, folder: Path
) -> Callable[[], tuple[Tensor, list[Tensor]]]:
    """Returns a function that computes the loss and the gradients of a batch in place."""
    train = TrainConfig(offload="activations") if mode in OFFLOADED else TrainConfig()
    module = DistillationModule(model, loss=LABELS_ONLY, train=train)
    module.scratch = folder
    if mode == ALL_LOGITS:
        module.fused_term.name = ""
    checkpointing = mode.partition(",")[0]

    def step() -> tuple[Tensor, list[Tensor]]:
        module.zero_grad(set_to_none=False)
        torch.manual_seed(1)
        with checkpoint_layers(model, checkpointing):
            loss = module.training_step(batch, 0)
            assert loss is not None
            loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return step


def find_difference(found: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> float:
    """Returns the largest difference of loss and gradients of two steps, as a share of each tensor's largest value."""
    pairs = zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True)
    return max(float((value - reference).abs().max() / reference.abs().max()) for value, reference in pairs)


def measure_peak(step: Callable[[], object]) -> int:
    """Returns the most bytes that torch's CPU allocator held above those at the start of a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    allocated = peak = 0
    events = run.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def measure_resident(
    step: Callable[[], tuple[Tensor, list[Tensor]]], expected: tuple[Tensor, list[Tensor]]
) -> tuple[float, tuple[int, int]]:
    """Returns how far a step is from the expected one, and by how much memory rose at most: RssAnon, and all of it."""
    gc.collect()
    reset_peak_memory()
    start = read_peak_memory()
    with record_memory() as use:
        difference = find_difference(step(), expected)
    return difference, (use.peak, read_peak_memory() - start)


if __name__ == "__main__":
    main()
