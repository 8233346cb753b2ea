"""Bytes a token, gradient angle and bias of sampled and top-k signals, beside their floors.

    python -m benchmarks.signal_size --lm runs/small-lm      # a real language model, 32k words
    python -m benchmarks.signal_size --synthetic             # 128k words, no model

The folder's every file counts, at the number of tokens written; the codebook's share falls with more. The floor is the
entropy of the ids under their frequencies, less the order of a set, and of the counts: what no code with this model of
the signal can go below. Synthetic distributions: unigram Zipf frequencies (exponent 1) of 128k words, tilted at each
position by Gaussian log-odds, so that entropies spread like a language model's; the words' order is shuffled once.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from distill.cache import CacheReader, Identity, Sampled, Samples, TopK, write_cache
from distill.cache.fidelity import divergence, halved
from distill.cache.fidelity import fidelity as fidelity_of
from distill.cache.preflight import run_teacher
from distill.cache.samples import samples_of
from distill.cache.signals import Signal
from distill.data.batches.token_blocks import LanguageBlocks
from distill.losses.compose import distribution_loss
from distill.teacher.online import OnlineTeacher
from pipelines.runs.console import Console

SYNTHETIC_WIDTH = 131072
DRAWN = 1024  # draws of a position whose mean shows the bias
BINS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="runs/small-lm")
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--blocks", type=int, default=2048, help="sequences of 256 tokens")
    parser.add_argument("--batches", type=int, default=8, help="of 8 sequences, for the gradient's angle")
    parser.add_argument("--draws", type=int, nargs="+", default=[14])
    parser.add_argument("--k", type=int, nargs="+", default=[12, 64])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    setup = Synthetic(given) if given.synthetic else Real(given)
    kinds = [Sampled(setup.width, draws=n) for n in given.draws] + [TopK(setup.width, k=k) for k in given.k]
    rows = [measured(setup, kind, given.batches) for kind in kinds]
    header = (
        "signal",
        "ids a position",
        "bytes a token",
        "floor",
        "angle, degrees",
        "KL, nats",
        f"bias, L1 ({DRAWN} draws)",
    )
    Console().table(f"{setup.name}: {setup.tokens:,} tokens, {setup.width:,} words", header, rows)


class Real:
    """The small language model and its training text."""

    name = "small language model"

    def __init__(self, given: argparse.Namespace):
        model = LlamaForCausalLM.from_pretrained(Path(given.lm) / "model").eval()
        blocks = np.load(Path(given.lm) / "train.npy")[-given.blocks :]
        self.data = LanguageBlocks([row.astype(np.int64) for row in blocks])
        self.samples, self.teacher, self.width = samples_of(self.data, 0), OnlineTeacher(model), model.config.vocab_size
        self.tokens = int(self.samples.lengths.sum())
        self.student = halved(model)

    def angle(self, reader: CacheReader, batches: int) -> float:
        rows = [list(range(8 * i, 8 * i + 8)) for i in range(batches)]
        loss = lambda logits, targets: distribution_loss(logits, targets, 1.0)  # noqa: E731
        return fidelity_of(reader, self.teacher, self.student, self.samples, rows, loss).angle


class Synthetic:
    """Distributions made of nothing but a seed and a position."""

    name = "synthetic Zipf"
    width = SYNTHETIC_WIDTH

    def __init__(self, given: argparse.Namespace):
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(self.width, generator=generator)
        self.unigram = torch.empty(self.width)
        self.unigram[order] = -torch.arange(1, self.width + 1).log()
        self.length, self.spread = 256, 2.0
        ids = [np.arange(self.length) + self.length * i for i in range(given.blocks)]
        self.samples: Samples = samples_of(LanguageBlocks(ids), 0)
        self.tokens = int(self.samples.lengths.sum())
        self.noise = torch.randn(1 << 24, generator=generator) * self.spread

    def teacher(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Each position's tilt is another stretch of the same long noise."""
        shape = (*batch["input_ids"].shape, self.width)
        starts = (batch["input_ids"] * 7919 % (len(self.noise) - self.width)).flatten().tolist()
        rows = [self.unigram + self.noise[start : start + self.width] for start in starts]
        return {"logits": torch.stack(rows).view(shape)}

    def angle(self, reader: CacheReader, batches: int) -> float:
        """There is no student of made-up distributions."""
        return float("nan")


