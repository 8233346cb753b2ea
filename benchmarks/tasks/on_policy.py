"""Language-model students trained on fixed texts or on texts that they generate themselves.

    python -m benchmarks.tasks.small_lm --config benchmarks/tasks/small-lm.yaml --output runs/small-lm
    python -m benchmarks.tasks.on_policy --lm runs/small-lm --output runs/on-policy

For each seed a student, made of some of the teacher's layers, is first trained on blocks of the small language model's
training text. From there training continues with each share of on-policy steps, with as many steps and tokens, the same
prompts, loss and learning rate: on the text that follows a prompt, or on what the student generates. Finished students
are kept, and a killed run resumes from its last checkpoint when the same command runs again.

Printed are mean and standard deviation over the seeds of: the teacher's perplexity on what the student generates after
prompts of unseen text; the reverse KL from the teacher there, in nats per token, which mere repetition doesn't reduce;
the student's perplexity on unseen text; and the share of the training time spent on generation. The first row is the
teacher's own.
"""

import argparse
import json
import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import lightning
import numpy as np
import torch
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.cache.cached_students import query_in_float32
from benchmarks.common.results_folder import check_settings
from benchmarks.tasks.small_lm import measure_nats
from distill.cache.sequences import Sequences
from distill.data.batches.data_module import RowsDataModule
from distill.losses.config import DIVERGENCES, LossConfig
from distill.losses.logits import reverse_kl
from distill.models.generation import generate
from distill.models.inputs import select_inputs
from distill.student.build import build_student
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.on_policy import OnPolicy, build_continuation_batch
from distill.train.steps.on_policy_config import OnPolicyConfig
from pipelines.runs.console import Console
from pipelines.runs.files import replace_folder
from pipelines.runs.manifest import LOGS, SCRATCH
from pipelines.runs.trainer import fit_module
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import MachineConfig
from pipelines.stages.deliver.report import read_curves

ROWS_PER_BATCH = 8  # of a measurement
GENERATION_SEED = 1 << 20  # of the texts that are measured
FIRST_STAGE = "before"  # the students before on-policy training
SHARE_COLUMN = "train/generation_share"
NO_ROWS = Sequences([], [])
RESULT = "measured.json"


class Measurement(TypedDict):
    """A student's figures in nats per token, and the share of its training time spent on generation."""

    own_nats: float
    own_kl: float
    dev_nats: float
    generation_share: float


@dataclass(frozen=True)
class Text:
    """Blocks of token ids [blocks, prompt + new tokens], int64: those to train on, and unseen ones."""

    train: np.ndarray
    dev: np.ndarray
    prompt: int

    def select_rows(self, start: int, count: int) -> Sequences:
        """Returns prompts of training blocks with the text that follows them, cycling through the blocks."""
        chosen = self.train[np.arange(start, start + count) % len(self.train)]
        return Sequences(list(chosen[:, : self.prompt]), list(chosen[:, self.prompt :]))


def main() -> None:
    """Trains the students that are missing, measures them and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="runs/small-lm", help="folder that benchmarks.tasks.small_lm wrote")
    parser.add_argument("--output", default="runs/on-policy")
    parser.add_argument("--student", default="layers=2")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.5, 1.0], help="shares of on-policy steps")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--first", type=int, default=400, help="steps on fixed texts before")
    parser.add_argument("--steps", type=int, default=400, help="steps with each share")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--first-rate", type=float, default=1e-3, help="learning rate of the first steps")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--divergence", choices=DIVERGENCES, default="jensen_shannon")
    parser.add_argument("--beta", type=float, default=0.5, help="of jensen_shannon")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens after a prompt")
    parser.add_argument("--measured", type=int, default=200, help="unseen blocks")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    console, output = Console(), Path(options.output)
    check_settings(output, options, free=("shares", "seeds", "threads"))
    experiment = Experiment(options, console, load_model(Path(options.lm)).eval(), read_text(options))
    measurements = {"teacher": [experiment.measure(output / "teacher", experiment.teacher)]}
    for seed in options.seeds:
        for share in (None, *options.shares):
            folder = experiment.train_student(seed, share)
            measurement = experiment.measure(folder, load_model(folder).eval())
            measurements.setdefault(stage_name(share), []).append(measurement)
            console.say(f"{folder.name}: {describe_measurement(measurement)}")
    rows = [(name, str(len(each)), *format_cells(each)) for name, each in measurements.items()]
    steps = f"{options.first} steps on fixed texts, then {options.steps} with each share"
    console.table(f"{options.student}, {options.divergence}: {steps}", ("students", "seeds", *COLUMNS), rows)


def read_text(options: argparse.Namespace) -> Text:
    """Returns the blocks of the small language model's text.

    Raises:
        SystemExit: The blocks are too short for prompt and continuation.
    """
    length = options.prompt + options.new
    train, dev = (np.load(Path(options.lm) / f"{name}.npy")[:, :length].astype(np.int64) for name in ("train", "dev"))
    if train.shape[1] < length:
        raise SystemExit(f"--prompt and --new: expected at most {train.shape[1]} tokens together, found {length}")
    return Text(train, dev[: options.measured], options.prompt)


def load_model(folder: Path) -> LlamaForCausalLM:
    """Returns the model of a folder of this benchmark or of the small language model."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder / "model")
    return model


