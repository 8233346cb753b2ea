"""Costs of the cache of teacher signals: reading it while training, reading it alone, and writing it.

    python -m benchmarks.cache.speed --lm runs/small-lm

Measured on blocks of 256 tokens of the small language model's training text (of random tokens if there is none):

- a training step of a two-layer student on labels and one on cached signals, alternating batch by batch; the ratio is
  the median over the rounds of the ratio within a round;
- reading batches with their signals and nothing else, through the read-ahead of training, with 1 and 2 threads;
- writing a cache, one call of `write_cache` from planning to the last file on disk.

Printed are the tokens per second of each, and ratios: of the steps, of reading to what training consumes, and of
writing to its lower bound, the time of the teacher's own forward passes within the same call.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio, synchronize
from compress.measure.turns import time_in_turns
from distill.cache import CacheReader, Identity, Sampled, TopK, write_cache
from distill.cache.samples import build_samples
from distill.data.batches.batches import TrainBatches
from distill.data.batches.encode import Batch
from distill.data.batches.token_blocks import LanguageBlocks
from distill.losses.compose import weighted_sum
from distill.losses.config import LossConfig
from distill.losses.teacher_signals import TeacherSignals
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console

BATCH = 8


class TimedTeacher:
    """A teacher that measures the time of its forward passes and counts their tokens.

    A GPU's passes are timed by events on its stream, so that what else is done meanwhile isn't kept waiting.
    """

    def __init__(self, teacher: OnlineTeacher, device: torch.device):
        self.teacher, self.device, self.tokens = teacher, device, 0
        self.spent: list[float] = []
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, batch: Mapping[str, Tensor]) -> TeacherSignals:
        """Returns the teacher's signals for a batch."""
        self.tokens += int(batch["attention_mask"].sum())
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            signals = self.teacher(batch)
            end.record()
            self.events.append((start, end))
            return signals
        began = time.perf_counter()
        signals = self.teacher(batch)
        self.spent.append(time.perf_counter() - began)
        return signals

    @property
    def seconds(self) -> float:
        """Seconds of all forward passes."""
        synchronize(self.device)
        return sum(self.spent) + sum(start.elapsed_time(end) for start, end in self.events) / 1e3


def main() -> None:
    """Measures all three and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="runs/small-lm", help="folder of the model; random weights if it is absent")
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draws", type=int, default=14)
    parser.add_argument("--layers", type=int, default=6, help="of a model of random weights")
    parser.add_argument("--width", type=int, default=256, help="of a model of random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--signal", choices=["sampled", "topk"], default="sampled")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    model = load_model(Path(options.lm), layers=options.layers, width=options.width).to(options.device)
    width = model.config.vocab_size
    data = load_blocks(Path(options.lm), options.blocks, width)
    signal = Sampled(width, draws=options.draws) if options.signal == "sampled" else TopK(width)
    with tempfile.TemporaryDirectory() as directory:
        warmup = build_samples(LanguageBlocks(data.input_ids[:16]), 0)
        teacher = OnlineTeacher(model, device=model.device)
        write_cache(Path(directory) / "warmup", Identity("warmup", "none", (signal,)), warmup, teacher)
        folder = Path(directory) / "cache"
        writing_ratio, forward_rate = measure_writing(folder, signal, model, data)
        reader = CacheReader(folder)
        reading_rates = {threads: measure_reading(reader, data, threads) for threads in (1, 2)}
        times = measure_steps(model, reader, data, options.rounds)
    medians = {target: statistics.median(seconds) for target, seconds in times.items()}
    rates = {target: BATCH * data.lengths[0] / seconds for target, seconds in medians.items()}
    step_ratio = median_ratio(times["cache"], times["labels"])
    rows = [
        ("training on labels", f"{rates['labels']:,.0f} tokens/s", f"{medians['labels'] * 1e3:.0f} ms per step"),
        ("training on the cache", f"{rates['cache']:,.0f} tokens/s", f"{step_ratio:.3f}x the time per step"),
        *(
            (f"reading, {n} threads", f"{rate:,.0f} tokens/s", f"{rate / rates['labels']:.0f}x the rate of training")
            for n, rate in reading_rates.items()
        ),
        ("teacher's forward pass", f"{forward_rate:,.0f} tokens/s", ""),
        ("writing", f"{forward_rate / writing_ratio:,.0f} tokens/s", f"{writing_ratio:.3f}x the time of the forward"),
    ]
    title = f"{describe_model(options)}: {signal}, vocabulary of {width:,} tokens"
    console.table(title, ("operation", "rate", "ratio"), rows)
    console.say(f"{describe_setup()}, {options.device}, {options.threads} threads")


def has_model(folder: Path) -> bool:
    """Returns whether there is a small language model in a folder."""
    return (folder / "model").is_dir()


def describe_model(options: argparse.Namespace) -> str:
    """Returns the measured model: its folder, or the sizes of one with random weights."""
    return options.lm if has_model(Path(options.lm)) else f"random weights, {options.layers} x {options.width}"


def load_model(folder: Path, *, layers: int = 6, width: int = 256) -> LlamaForCausalLM:
    """Returns the model of a folder, or one of these sizes with random weights."""
    if has_model(folder):
        model = LlamaForCausalLM.from_pretrained(folder / "model")
    else:
        config = LlamaConfig(
            vocab_size=32768, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
            num_attention_heads=width // 64, num_key_value_heads=width // 64, tie_word_embeddings=True,
            initializer_range=0.1,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    model.eval()
    return model


def load_blocks(folder: Path, count: int, width: int) -> LanguageBlocks:
    """Returns the first blocks of the folder's training text, or blocks of random tokens."""
    file = folder / "train.npy"
    blocks = np.load(file)[:count] if file.exists() else np.random.default_rng(0).integers(0, width, (count, 256))
    return LanguageBlocks([row.astype(np.int64) for row in blocks])


