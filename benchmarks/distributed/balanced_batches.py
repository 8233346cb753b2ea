"""Steps of two replicas whose rows are divided by number, by tokens, and by the speed of the replicas.

    python -m benchmarks.distributed.balanced_batches --data goemotions/
    python -m benchmarks.distributed.balanced_batches --data FOLDER_OF_TEXT --steps 8          # a quick trial

Two processes with a thread each train layers of MiniLM on real texts with labels drawn at random: forward and backward
passes of their rows of a batch, then the sum of all gradients. `alternate` gives each every second row, padded to the
longest of the whole batch; `balanced` divides by tokens with padding. Batches are the usual ones, of texts of similar
length, or shuffled. All forms take turns batch by batch. Printed is the median ratio of their times in the same turn,
and the ratio that padding alone would give.

In the second table one of the two is slowed: after its own passes it sleeps, until it took `--slow` times as long.
`equal` divides as if both were as fast, `measured` by speeds that are corrected after every batch. What is lost against
two processes that aren't slowed can be won back only in part, as far as `best` says: with speeds of 1 and 1/2, three
quarters of the throughput are left. Times on a busy machine mean nothing.
"""

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio
from benchmarks.memory.activations import LABELS_ONLY
from benchmarks.training.batch_tokens import CLASSES, draw_texts
from benchmarks.training.optimizer_scores import MODEL
from distill.checkpoint.folder import locate_checkpoint
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.batches import epoch_order
from distill.data.batches.encode import Batch, Encoded
from distill.data.batches.loss_mask import loss_counts
from distill.data.batches.packing import find_padding_id
from distill.data.batches.sharding import divide_rows, shard_batch
from distill.student.build import build_student
from distill.tasks.text_classification import TextClassification
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console

PROCESSES = 2
ORDERS = ("usual", "shuffled")


def main() -> None:
    """Measures on two processes and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="texts, as read by `read_texts`")
    parser.add_argument("--student", default="layers=3")
    parser.add_argument("--rows", type=int, default=32, help="of a batch of both processes")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60, help="batches of each order")
    parser.add_argument("--slow", type=float, default=2.0, help="times as long as the other one")
    options = parser.parse_args()
    options.texts = options.rows * options.steps
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.start_processes(
            partial(run_process, options=options, folder=Path(directory)), nprocs=PROCESSES, start_method="spawn"
        )
        results = json.loads((Path(directory) / "times.json").read_text())
    console = Console()
    console.say(f"{describe_setup()}, {PROCESSES} processes of a thread")
    rows = [
        (order, f"{median_ratio(times['balanced'], times['alternate']):.3f}", f"{results['padding'][order]:.3f}")
        for order, times in results["even"].items()
    ]
    header = ("batches", "time of balanced steps over alternate ones", "predicted from padded tokens")
    console.table(f"{options.data}, batches of {options.rows}", header, rows)
    print_slow(results["uneven"], options, console)


def print_slow(times: dict[str, list[float]], options: argparse.Namespace, console: Console) -> None:
    """Prints the throughput with a slow process, against two that aren't slowed."""
    alone = times["not slowed"]
    best = (1 + 1 / options.slow) / PROCESSES
    equal, measured = (1 / median_ratio(times[name], alone) for name in ("equal", "measured"))
    won = (measured - equal) / (best - equal)
    rows = [("equal", f"{equal:.3f}", ""), ("measured", f"{measured:.3f}", f"{won:.0%}"), ("best", f"{best:.3f}", "")]
    header = ("rows divided", "throughput relative to full speed", "recovered share")
    console.table(f"one process {options.slow:g} times as slow", header, rows)


