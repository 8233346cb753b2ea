"""Language-model students trained on the dense teacher, on cached signals, or on labels alone.

    python -m benchmarks.tasks.small_lm --config benchmarks/tasks/small-lm.yaml --output runs/small-lm
    python -m benchmarks.cache.cached_students --lm runs/small-lm --output runs/cached-students

All students are trained on the same blocks of the small language model's training text, in the same order; only the
targets differ: the teacher's whole distribution (`dense`), sampled or top-k signals from a cache, or the next tokens
(`labels`). A student has the teacher's embeddings and output head, frozen or not, and layers of its own that the seed
initializes. Printed are mean and standard deviation over the seeds of the cross-entropy on unseen blocks and of the KL
divergence from the teacher there, in nats per token. The `dense` students are the baseline: a cache can't train better
ones than the teacher itself. Runs that are already in the output's results.jsonl aren't repeated, so targets, seeds and
steps can be passed in several calls.
"""

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.common.results_folder import Results, check_settings
from benchmarks.common.spread import format_spread
from benchmarks.common.timing import synchronize
from benchmarks.tasks.small_lm import measure_nats
from distill.cache import CacheReader, Identity, Sampled, TopK, write_cache
from distill.cache.samples import build_samples
from distill.data.batches.batches import TrainBatches
from distill.data.batches.token_blocks import LanguageBlocks
from distill.losses.compose import distribution_loss, weighted_sum
from distill.losses.config import LossConfig
from distill.losses.teacher_signals import SignalSource, TeacherSignals
from distill.teacher.fingerprint import weights_fingerprint
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import set_rate
from pipelines.runs.console import Console

TARGETS = ("dense", "sampled", "topk", "labels")
BATCH = 8
LEARNING_RATE = 1e-3
DEV_BLOCKS = 400


class Result(TypedDict):
    """A line of results.jsonl."""

    targets: str
    seed: int
    steps: int
    dev_nats: float
    dev_kl: float
    trained: int


def main() -> None:
    """Trains the students that are missing, and prints the table of all."""
    parser = build_parser(__doc__, "runs/cached-students")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=["dense", "sampled", "labels"])
    parser.add_argument("--draws", type=int, default=13, help="of a sampled signal")
    parser.add_argument("--k", type=int, default=12, help="of a top-k signal")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    output = Path(options.output)
    check_settings(output, options, free=("targets", "seeds", "steps"))
    experiment, results = Experiment.load(options, Console()), Results[Result](output)
    for targets in options.targets:
        done = partial(results.find, targets=targets, steps=options.steps)
        seeds = [seed for seed in options.seeds if done(seed=seed) is None]
        for result in experiment.train_students(targets, seeds) if seeds else []:
            results.add(result)
    print_table(experiment.console, results.all, options.steps)


