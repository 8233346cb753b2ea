"""Size, gradient angle and bias of sampled and top-k signals.

    python -m benchmarks.cache.signal_size --lm runs/small-lm      # the small language model, 32k tokens
    python -m benchmarks.cache.signal_size --synthetic             # 128k tokens, no model

The distributions are those of the small language model on its training text, or synthetic ones: unigram frequencies by
Zipf's law with exponent 1, shuffled once, and tilted at each position by Gaussian log-odds, so that the entropies vary
like those of a language model. Printed per signal: ids per position; bytes per token of all files of the cache (the
share of the frequency tables falls with more tokens); the angle in degrees between the gradients of a student of half
depth on the cached and on the complete distributions; the KL divergence of one draw in nats; and the bias, the L1
distance between the mean target over 1,024 draws and the distribution. The lower bound of the size is the entropy of
the ids under their frequencies, less the order within a set, plus that of the counts: no code with this model of the
signal can be smaller.
"""

import argparse
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from distill.cache import CacheReader, Identity, Sampled, Samples, TopK, write_cache
from distill.cache.fidelity import compute_divergence, halve_layers, measure_fidelity
from distill.cache.preflight import run_teacher
from distill.cache.samples import build_samples
from distill.data.batches.token_blocks import LanguageBlocks
from distill.losses.compose import distribution_loss
from distill.losses.teacher_signals import TeacherSignals
from distill.teacher.online import OnlineTeacher
from pipelines.runs.console import Console

SYNTHETIC_WIDTH = 131072
BIAS_DRAWS = 1024  # draws per position whose mean shows the bias
BINS = 16
ENTROPY_SAMPLES, BATCH = 256, 8
HEADER = (
    "signal", "ids per position", "bytes per token", "lower bound", "angle, degrees", "KL, nats",
    f"bias, L1 ({BIAS_DRAWS} draws)",
)  # fmt: skip


def main() -> None:
    """Measures each signal and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="runs/small-lm", help="folder that benchmarks.tasks.small_lm wrote")
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--blocks", type=int, default=2048, help="sequences of 256 tokens")
    parser.add_argument("--batches", type=int, default=8, help="batches of 8 sequences, for the gradient's angle")
    parser.add_argument("--draws", type=int, nargs="+", default=[14])
    parser.add_argument("--k", type=int, nargs="+", default=[12, 64])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source = SyntheticSource(options) if options.synthetic else ModelSource(options)
    signals = [Sampled(source.width, draws=n) for n in options.draws] + [TopK(source.width, k=k) for k in options.k]
    rows = [measure_signal(source, signal, options.batches) for signal in signals]
    title = f"{source.name}: {source.tokens:,} tokens, vocabulary of {source.width:,}"
    Console().table(title, HEADER, rows)


class ModelSource:
    """The small language model and its training text."""

    name = "small language model"

    def __init__(self, options: argparse.Namespace):
        model = LlamaForCausalLM.from_pretrained(Path(options.lm) / "model").eval()
        blocks = np.load(Path(options.lm) / "train.npy")[-options.blocks :]
        self.data = LanguageBlocks([row.astype(np.int64) for row in blocks])
        self.samples, self.teacher, self.width = (
            build_samples(self.data, 0),
            OnlineTeacher(model),
            model.config.vocab_size,
        )
        self.tokens = int(self.samples.lengths.sum())
        self.student = halve_layers(model)

    def measure_angle(self, reader: CacheReader, batches: int) -> float:
        """Returns the angle between the student's gradients in degrees."""
        rows = [list(range(BATCH * i, BATCH * (i + 1))) for i in range(batches)]
        loss = partial(distribution_loss, temperature=1.0)
        return measure_fidelity(reader, self.teacher, self.student, self.samples, rows, loss).gradient_angle


class SyntheticSource:
    """Distributions that are a function of a seed and a position."""

    name = "synthetic Zipf"
    width = SYNTHETIC_WIDTH

    def __init__(self, options: argparse.Namespace):
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(self.width, generator=generator)
        self.unigram = torch.empty(self.width)
        self.unigram[order] = -torch.arange(1, self.width + 1).log()
        length, deviation = 256, 2.0
        ids = [np.arange(length) + length * i for i in range(options.blocks)]
        self.samples: Samples = build_samples(LanguageBlocks(ids), 0)
        self.tokens = int(self.samples.lengths.sum())
        self.noise = torch.randn(1 << 24, generator=generator) * deviation

    def teacher(self, batch: Mapping[str, Tensor]) -> TeacherSignals:
        """Returns logits whose log-odds at each position are another part of the same long noise."""
        shape = (*batch["input_ids"].shape, self.width)
        starts = (batch["input_ids"] * 7919 % (len(self.noise) - self.width)).flatten().tolist()
        rows = [self.unigram + self.noise[start : start + self.width] for start in starts]
        return {"logits": torch.stack(rows).view(shape)}

    def measure_angle(self, reader: CacheReader, batches: int) -> float:
        """Returns NaN, because synthetic distributions have no student."""
        return float("nan")


