"""What the cache costs: the step that reads it against the step on labels, reading alone, writing against the forward.

    python -m benchmarks.cache_speed --lm runs/small-lm

Steps take turns and the ratio is the median of the rounds' ratios. Reading alone runs through the same read-ahead as
training, with 1 and more threads. Writing is one call of `write_cache`, from planning to the last file on disk, over
the time that the teacher itself took in that call.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from distill.cache import CacheReader, Identity, Sampled, TopK, write_cache
from distill.cache.samples import samples_of
from distill.data.batches.batches import TrainBatches
from distill.data.batches.token_blocks import LanguageBlocks
from distill.losses.compose import weighted_sum
from distill.losses.config import LossConfig
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console
from pipelines.settings.this_machine import commit, describe

BATCH = 8


class Timed:
    """A teacher that says how long it took."""

    def __init__(self, teacher: OnlineTeacher):
        self.teacher, self.seconds = teacher, 0.0

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        start = time.perf_counter()
        try:
            return self.teacher(batch)
        finally:
            self.seconds += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lm", default="runs/small-lm", help="its weights don't matter for time; random ones if absent"
    )
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draws", type=int, default=14)
    parser.add_argument("--signal", choices=["sampled", "topk"], default="sampled")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console = Console()
    model = language_model(Path(given.lm))
    data = blocks_of(Path(given.lm), given.blocks, model.config.vocab_size)
    width = model.config.vocab_size
    signal = Sampled(width, draws=given.draws) if given.signal == "sampled" else TopK(width)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "cache"
        write_cache(
            Path(place) / "warm", Identity("w", "w", (signal,)), samples_of(first(data, 16), 0), OnlineTeacher(model)
        )
        ratio, forward = writing(folder, signal, model, data)
        reader = CacheReader(folder)
        rates = {threads: reading(reader, data, threads) for threads in (1, 2)}
        steps = stepping(model, reader, data, given.rounds)
    labels, cached = (statistics.median(times) for times in steps)
    paired = statistics.median(c / p for p, c in zip(*steps, strict=True))
    trained = BATCH * data.lengths[0] / labels
    rows = [
        ("training on labels", f"{trained:,.0f} tokens/s", f"step {labels * 1e3:.0f} ms"),
        ("training on the cache", f"{BATCH * data.lengths[0] / cached:,.0f} tokens/s", f"step x{paired:.3f}"),
        *(
            (f"reading, {n} threads", f"{rate:,.0f} tokens/s", f"x{rate / trained:.0f} of training")
            for n, rate in rates.items()
        ),
        ("the teacher's forward", f"{forward:,.0f} tokens/s", ""),
        ("writing", f"{forward / ratio:,.0f} tokens/s", f"x{ratio:.3f} of the forward's time"),
    ]
    console.table(f"{signal}, {width:,} words", ("what", "rate", "ratio"), rows)
    console.say(f"{describe()}, torch {torch.__version__}, {given.threads} threads, commit {commit()}")


def language_model(folder: Path) -> LlamaForCausalLM:
    if (folder / "model").is_dir():
        return LlamaForCausalLM.from_pretrained(folder / "model").eval()
    config = LlamaConfig(
        vocab_size=32768, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def blocks_of(folder: Path, count: int, width: int) -> LanguageBlocks:
    file = folder / "train.npy"
    blocks = np.load(file)[:count] if file.exists() else np.random.default_rng(0).integers(0, width, (count, 256))
    return LanguageBlocks([row.astype(np.int64) for row in blocks])


def first(data: LanguageBlocks, count: int) -> LanguageBlocks:
    return LanguageBlocks(data.input_ids[:count])


def writing(folder: Path, signal: Any, model: LlamaForCausalLM, data: LanguageBlocks) -> tuple[float, float]:
    """Seconds of the whole call over the teacher's, and the teacher's tokens/s."""
    teacher, samples = Timed(OnlineTeacher(model)), samples_of(data, 0)
    asked: list[int] = []
    start = time.perf_counter()
    write_cache(folder, Identity("speed", "none", (signal,)), samples, counted(teacher, asked))
    return (time.perf_counter() - start) / teacher.seconds, sum(asked) / teacher.seconds


def counted(teacher: Timed, asked: list[int]) -> Any:
    def ask(batch: Mapping[str, Tensor]) -> dict[str, Any]:
        asked.append(int(batch["attention_mask"].sum()))
        return teacher(batch)

    return ask


def reading(reader: CacheReader, data: LanguageBlocks, threads: int) -> float:
    """Tokens/s of batches with their signals when nothing else is done."""
    batches = TrainBatches(data, BATCH, 0, seed=0, signals=reader, threads=threads)
    for _ in batches:  # compiles, and fills the page cache
        pass
    start, tokens = time.perf_counter(), 0
    for _ in range(3):
        tokens += sum(int(batch["attention_mask"].sum()) for batch in batches)
    return tokens / (time.perf_counter() - start)


def stepping(model: LlamaForCausalLM, reader: CacheReader, data: LanguageBlocks, rounds: int) -> tuple[list, list]:
    """Seconds of each step on labels and on the cache, batch by batch in turns."""
    own = model.config.to_dict() | {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "head_dim": 32,
    }
    times: tuple[list, list] = ([], [])
    runs = []
    for loss, signals in ((LossConfig(kl=0, ce=1), None), (LossConfig(kl=1, temperature=1), reader)):
        torch.manual_seed(0)
        module = DistillationModule(LlamaForCausalLM(LlamaConfig(**own)).train(), loss=loss, train=TrainConfig())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
        batches = TrainBatches(data, BATCH, 0, seed=0, signals=signals, threads=1 if signals else 0)
        runs.append((module, optimizer, endless(batches)))
    for number in range(rounds + 2):
        for way, (module, optimizer, batches) in enumerate(runs):
            start = time.perf_counter()
            weighted_sum(module.loss, module.terms(next(batches))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= 2:
                times[way].append(time.perf_counter() - start)
    return times


def endless(batches: TrainBatches) -> Iterator[Any]:
    while True:
        yield from batches


if __name__ == "__main__":
    main()