class Replica:
    """A process's copy of the student.

    Args:
        options: The options of the benchmark.
        rank: Number of this process.
    """

    def __init__(self, options: argparse.Namespace, rank: int):
        source = locate_checkpoint(MODEL, "teacher")
        self.tokenizer, self.rank = load_tokenizer(source), rank
        task = TextClassification(tuple(map(str, range(CLASSES))))
        student = build_student(task.load(str(source), 0), options.student, 0)
        self.module = DistillationModule(student, loss=LABELS_ONLY, train=TrainConfig(dropout=0.0))
        self.module.on_fit_start()
        weights = [each for each in student.parameters() if each.requires_grad]
        self.sums = torch.zeros(sum(each.numel() for each in weights))
        self.weights = weights

    def train(self, batch: Batch, slow: float = 1.0) -> tuple[float, float]:
        """Returns the seconds of a step, and those of this process's own passes."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.module.training_step(batch, 0)
        assert loss is not None
        loss.backward()
        pass_seconds = time.perf_counter() - start
        time.sleep((slow - 1) * pass_seconds)
        pass_seconds = time.perf_counter() - start
        dist.all_reduce(self.sums)
        for weight in self.weights:
            weight.grad = None
        return time.perf_counter() - start, pass_seconds


def run_process(rank: int, *, options: argparse.Namespace, folder: Path) -> None:
    """Measures on one of the processes; the first one writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    replica = Replica(options, rank)
    encoded = draw_texts(options.data, replica.tokenizer, options)
    pad_id = find_padding_id(replica.tokenizer)
    results: dict[str, Any] = {"even": {}, "padding": {}}
    for order in ORDERS:
        batches = order_batches(encoded, options.rows, order)
        results["padding"][order] = predict_ratio(encoded.lengths, batches)
        results["even"][order] = time_divisions(replica, encoded, batches, pad_id)
    batches = order_batches(encoded, options.rows, "usual")
    results["uneven"] = time_slow(replica, encoded, batches, pad_id, options.slow)
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def order_batches(encoded: Encoded, rows: int, order: str) -> list[np.ndarray]:
    """Returns the rows of each batch."""
    if order == "usual":
        return epoch_order(encoded.lengths, rows, 0, 0)
    shuffled = np.random.default_rng(0).permutation(len(encoded))
    return [shuffled[start : start + rows] for start in range(0, len(shuffled), rows)]


def predict_ratio(lengths: np.ndarray, batches: list[np.ndarray]) -> float:
    """Returns the padded tokens of the slowest process, balanced over alternate, summed over all batches."""
    balanced = alternate = 0
    for batch in batches:
        sizes = lengths[batch]
        parts = divide_rows(sizes, [1.0] * PROCESSES)
        balanced += max(len(part) * int(sizes[part].max(initial=0)) for part in parts)
        alternate += -(-len(batch) // PROCESSES) * int(sizes.max())
    return balanced / alternate


def take_every_second(whole: Batch, rank: int) -> Batch:
    """Returns every second row, padded as in the whole batch, with the weights of `shard_batch`."""
    part: dict[str, Any] = {name: value[rank::PROCESSES] for name, value in whole.items()}
    counts, all_of_them = loss_counts(part), loss_counts(whole)
    part["shares"] = {name: PROCESSES * counts[name] / max(all_of_them[name], 1) for name in counts}
    return part


def time_divisions(
    replica: Replica, encoded: Encoded, batches: list[np.ndarray], pad_id: int
) -> dict[str, list[float]]:
    """Returns the seconds of both forms for each batch, in turns."""
    times: dict[str, list[float]] = {"alternate": [], "balanced": []}
    for number, batch in enumerate(batches):
        whole = encoded.collate(batch, pad_id)
        forms = {
            "alternate": take_every_second(whole, replica.rank),
            "balanced": shard_batch(whole, replica.rank, PROCESSES),
        }
        for name in list(forms)[:: 1 if number % 2 else -1]:
            times[name].append(replica.train(forms[name])[0])
    return {name: seconds[len(seconds) // 10 :] for name, seconds in times.items()}


def time_slow(
    replica: Replica, encoded: Encoded, batches: list[np.ndarray], pad_id: int, slow: float
) -> dict[str, list[float]]:
    """Returns the seconds of each batch without a slow process, and with one that gets equal or measured shares."""
    speeds = [1.0] * PROCESSES
    times: dict[str, list[float]] = {"not slowed": [], "equal": [], "measured": []}
    slowdown = slow if replica.rank == 1 else 1.0
    for batch in batches:
        whole = encoded.collate(batch, pad_id)
        equal = shard_batch(whole, replica.rank, PROCESSES)
        times["not slowed"].append(replica.train(equal)[0])
        times["equal"].append(replica.train(equal, slowdown)[0])
        divided = shard_batch(whole, replica.rank, PROCESSES, speeds)
        seconds, pass_seconds = replica.train(divided, slowdown)
        times["measured"].append(seconds)
        gathered = [torch.zeros(1) for _ in range(PROCESSES)]
        dist.all_gather(gathered, torch.tensor([divided["input_ids"].numel() / pass_seconds]))
        measured = [float(each) for each in gathered]
        scale = sum(speeds) / sum(measured)
        speeds = [statistics.mean((old, scale * new)) for old, new in zip(speeds, measured, strict=True)]
    return {name: step_seconds[len(step_seconds) // 5 :] for name, step_seconds in times.items()}


if __name__ == "__main__":
    main()