Source: TypeAlias = ModelSource | SyntheticSource


def measure_signal(source: Source, signal: Sampled | TopK, batches: int) -> tuple[str, ...]:
    """Returns the table row of a signal."""
    with tempfile.TemporaryDirectory() as directory, Console().track(str(signal), len(source.samples)) as advance:
        folder = Path(directory) / "cache"
        identity = Identity("benchmark", "none", (signal,))
        write_cache(folder, identity, source.samples, source.teacher, on_progress=advance)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / source.tokens
        reader = CacheReader(folder)
        ids, bound = measure_entropy(source, signal)
        kl, bias = measure_distances(source, signal, reader)
        angle = source.measure_angle(reader, batches)
        return (
            str(signal).replace(f"width={source.width}, ", ""),
            f"{ids:.2f}",
            f"{size:.2f}",
            f"{bound:.2f}",
            "no student" if np.isnan(angle) else f"{angle:.2f}",
            f"{kl:.4f}",
            f"{bias:.4f}",
        )


def measure_entropy(source: Source, signal: Sampled | TopK) -> tuple[float, float]:
    """Returns (ids per position, bytes per position that the frequencies found in some samples allow)."""
    rows = [
        row
        for start in range(0, ENTROPY_SAMPLES, BATCH)
        for row in signal.rows(run_teacher(source.teacher, source.samples, range(start, start + BATCH)))
    ]
    ids = np.concatenate([row[0].ravel() for row in rows])
    positions = int(source.samples.lengths[: len(rows)].sum())
    shares = np.bincount(ids, minlength=signal.width) / len(ids)
    id_bits = -np.log2(shares[ids]).sum()
    if isinstance(signal, Sampled):
        sizes, counts = (np.concatenate([row[i] for row in rows]) for i in (2, 1))
        log_factorials = np.array([np.log2(np.arange(1, n + 1)).sum() for n in range(signal.draws + 1)])
        order_bits = log_factorials[sizes].sum()
        count_bits = entropy_bits(counts) * len(counts) + entropy_bits(sizes) * len(sizes)
    else:
        levels = np.concatenate([row[1] for row in rows])
        order_bits = positions * np.log2(np.arange(1, signal.k + 1)).sum()
        differences = levels.max(1, keepdims=True) - levels
        count_bits = entropy_bits(differences.ravel()) * differences.size
        count_bits += entropy_bits(levels.max(1)) * len(levels)
    return len(ids) / positions, float(id_bits - order_bits + count_bits) / 8 / positions


def entropy_bits(values: np.ndarray) -> float:
    """Returns the entropy of the values in bits per value."""
    shares = np.bincount(values) / len(values)
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def measure_distances(source: Source, signal: Sampled | TopK, reader: CacheReader) -> tuple[float, float]:
    """Returns the KL of one draw over 8 samples, and the bias of the target at the first position of each."""
    batch = source.samples.batch(range(BATCH))
    dense, stored = source.teacher(batch)["logits"].flatten(0, 1), reader(batch)
    stride = len(dense) // BATCH
    first = {name: values[::stride][:BATCH] for name, values in stored.items() if isinstance(values, Tensor)}
    kl = compute_divergence(dense, stored).mean().item()
    return kl, measure_bias(dense[::stride][:BATCH], first, signal)


def measure_bias(dense: Tensor, stored: Mapping[str, Tensor], signal: Sampled | TopK) -> float:
    """Returns the mean L1 distance of the target's mean over draws from the distribution.

    Both are compared in BINS bins of equal probability, by descending probability of the tokens.
    """
    probabilities, target = dense.softmax(-1), torch.zeros_like(dense)
    if isinstance(signal, Sampled):
        for row, mean in zip(dense, target, strict=True):
            offsets = np.random.default_rng(0).random(BIAS_DRAWS)
            ids, counts, _ = signal.sample_ids(row.expand(BIAS_DRAWS, -1).contiguous(), offsets)
            mean.index_add_(0, torch.from_numpy(ids).long(), torch.from_numpy(counts) / (signal.draws * BIAS_DRAWS))
    else:
        others = target.shape[1] - stored["ids"].shape[1]
        target += (stored["tail"] / others)[:, None].expand_as(target)
        target.scatter_(1, stored["ids"], stored["log_probs"].exp())
    ranked, order = probabilities.sort(-1, descending=True)
    bins = (ranked.cumsum(-1) * BINS).long().clamp(max=BINS - 1)
    masses = [
        torch.zeros(len(dense), BINS).scatter_add_(1, bins, mass.gather(1, order)) for mass in (probabilities, target)
    ]
    return (masses[0] - masses[1]).abs().sum(-1).mean().item()


if __name__ == "__main__":
    main()