def stage_name(share: float | None) -> str:
    """Returns the name of the students with a share of on-policy steps, or of those before (None)."""
    return FIRST_STAGE if share is None else f"share-{share:g}"


@dataclass(frozen=True)
class Experiment:
    """What all students share."""

    options: argparse.Namespace
    console: Console
    teacher: LlamaForCausalLM
    text: Text

    def train_student(self, seed: int, share: float | None) -> Path:
        """Returns the folder of a student, which is trained if it isn't finished.

        Args:
            seed: The seed of its training.
            share: Share of on-policy steps after the first steps; None for the first steps alone.
        """
        options = self.options
        folder = Path(options.output) / f"{stage_name(share)}-{seed}"
        if (folder / "model").exists():
            return folder
        lightning.seed_everything(seed, verbose=False)
        if share is None:
            student = build_student(self.teacher, options.student, seed)
            steps, start, rate = options.first, 0, options.first_rate
        else:
            student = load_model(Path(options.output) / f"{FIRST_STAGE}-{seed}")
            steps, start, rate = options.steps, options.first, options.rate
        train = TrainConfig(epochs=1, learning_rate=rate, schedule="cosine", batch_size=options.batch, dropout=0.0)
        module = DistillationModule(
            student,
            loss=LossConfig(kl=1, temperature=1, divergence=options.divergence, beta=options.beta),
            train=train,
            signals=query_in_float32(OnlineTeacher(self.teacher)),
            on_policy=OnPolicy(OnPolicyConfig(share or 0.0, options.new, options.prompt), seed),
        )
        rows = self.text.select_rows(start * options.batch, steps * options.batch)
        (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
        job = TrainingJob(
            label=folder.name,
            train=train,
            machine=MachineConfig(accelerator="cpu", precision=options.precision, threads=options.threads),
            precision=options.precision,
            seed=seed,
            console=self.console,
            wandb_folder=folder,
        )
        fit_module(module, RowsDataModule(rows, NO_ROWS, batch_size=options.batch, seed=seed), folder, job)
        with replace_folder(folder / "model") as fresh:
            student.save_pretrained(fresh)
        shutil.rmtree(folder / SCRATCH, ignore_errors=True)  # the checkpoints
        return folder

    def measure(self, folder: Path, model: LlamaForCausalLM) -> Measurement:
        """Returns a model's figures, from its folder if they are there."""
        file = folder / RESULT
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            shares = [row[SHARE_COLUMN] for row in read_curves(folder / LOGS) if SHARE_COLUMN in row]
            nats, kl = self._measure_generated(model)
            measurement = Measurement(
                own_nats=nats, own_kl=kl, dev_nats=measure_nats(model, self.text.dev),
                generation_share=statistics.mean(shares) if shares else 0.0,
            )  # fmt: skip
            file.write_text(json.dumps(measurement))
        stored: Measurement = json.loads(file.read_text())
        return stored

    @torch.no_grad()
    def _measure_generated(self, model: LlamaForCausalLM) -> tuple[float, float]:
        """Returns the teacher's cross-entropy on what the model generates after unseen prompts, and the reverse KL."""
        nats, divergence, count = 0.0, 0.0, 0
        new_tokens = self.text.dev.shape[1] - self.text.prompt
        for part in torch.from_numpy(self.text.dev[:, : self.text.prompt]).split(ROWS_PER_BATCH):
            prompts = list(part)
            new = generate(model, prompts, new_tokens=new_tokens, seed=GENERATION_SEED)
            batch = build_continuation_batch(prompts, new, 0)
            positions = batch["positions"]
            logits, teacher_logits = (
                each(**select_inputs(batch)).logits[positions].float() for each in (model, self.teacher)
            )
            tokens = batch["input_ids"].roll(-1, 1)[positions]
            nats += torch.nn.functional.cross_entropy(teacher_logits, tokens, reduction="sum").item()
            divergence += reverse_kl(logits, teacher_logits).item() * len(tokens)
            count += len(tokens)
        return nats / count, divergence / count


COLUMNS: dict[str, Callable[[Measurement], float]] = {
    "teacher's perplexity of generated text": lambda each: math.exp(each["own_nats"]),
    "reverse KL there": lambda each: each["own_kl"],
    "perplexity on unseen text": lambda each: math.exp(each["dev_nats"]),
    "time spent on generation": lambda each: each["generation_share"],
}


def format_cells(measurements: list[Measurement]) -> list[str]:
    """Returns mean ± standard deviation over the seeds for each column; of the time only the mean."""
    cells = []
    for name, read in COLUMNS.items():
        values = [read(each) for each in measurements]
        mean = statistics.mean(values)
        if name.startswith("time"):
            cells.append(f"{mean:.1%}")
        else:
            cells.append(f"{mean:.4g}" + (f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""))
    return cells


def describe_measurement(measurement: Measurement) -> str:
    """Returns a model's figures with their names."""
    return ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, format_cells([measurement]), strict=True))


if __name__ == "__main__":
    main()