def measure_writing(
    folder: Path, signal: Sampled | TopK, model: LlamaForCausalLM, data: LanguageBlocks
) -> tuple[float, float]:
    """Returns (time of the call over that of the teacher's forward passes, the teacher's tokens per second)."""
    teacher = TimedTeacher(OnlineTeacher(model, device=model.device), model.device)
    samples = build_samples(data, 0)
    start = time.perf_counter()
    write_cache(folder, Identity("speed", "none", (signal,)), samples, teacher)
    return (time.perf_counter() - start) / teacher.seconds, teacher.tokens / teacher.seconds


def measure_reading(reader: CacheReader, data: LanguageBlocks, threads: int) -> float:
    """Returns the tokens per second of batches with their signals when nothing else is done."""
    batches = TrainBatches(data, BATCH, 0, seed=0, signals=reader, threads=threads)
    for _ in batches:  # compiles, and fills the page cache
        pass
    start, tokens = time.perf_counter(), 0
    for _ in range(3):
        tokens += sum(int(batch["attention_mask"].sum()) for batch in batches)
    return tokens / (time.perf_counter() - start)


def measure_steps(
    model: LlamaForCausalLM, reader: CacheReader, data: LanguageBlocks, rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds of each step on labels and on the cache."""
    steps = {
        "labels": build_step(model, LossConfig(kl=0, ce=1), data, None),
        "cache": build_step(model, LossConfig(kl=1, temperature=1), data, reader),
    }
    wait = partial(synchronize, model.device)
    return time_in_turns(steps, rounds, warmup=2, before=wait, after=wait)


def build_step(
    model: LlamaForCausalLM, loss: LossConfig, data: LanguageBlocks, signals: CacheReader | None
) -> Callable[[], None]:
    """Returns a function that trains a two-layer student on the next batch."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "head_dim": 32}
    torch.manual_seed(0)
    student = LlamaForCausalLM(LlamaConfig(**model.config.to_dict() | sizes)).train()
    student = student.to(model.device)
    module = DistillationModule(student, loss=loss, train=TrainConfig())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    batches = repeat_epochs(TrainBatches(data, BATCH, 0, seed=0, signals=signals, threads=1 if signals else 0))

    def step() -> None:
        batch = module.transfer_batch_to_device(next(batches), model.device, 0)
        weighted_sum(module.loss, module.compute_terms(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def repeat_epochs(batches: TrainBatches) -> Iterator[Batch]:
    """Yields the batches of one epoch after the other."""
    while True:
        yield from cast(Iterator[Batch], batches)


if __name__ == "__main__":
    main()
