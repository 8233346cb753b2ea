"""Students with zeros in their weights: what accuracy they keep, and what the zeros buy on each runtime.

    python -m benchmarks.sparse_students --teacher runs/demo/teacher/KEY/model --data examples/data/banking77

Every way trains the same student on the same batches from the teacher's cached logits; the sparse ones reach their
pattern by the gradual schedule. 4x1 are blocks of four outputs at one input, which Intel's papers call 1x4. Each
runtime then runs all students in turn in one measurement, the dense one twice: what its second copy differs by is
noise. Students are kept in the output folder and aren't trained again there; it is of one teacher and one data set.
OpenVINO and NNCF are measured where they are installed.
"""

import argparse
import copy
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from benchmarks.kept import keep_to
from benchmarks.sparse_runtimes import RUNTIMES, Students, Unavailable
from compress.measure.latency import Inputs, Latency, Runner, measure
from compress.sparsity.layers import zero_share
from compress.sparsity.recipe import SparseConfig
from compress.sparsity.training import SparseTraining, convert, prepare
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.batches import epoch_order
from distill.data.batches.encode import Encoded, encode
from distill.data.config import DataConfig
from distill.data.splits.labelled import load_splits
from distill.losses.logits import forward_kl
from distill.student.build import build_student
from distill.tasks.text_classification import TextClassification
from distill.teacher.fingerprint import frozen
from distill.train.config import TrainConfig
from distill.train.optimizer import build_optimizer, build_schedule, set_dropout
from pipelines.runs.console import Console
from pipelines.settings.this_machine import commit, describe

WAYS: dict[str, dict[str, Any]] = {
    "dense": {},
    "2:4": {"pattern": "2:4"},
    "80%": {"pattern": "unstructured", "amount": 0.8},
    "80% 4x1": {"pattern": "4x1", "amount": 0.8},
}
AGAIN = "dense again"
TEMPERATURE = 2.0
SHAPES = {1: 100, 32: 8}  # rows a batch -> batches measured
SMALLEST_GAIN = 0.05  # a smaller one isn't told from noise
ROUNDING = 2e-3  # largest difference of logits between runtimes in float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder of a classifier trained on the data")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--student", default="layers=2")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--rounds", type=int, default=10, help="times each batch is run on each student")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="runs/sparse-students")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.getLogger().setLevel(logging.ERROR)  # the quantizer's advice
    torch.set_num_threads(given.threads)
    console, setup = Console(), Setup(given)
    models = {way: setup.student(way, console) for way in WAYS}
    show_accuracy(console, setup, models)
    models[AGAIN] = copy.deepcopy(models["dense"])
    rows = [row for name in RUNTIMES for row in rows_of(name, setup, models, console)]
    header = ("runtime", "student", "test accuracy", "batch 1 ms", "dense / sparse", "batch 32 ms", "dense / sparse")
    console.table(f"Latency, {given.threads} threads, medians; above 1 the zeros pay", header, rows)
    console.say(f"{describe()}, torch {torch.__version__}, commit {commit()}, {given.rounds} rounds")


