"""Students of a small language model, taught on fixed texts or on what they write themselves, in as many steps.

    python -m benchmarks.small_lm --config configs/small-lm.yaml --output runs/small-lm
    python -m benchmarks.on_policy --lm runs/small-lm --output runs/on-policy

For each seed a student, some of the teacher's layers, first learns on fixed texts; from there each way goes on for as
many steps with the same prompts, loss and rate, and on as many tokens: those that follow in the text, those that the
student writes, or now the one and now the other. A finished student is kept, and a run that was killed goes on from its
last checkpoint when the same command runs again.

Told of each: how likely the teacher finds what the student draws after prompts of unseen text (perplexity), how far the
student's distribution is from the teacher's there (reverse KL in nats a token, which a student that only repeats itself
doesn't make small), and the student's perplexity on unseen text. The teacher's own rows say what can be reached.
"""

import argparse
import json
import math
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

import lightning
import numpy as np
import torch
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.cached_students import exact
from benchmarks.kept import keep_to
from benchmarks.small_lm import mean_nats
from distill.cache.sequences import Sequences
from distill.data.batches.data_module import RowsDataModule
from distill.losses.config import DIVERGENCES, LossConfig
from distill.losses.logits import reverse_kl
from distill.models.generation import generate
from distill.models.inputs import inputs_of
from distill.student.build import build_student
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.on_policy import OnPolicy, continuation_batch
from distill.train.steps.on_policy_config import OnPolicyConfig
from pipelines.runs.console import Console
from pipelines.runs.stage import LOGS, SCRATCH, replacing
from pipelines.runs.trainer import fit
from pipelines.settings.distill_config import MachineConfig
from pipelines.stages.report import read_curves

AT_ONCE = 8  # rows that are measured together
DRAWN = 1 << 20  # seed of the continuations that are measured
BEFORE = "before"
SHARE = "train/generation_share"
NOTHING = Sequences([], [])
COLUMNS = {
    "own_nats": "teacher's perplexity of own texts",
    "own_kl": "reverse KL there",
    "dev_nats": "perplexity on unseen text",
    "writing": "of the time writing",
}


@dataclass(frozen=True)
class Text:
    """Blocks of token ids [blocks, prompt + new], int64; those that students learn from, and unseen ones."""

    train: np.ndarray
    dev: np.ndarray
    prompt: int

    def rows(self, start: int, count: int) -> Sequences:
        """Prompts of training blocks, with what follows them in the text; from the first again after the last."""
        chosen = self.train[np.arange(start, start + count) % len(self.train)]
        return Sequences(list(chosen[:, : self.prompt]), list(chosen[:, self.prompt :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="runs/small-lm")
    parser.add_argument("--output", default="runs/on-policy")
    parser.add_argument("--student", default="layers=2")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.5, 1.0], help="of steps on own texts")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--first", type=int, default=400, help="steps on fixed texts before the ways part")
    parser.add_argument("--steps", type=int, default=400, help="of each way")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--first-rate", type=float, default=1e-3)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--divergence", choices=DIVERGENCES, default="jensen_shannon")
    parser.add_argument("--beta", type=float, default=0.5, help="of jensen_shannon")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--measured", type=int, default=200, help="unseen blocks")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    disable_progress_bar()
    console, output = Console(), Path(given.output)
    keep_to(output, given, free=("shares", "seeds", "threads"))
    teacher, text = load(Path(given.lm)).eval(), read_text(given)
    lines = {"teacher": [measured(output / "teacher", teacher, teacher, text)]}
    for seed in given.seeds:
        base = taught(given, seed, None, teacher, text, console)
        lines.setdefault(BEFORE, []).append(measured(base, load(base).eval(), teacher, text))
        for share in given.shares:
            folder = taught(given, seed, share, teacher, text, console)
            lines.setdefault(name_of(share), []).append(measured(folder, load(folder).eval(), teacher, text))
            console.say(f"{folder.name}: {told(lines[name_of(share)][-1:])}")
    show(console, given, lines)


def read_text(given: argparse.Namespace) -> Text:
    length = given.prompt + given.new
    train, dev = (np.load(Path(given.lm) / f"{name}.npy")[:, :length].astype(np.int64) for name in ("train", "dev"))
    if train.shape[1] < length:
        raise SystemExit(f"--prompt and --new: expected at most {train.shape[1]} tokens together, found {length}")
    return Text(train, dev[: given.measured], given.prompt)


def load(folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder / "model")
    return model