def measured(setup: Real | Synthetic, kind: Signal, batches: int) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as place, Console().track(str(kind), len(setup.samples)) as advance:
        folder = Path(place) / "cache"
        write_cache(folder, Identity("benchmark", "none", (kind,)), setup.samples, setup.teacher, on_progress=advance)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / setup.tokens
        reader = CacheReader(folder)
        ids, floor = entropy(setup, kind, reader)
        kl, off = distance(setup, kind, reader)
        return (
            str(kind).replace(f"width={setup.width}, ", ""),
            f"{ids:.2f}",
            f"{size:.2f}",
            f"{floor:.2f}",
            shown(setup.angle(reader, batches)),
            f"{kl:.4f}",
            f"{off:.4f}",
        )


def shown(angle: float) -> str:
    return "no student" if np.isnan(angle) else f"{angle:.2f}"


def entropy(setup: Real | Synthetic, kind: Signal, reader: CacheReader) -> tuple[float, float]:
    """Ids a position, and the bytes a position that the frequencies found in the sample allow."""
    rows = [
        row
        for start in range(0, 256, 8)
        for row in kind.rows(run_teacher(setup.teacher, setup.samples, range(start, start + 8)))
    ]
    ids = np.concatenate([row[0].ravel() for row in rows])
    positions = 256 * len(rows)
    share = np.bincount(ids, minlength=kind.width) / len(ids)
    of_ids = -np.log2(share[ids]).sum()
    if isinstance(kind, Sampled):
        sizes, counts = (np.concatenate([row[i] for row in rows]) for i in (2, 1))
        of_order = np.array([np.log2(np.arange(1, n + 1)).sum() for n in range(kind.draws + 1)])[sizes].sum()
        rest = plain_entropy(counts) * len(counts) + plain_entropy(sizes) * len(sizes)
    else:
        levels = np.concatenate([row[1] for row in rows])
        of_order = positions * np.log2(np.arange(1, kind.k + 1)).sum()  # type: ignore[attr-defined]
        above = levels.max(1, keepdims=True) - levels
        rest = plain_entropy(above.ravel()) * above.size + plain_entropy(levels.max(1)) * len(levels)
    return len(ids) / positions, float(of_ids - of_order + rest) / 8 / positions


def plain_entropy(values: np.ndarray) -> float:
    """Bits a value."""
    share = np.bincount(values) / len(values)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def distance(setup: Real | Synthetic, kind: Signal, reader: CacheReader) -> tuple[float, float]:
    """KL of one draw over 2,048 positions, and the bias of the target over 8: see `bias`."""
    batch = setup.samples.batch(range(8))
    dense, kept = setup.teacher(batch)["logits"].flatten(0, 1), reader(batch)
    return divergence(dense, kept).mean().item(), bias(
        dense[::256][:8], {k: v[::256][:8] for k, v in kept.items()}, kind
    )


def bias(dense: Tensor, kept: Mapping[str, Tensor], kind: Signal) -> float:
    """L1 distance of the target's mean over draws from the dense distribution, in BINS bins of equal mass by rank."""
    p, target = dense.softmax(-1), torch.zeros_like(dense)
    if isinstance(kind, Sampled):
        for row, out in zip(dense, target, strict=True):
            offsets = np.random.default_rng(0).random(DRAWN)
            ids, counts, _ = kind.sample(row.expand(DRAWN, -1).contiguous(), offsets)
            out.index_add_(0, torch.from_numpy(ids).long(), torch.from_numpy(counts) / (kind.draws * DRAWN))
    else:
        target += ((kept["tail"] / (target.shape[1] - kept["ids"].shape[1]))[:, None]).expand_as(target)
        target.scatter_(1, kept["ids"], kept["log_probs"].exp())
    ranked, order = p.sort(-1, descending=True)
    bins = (ranked.cumsum(-1) * BINS).long().clamp(max=BINS - 1)
    masses = [torch.zeros(len(p), BINS).scatter_add_(1, bins, mass.gather(1, order)) for mass in (p, target)]
    return (masses[0] - masses[1]).abs().sum(-1).mean().item()


if __name__ == "__main__":
    main()