class Setup:
    """Teacher, data and the teacher's logits, asked once."""

    def __init__(self, given: argparse.Namespace):
        keep_to(Path(given.output), given, free=("student", "epochs", "learning_rate", "rounds", "threads"))
        folder = Path(given.teacher)
        splits = load_splits(DataConfig(path=given.data, max_length=128, validation_fraction=0.05))
        self.given, self.task = given, TextClassification(splits.labels)
        self.tokenizer = load_tokenizer(folder)
        rows = self.task.head_rows(self.task.config(str(folder)))
        assert rows is not None
        self.teacher = frozen(self.task.load_headed(str(folder), rows))
        self.train, self.test = (encode(self.tokenizer, part, 128) for part in (splits.train, splits.test))
        self.pad_id = int(self.tokenizer.pad_token_id or 0)
        self.place = Path(given.output) / f"{given.student}-{given.epochs}-{given.learning_rate:g}".replace(",", "-")

    def student(self, way: str, console: Console) -> PreTrainedModel:
        """The trained student of a way, from its folder if it is there."""
        folder = self.place / way / "student"
        if not (folder / "config.json").exists():
            self.fit(way, console).save_pretrained(folder)
        return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()

    def fit(self, way: str, console: Console) -> PreTrainedModel:
        """AdamW on the KL divergence from the teacher's cached logits."""
        given, rows = self.given, 32
        train = TrainConfig(epochs=given.epochs, learning_rate=given.learning_rate, batch_size=rows)
        orders = [epoch_order(self.train.lengths, rows, 0, epoch) for epoch in range(given.epochs)]
        batches = [batch for order in orders for batch in order]
        student = build_student(self.teacher, given.student).train()
        set_dropout(student, 0.0)
        student.get_input_embeddings().weight.requires_grad_(False)
        optimizer = build_optimizer(student, [], train)
        schedule = build_schedule(optimizer, train, len(batches))
        training = sparse_training(student, way, len(batches))
        targets = torch.from_numpy(self.targets())
        with console.track(f"training {way}", len(batches), "steps") as advance:
            for batch in batches:
                inputs = self.train.collate(batch, self.pad_id)
                inputs.pop("labels")
                loss = forward_kl(student(**inputs).logits, targets[batch], temperature=TEMPERATURE)
                loss.backward()
                if training:
                    training.after_backward()
                torch.nn.utils.clip_grad_norm_(student.parameters(), train.max_grad_norm)
                optimizer.step()
                if training:
                    training.after_step(optimizer)
                schedule.step()
                optimizer.zero_grad()
                advance(1, f"loss {float(loss):.3f}")
        if training:
            convert(training)
        return student

    def targets(self) -> np.ndarray:
        """The teacher's logits for the training texts, in the data's order, asked once an output folder."""
        file = self.place / "teacher.npy"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, logits_of(partial(torch_logits, self.teacher), self.train, self.pad_id))
        return np.load(file)

    def batches(self, rows: int, count: int) -> list[Inputs]:
        """Test texts drawn once: alone at their own lengths, or padded to the longest of a batch."""
        drawn = np.random.default_rng(0).permutation(len(self.test))[: rows * count].reshape(-1, rows)
        return [arrays(self.test, batch, self.pad_id) for batch in drawn]


def sparse_training(student: PreTrainedModel, way: str, steps: int) -> SparseTraining | None:
    """From dense to the pattern between a tenth and six tenths of the steps; the rest trains what stays."""
    if not WAYS[way]:
        return None
    return prepare(student, SparseConfig(**WAYS[way]).schedule(steps))