def build_parser(about: str | None, output: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of an `Experiment`; `output` is the default folder."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="runs/small-lm", help="folder that benchmarks.tasks.small_lm wrote")
    parser.add_argument("--output", default=output)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--frozen", action="store_true", help="don't train the embeddings and the output head")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    return parser


@dataclass(frozen=True)
class Experiment:
    """What all students share: the teacher, the blocks to train on, and the unseen ones [blocks, length]."""

    options: argparse.Namespace
    console: Console
    teacher: LlamaForCausalLM
    data: LanguageBlocks
    dev: np.ndarray

    @classmethod
    def load(cls, options: argparse.Namespace, console: Console) -> "Experiment":
        """Loads the small language model and its text."""
        folder = Path(options.lm)
        teacher = LlamaForCausalLM.from_pretrained(folder / "model").eval().to(options.device)
        train, dev = (np.load(folder / f"{name}.npy") for name in ("train", "dev"))
        data = LanguageBlocks([row.astype(np.int64) for row in train[: options.steps * BATCH]])
        return cls(options, console, teacher, data, dev[:DEV_BLOCKS])

    def train_students(self, targets: str, seeds: list[int]) -> list[Result]:
        """Trains a student per seed, side by side so that the teacher is queried once per batch, and measures them."""
        signals: SignalSource | CacheReader | None = None
        if targets == "dense":
            signals = query_in_float32(OnlineTeacher(self.teacher, device=self.teacher.device))
        elif targets in ("sampled", "topk"):
            signals = self._build_cache(targets)
        loss = LossConfig(kl=0, ce=1) if targets == "labels" else LossConfig(kl=1, temperature=1)
        modules = [DistillationModule(self.build_student(seed), loss=loss, train=TrainConfig()) for seed in seeds]
        batches = TrainBatches(self.data, BATCH, 0, seed=0, signals=signals)
        train_modules(modules, batches, self.options.steps, targets, self.console)
        return [
            {
                "targets": targets,
                "seed": seed,
                "steps": self.options.steps,
                "dev_nats": measure_nats(module.student, self.dev),
                "dev_kl": measure_kl(module.student, self.teacher, self.dev),
                "trained": module.student.num_parameters(only_trainable=True),
            }
            for seed, module in zip(seeds, modules, strict=True)
        ]

    def build_student(self, seed: int) -> LlamaForCausalLM:
        """Returns a student with the teacher's embeddings and head, and layers that the seed initializes."""
        torch.manual_seed(seed)
        sizes = {"num_hidden_layers": self.options.layers}
        student = LlamaForCausalLM(LlamaConfig(**self.teacher.config.to_dict() | sizes))
        pairs = (
            (student.get_input_embeddings(), self.teacher.get_input_embeddings()),
            (student.get_output_embeddings(), self.teacher.get_output_embeddings()),
        )
        for layer, teacher_layer in pairs:
            layer.load_state_dict(teacher_layer.state_dict())
            layer.requires_grad_(not self.options.frozen)
        student.train()
        return student.to(self.teacher.device)

    def _build_cache(self, targets: str) -> CacheReader:
        width = self.teacher.config.vocab_size
        signal = Sampled(width, draws=self.options.draws) if targets == "sampled" else TopK(width, k=self.options.k)
        identity = Identity(weights_fingerprint(self.teacher), "small-lm", (signal,))
        folder = Path(self.options.output) / f"cache-{targets}-{self.options.steps}"
        samples = build_samples(self.data, 0)
        with self.console.track("cache: querying the teacher", len(samples)) as advance:
            teacher = OnlineTeacher(self.teacher, device=self.teacher.device)
            write_cache(folder, identity, samples, teacher, on_progress=advance)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        per_token = size / samples.lengths.sum()
        self.console.say(f"cache of {signal}: {per_token:.2f} bytes per token, including all files of the folder")
        return CacheReader(folder, identity)


def query_in_float32(teacher: OnlineTeacher) -> SignalSource:
    """Returns the teacher computing in float32, as for a cache, while the student trains in bfloat16."""

    def query(batch: Mapping[str, Tensor]) -> TeacherSignals:
        with torch.autocast(teacher.model.device.type, enabled=False):
            return teacher(batch)

    return query


def train_modules(
    modules: list[DistillationModule],
    batches: TrainBatches,
    steps: int,
    label: str,
    console: Console,
    learning_rate: float = LEARNING_RATE,
) -> None:
    """Trains modules with AdamW as `train_with` does."""
    optimizers: list[Optimizer] = [
        torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True,
        )
        for module in modules
    ]  # fmt: skip
    train_with(optimizers, modules, batches, steps, label, console)


def train_with(
    optimizers: list[Optimizer],
    modules: list[DistillationModule],
    batches: TrainBatches,
    steps: int,
    label: str,
    console: Console,
) -> float:
    """Trains modules on the same batches in bfloat16, with warm-up and a cosine schedule; returns the seconds."""
    start, step = time.perf_counter(), 0
    device = next(modules[0].parameters()).device
    peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
    with console.track(label, steps, "steps") as advance:
        while step < steps:
            for drawn in batches:
                batch = modules[0].transfer_batch_to_device(drawn, device, 0)
                factor = min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps))
                for module, optimizer, rates in zip(modules, optimizers, peaks, strict=True):
                    for group, rate in zip(optimizer.param_groups, rates, strict=True):
                        set_rate(group, rate * factor)
                    with torch.autocast(device.type, torch.bfloat16):
                        value = weighted_sum(module.loss, module.compute_terms(batch))
                    value.backward()
                    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                advance(1, f"loss {value.item():.3f}")
                step += 1
                if step == steps:
                    break
    synchronize(device)
    return time.perf_counter() - start


@torch.inference_mode()
def measure_kl(student: PreTrainedModel, teacher: PreTrainedModel, blocks: np.ndarray) -> float:
    """Returns the mean KL(teacher, student) in nats per token; blocks [blocks, length]."""
    student.eval()
    values = []
    for ids in (
        torch.from_numpy(blocks).long().to(student.device).split(1)
    ):  # one at a time, so that each has the same weight
        signals = TeacherSignals(logits=teacher(ids).logits.flatten(0, 1))
        values.append(distribution_loss(student(ids).logits.flatten(0, 1), signals, 1.0))
    return torch.stack(values).mean().item()


def print_table(console: Console, results: list[Result], steps: int) -> None:
    """Prints mean and standard deviation over the seeds of the students that were trained for these steps."""
    rows = []
    for targets in TARGETS:
        matching = [line for line in results if (line["targets"], line["steps"]) == (targets, steps)]
        if matching:
            columns = [line["dev_nats"] for line in matching], [line["dev_kl"] for line in matching]
            rows.append((targets, str(len(matching)), *(format_spread(values, ".4f") for values in columns)))
    header = ("targets", "seeds", "nats per token", "KL from the teacher")
    console.table(f"Students after {steps} steps, on unseen text", header, rows)


if __name__ == "__main__":
    main()