def name_of(share: float | None) -> str:
    return BEFORE if share is None else f"share-{share:g}"


def taught(
    given: argparse.Namespace, seed: int, share: float | None, teacher: LlamaForCausalLM, text: Text, console: Console
) -> Path:
    """Folder of a student that learnt on fixed texts alone, or then on its own ones in a share of the steps."""
    folder = Path(given.output) / f"{name_of(share)}-{seed}"
    if (folder / "model").exists():
        return folder
    lightning.seed_everything(seed, verbose=False)
    if share is None:
        student, steps, start, rate = build_student(teacher, given.student, seed), given.first, 0, given.first_rate
    else:
        student = load(Path(given.output) / f"{BEFORE}-{seed}")
        steps, start, rate = given.steps, given.first, given.rate
    train = TrainConfig(epochs=1, learning_rate=rate, schedule="cosine", batch_size=given.batch, dropout=0.0)
    module = DistillationModule(
        student,
        loss=LossConfig(kl=1, temperature=1, divergence=given.divergence, beta=given.beta),
        train=train,
        signals=exact(OnlineTeacher(teacher)),
        on_policy=OnPolicy(OnPolicyConfig(share or 0.0, given.new, given.prompt), seed),
    )
    (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
    fit(
        module,
        RowsDataModule(text.rows(start * given.batch, steps * given.batch), NOTHING, batch_size=given.batch, seed=seed),
        folder,
        label=folder.name,
        train=train,
        machine=MachineConfig(accelerator="cpu", precision=given.precision, threads=given.threads),
        precision=given.precision,
        seed=seed,
        console=console,
        wandb_folder=folder,
    )
    with replacing(folder / "model") as fresh:
        student.save_pretrained(fresh)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)  # its checkpoints
    return folder


def measured(folder: Path, model: LlamaForCausalLM, teacher: LlamaForCausalLM, text: Text) -> dict[str, float]:
    """Nats a token, as COLUMNS names them, and the share of the training that went into writing; kept in `folder`."""
    file = folder / "measured.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shares = [row[SHARE] for row in read_curves(folder / LOGS) if SHARE in row]
        found = own_texts(model, teacher, text) | {"dev_nats": mean_nats(model, text.dev)}
        file.write_text(json.dumps(found | {"writing": statistics.mean(shares) if shares else 0.0}))
    kept: dict[str, float] = json.loads(file.read_text())
    return kept


@torch.no_grad()
def own_texts(model: LlamaForCausalLM, teacher: LlamaForCausalLM, text: Text) -> dict[str, float]:
    """On what the model draws after unseen prompts: how unlikely the teacher finds it, and the reverse KL there."""
    nats, apart, count = 0.0, 0.0, 0
    for part in torch.from_numpy(text.dev[:, : text.prompt]).split(AT_ONCE):
        prompts = list(part)
        new = generate(model, prompts, new_tokens=text.dev.shape[1] - text.prompt, seed=DRAWN)
        batch = continuation_batch(prompts, new, 0)
        asked = batch["positions"]
        own, theirs = (each(**inputs_of(batch)).logits[asked].float() for each in (model, teacher))
        written = batch["input_ids"].roll(-1, 1)[asked]
        nats += torch.nn.functional.cross_entropy(theirs, written, reduction="sum").item()
        apart += reverse_kl(own, theirs).item() * len(written)
        count += len(written)
    return {"own_nats": nats / count, "own_kl": apart / count}


def show(console: Console, given: argparse.Namespace, lines: dict[str, list[dict[str, float]]]) -> None:
    rows = [(name, str(len(found)), *cells(found)) for name, found in lines.items()]
    title = f"{given.student}, {given.divergence}: {given.first} steps on fixed texts, then {given.steps} of each way"
    console.table(title, ("way", "seeds", *COLUMNS.values()), rows)


def cells(found: list[dict[str, float]]) -> list[str]:
    """Mean ± standard deviation over the seeds."""
    out = []
    for name in COLUMNS:
        values = [math.exp(each[name]) if name.endswith("nats") else each[name] for each in found]
        text = f"{statistics.mean(values):.1%}" if name == "writing" else f"{statistics.mean(values):.4g}"
        out.append(f"{text} ± {statistics.stdev(values):.2g}" if len(values) > 1 and name != "writing" else text)
    return out


def told(found: list[dict[str, float]]) -> str:
    return ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS.values(), cells(found), strict=True))


if __name__ == "__main__":
    main()