@torch.inference_mode()
def torch_logits(model: PreTrainedModel, inputs: Inputs) -> np.ndarray:
    return model(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits.numpy()


def arrays(data: Encoded, rows: np.ndarray, pad_id: int) -> Inputs:
    return {name: value.numpy() for name, value in data.collate(rows, pad_id).items() if name != "labels"}


def logits_of(run: Runner, data: Encoded, pad_id: int) -> np.ndarray:
    """Logits of all rows in the data's order, [rows, classes]."""
    order = np.argsort(data.lengths, kind="stable")
    parts: list[Any] = [run(arrays(data, order[i : i + 32], pad_id)) for i in range(0, len(order), 32)]
    out = np.concatenate(parts)
    return out[np.argsort(order)]


def show_accuracy(console: Console, setup: Setup, models: dict[str, PreTrainedModel]) -> None:
    labels = torch.from_numpy(setup.test.labels)
    rows = []
    for name, model in {"teacher": setup.teacher, **models}.items():
        logits = logits_of(partial(torch_logits, model), setup.test, setup.pad_id)
        zeros = float(np.mean(list(zero_share(model).values())))
        rows.append((name, f"{zeros:.1%}", f"{setup.task.score(torch.from_numpy(logits), labels):.2%}"))
    title = f"{setup.given.student} after {setup.given.epochs} epochs, {len(labels)} test texts"
    console.table(title, ("model", "zeros in the layers", "test accuracy"), rows)


def rows_of(name: str, setup: Setup, models: dict[str, PreTrainedModel], console: Console) -> list[tuple[str, ...]]:
    """A row a student, measured in turn; a plain sentence where the runtime can't."""
    make, exact = RUNTIMES[name]
    samples = setup.batches(1, SHAPES[1])
    students = Students(models, setup.tokenizer, setup.place, samples, setup.given.threads)
    runners: dict[str, Runner] = {}
    reasons: dict[str, str] = {}
    for way in models:
        try:
            runners[way] = make(students, way)
        except Unavailable as reason:
            reasons[way] = str(reason)
    if exact:
        for way, run in runners.items():
            check_same(name, way, run, models[way], samples)
    if set(runners) <= {"dense", AGAIN}:
        return [(name, way, reason, *[""] * 4) for way, reason in reasons.items()]
    found = {}
    for rows, count in SHAPES.items():
        inputs = dict.fromkeys(runners, setup.batches(rows, count))
        found[rows] = measure(runners, inputs, rounds=setup.given.rounds, threads=setup.given.threads)
        console.say(f"  {name}: batch {rows} measured, median length {found[rows]['dense'].length}")
        console.say(f"    {verdict(found[rows])}")
    shown = [
        (name, way, "as above" if exact or way == AGAIN else scored(setup, run), *figures(found, way))
        for way, run in runners.items()
    ]
    return shown + [(name, way, reason, *[""] * 4) for way, reason in reasons.items()]


def check_same(name: str, way: str, run: Runner, model: PreTrainedModel, samples: list[Inputs]) -> None:
    """A runtime that computes something else isn't worth measuring."""
    for inputs in samples[:20]:
        difference = float(np.abs(np.asarray(run(inputs)) - torch_logits(model, inputs)).max())
        if not difference <= ROUNDING:
            raise SystemExit(f"{name}, {way}: logits differ by {difference:.1e} from PyTorch's")


def scored(setup: Setup, run: Runner) -> str:
    logits = torch.from_numpy(logits_of(run, setup.test, setup.pad_id))
    return f"{setup.task.score(logits, torch.from_numpy(setup.test.labels)):.2%}"


def verdict(found: dict[str, Latency]) -> str:
    """Which students the zeros made faster, by more than the dense one differs from its own copy.

    The median and the fastest tenth must both say so: on a busy machine either alone is easily fooled.
    """
    dense = found["dense"]
    ratios = {
        way: (dense.median_ms / each.median_ms, dense.p10_ms / each.p10_ms)
        for way, each in found.items()
        if way != "dense"
    }
    noise = max(SMALLEST_GAIN, *(2 * abs(ratio - 1) for ratio in ratios.pop(AGAIN)))
    gains = [f"{way} {pair[0]:.2f}x" for way, pair in ratios.items() if min(pair) > 1 + noise]
    losses = [f"{way} {pair[0]:.2f}x" for way, pair in ratios.items() if max(pair) < 1 / (1 + noise)]
    parts = [f"faster with zeros: {', '.join(gains)}" if gains else "no gain from zeros"]
    parts += [f"slower: {', '.join(losses)}"] if losses else []
    return f"{'; '.join(parts)} (differences below {noise:.0%} are noise)"


def figures(found: dict[int, dict[str, Latency]], way: str) -> list[str]:
    out = []
    for latencies in found.values():
        ours, dense = latencies[way], latencies["dense"]
        out += [f"{ours.median_ms:.2f} ({ours.p10_ms:.2f}-{ours.p90_ms:.2f})"]
        out += ["" if way == "dense" else f"{dense.median_ms / ours.median_ms:.2f}"]
    return out


if __name__ == "__main__":
    main()
