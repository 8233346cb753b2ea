"""Accuracy at equal measured speed: students pruned by Stillroom, and students of other tools.

    pip install -c constraints.txt -e '.[bench]'
    python -m benchmarks.pruning.pruned_students --teacher FOLDER --data examples/data/banking77 --speedup 4

Speed is that of single texts of the test split of a classification data set on ONNX Runtime with one thread, relative
to the teacher in fp32 on the same runtime with the same fused operators (export `onnxruntime`); all models alternate in
one measurement. Accuracy is that of the deployed file on the test split, one text per call. The methods are:

    ours           `python -m pipelines.distill --teacher T --data D --speedup X`: the pruning pipeline chooses a shape
                   for each seed and learning rate and measures it until the speed is met; tokens that the training
                   texts lack are removed, which saves bytes and no time. Cached logits.
    layers         layers=K with the largest K that isn't slower than requested; evenly spread layers of full width, so
                   it is mostly faster than requested. Our training loop, batches and cached logits.
    layers-slower  the next size on the other side of the requested speed: one layer more.
    fresh          a small model with random weights trained on the labels alone, of the narrow sizes of TextBrewer's
                   students: the slowest that isn't slower than requested; `fresh-slower`: the fastest that is.
    textbrewer     TextBrewer 0.2.1's GeneralDistiller with the teacher in each step, at our temperature and without
                   dropout like all; of its kinds of students, that with copied layers of full width and the narrower
                   one (random weights) that are closest to the speed and not slower. See `textbrewer.py`.
    torch-pruning  Torch-Pruning 1.6.1's magnitude pruner, with the ratio searched by measuring until the speed is met;
                   ranked over all layers as in its BERT example, and within each layer. Then trained like `layers`.

All have the same seeds, splits, epochs and batch size. The learning rate, and one of the peers' two kinds of students,
is chosen on the validation split with the first seed and used for the other seeds. With `--ours`, our students are
those of finished runs, at the learning rate of these runs; the others are trained at that rate too, or with `--rates`
at the best of these. A seed also determines which rows are held out for validation. Printed per method: its size,
learning rate, speedup, test accuracy (median, mean and range over the seeds), the share of the teacher's accuracy, MB,
parameters, and minutes of training and of the search for the size. The teacher's second copy shows the noise of the
speedups. Trained students and searched sizes are kept in the output folder, and the same command continues from there;
speed is measured anew each time.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.pruning.logit_check import check_logits
from benchmarks.pruning.peers import TRAIN, Size, TrainedStudent, TrainingSetup
from benchmarks.pruning.results import (
    MeasuredStudent,
    ModelSize,
    Results,
    Scores,
    StudentResult,
    TeacherResult,
    TriedStudent,
)
from benchmarks.pruning.search import SizeSearch
from benchmarks.pruning.settings import RATES, build_config, read_config, shared_settings
from benchmarks.pruning.table import print_table
from compress.export.common.huggingface import TorchModel
from compress.export.common.source import Source
from compress.export.common.targets import with_sources
from compress.export.onnx.graph import OnnxModel
from compress.export.processors import resolve_reduce_range
from compress.export.write import write_targets
from compress.measure.latency import Latency
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.encode import encode_samples
from distill.data.splits.examples import Examples
from pipelines.reports.schema import LatencyEntry
from pipelines.runs.console import Console
from pipelines.runs.files import write_json
from pipelines.runs.manifest import hash_json
from pipelines.settings.this_machine import describe_machine, find_commit
from pipelines.stages.deliver.exported_targets import find_budget_target
from pipelines.stages.deliver.timed_texts import to_arrays
from pipelines.stages.prune.budget_timing import TimedModel, draw_texts, time_together

METHODS = ("ours", "layers", "layers-slower", "fresh", "fresh-slower", "textbrewer", "torch-pruning")
PEERS = {"textbrewer": "textbrewer", "torch-pruning": "torch_pruning"}  # method -> its package
RESULT, TOKENIZER = "result.json", "tokenizer"
Inputs: TypeAlias = dict[str, np.ndarray]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the students that are missing, measures the best ones and prints the table."""
    options = build_parser().parse_args(arguments)
    missing = [method for method in options.methods if method in PEERS and find_spec(PEERS[method]) is None]
    if missing:
        raise SystemExit(
            f"--methods: expected the packages of {', '.join(missing)}, found none: pip install -e '.[bench]', or "
            "leave them out"
        )
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    console = Console()
    configs = [read_config(Path(run), options.speedup) for run in options.ours]
    configs = configs or [build_config(options, seed) for seed in options.seeds]
    benchmark = Benchmark(options, [TrainingSetup(config, console) for config in configs], console)
    tried = [student for method in options.methods for student in benchmark.train_students(method)]
    results = benchmark.measure(tried)
    write_json(Path(options.output) / "results.json", results)
    print_table(console, results)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="", help="folder of a classifier trained on the data")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--speedup", type=float, default=4.0)
    parser.add_argument("--precision", choices=("fp32", "int8"), default="fp32", help="the students'; int8 is dynamic")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--rates", nargs="+", type=float, help=f"learning rates to choose from; {RATES}, or that of the runs of --ours"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--ours", nargs="+", default=[], help="finished runs with this speedup; all others use their settings"
    )
    parser.add_argument("--limit", type=int, default=0, help="train on this many rows only")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--validation-fraction", type=float, default=0.05)
    parser.add_argument("--trials", type=int, default=150, help="steps before the last comparison of our shapes")
    parser.add_argument("--rounds", type=int, default=20, help="calls of each text in the last measurement")
    parser.add_argument("--threads", type=int, default=1, help="of training; speed is measured with one")
    parser.add_argument("--output", default="runs/pruned-students")
    return parser


class Benchmark:
    """Trains and measures students; finished ones are kept in a folder named by the settings."""

    def __init__(self, options: argparse.Namespace, setups: Sequence[TrainingSetup], console: Console):
        self.options, self.setups, self.console = options, setups, console
        self.first, self.budget = setups[0], setups[0].config.budget
        if any(shared_settings(each) != shared_settings(self.first) for each in setups):
            raise SystemExit("--ours: expected runs that differ in their seed only, found other differences")
        self.target = find_budget_target(self.budget)
        self.folder = Path(options.output) / "students" / hash_json(shared_settings(self.first))[:8]
        self.search = SizeSearch(self.first, self.folder)

    def train_students(self, method: str) -> list[TriedStudent]:
        """Trains every size and rate with the first seed, and the best on validation, `selected`, with the others.

        Returns nothing if the method has no size.
        """
        rates = self.list_rates(method)
        candidates = [(size, rate) for size in self.search.find_sizes(method)["sizes"] for rate in rates]
        if not candidates:
            self.console.say(f"{method}: no size is slower than requested")
            return []
        tried = [self._train_student(method, self.first, size, rate) for size, rate in candidates]
        best = max(range(len(tried)), key=lambda number: tried[number]["validation"])
        for number, student in enumerate(tried):
            student["selected"] = number == best
        return tried + [self._train_student(method, setup, *candidates[best]) for setup in self.setups[1:]]

    def list_rates(self, method: str) -> Sequence[float]:
        """Returns the learning rates to choose from; students of finished runs have that of their runs."""
        options = self.options
        if options.ours and (method == "ours" or not options.rates):
            return [self.first.config.train.peak_rate]
        return options.rates or RATES

    def _train_student(self, method: str, setup: TrainingSetup, size: Size, rate: float) -> TriedStudent:
        """Trains, deploys and scores a student, or reads the result of an earlier call."""
        name = hash_json([size, rate])[:8]
        folder = self.folder / method / name / f"seed-{setup.run.seed}"
        if not (folder / RESULT).exists():
            self.console.say(f"{method}: training, seed {setup.run.seed}, rate {rate:g} ({folder})")
            training = folder / "training"
            training.mkdir(parents=True, exist_ok=True)
            trained = TRAIN[method](setup, size, rate, training)
            scores, model_size = self._deploy(setup, trained, folder)
            search_seconds = trained.search_seconds if method == "ours" else self.search.find_sizes(method)["seconds"]
            identity = {"method": method, "seed": setup.run.seed, "rate": rate, "size": size, "label": trained.label}
            seconds = {"seconds": trained.seconds, "search_seconds": search_seconds}
            write_json(folder / RESULT, {**identity, **scores, **model_size, **seconds})
            shutil.rmtree(training)
        result: StudentResult = json.loads((folder / RESULT).read_text())
        return {**result, "folder": str(folder), "selected": True}

    def _deploy(self, setup: TrainingSetup, trained: TrainedStudent, folder: Path) -> tuple[Scores, ModelSize]:
        """Writes the deployed files and scores them."""
        model, tokenizer = TorchModel.of(trained.model), trained.tokenizer
        chain = with_sources([self.target])
        reduce_range = resolve_reduce_range("auto", "here", [self.target.format]) if self.target.is_quantized else False
        write_targets(Source(trained.model, tokenizer, reduce_range=reduce_range), chain, folder)
        runner = OnnxModel(folder / str(self.target), self.options.threads)
        if self.budget.precision == "fp32":
            check_logits(str(folder), runner, model, self._list_inputs(setup.splits.validation, tokenizer)[:50])
        for target in chain[:-1]:
            shutil.rmtree(folder / str(target))
        tokenizer.save_pretrained(folder / TOKENIZER)
        size = measure_size(trained.model, TimedModel(self.target, folder, runner, {}).bytes)
        return self.measure_scores(setup, runner, tokenizer), size

    def measure_scores(self, setup: TrainingSetup, runner: OnnxModel, tokenizer: PreTrainedTokenizerBase) -> Scores:
        """Returns the accuracy on both splits, one text per call as deployed: dynamic int8 rounds per batch."""
        splits = setup.splits
        scores = {}
        for name, examples in (("validation", splits.validation), ("test", splits.test)):
            classes = [int(runner(batch)[0].argmax()) for batch in self._list_inputs(examples, tokenizer)]
            scores[name] = float(np.mean(np.asarray(classes) == np.asarray(examples.labels)))
        return {"validation": scores["validation"], "test": scores["test"]}

    def _list_inputs(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> list[Inputs]:
        rows, pad_id = (
            encode_samples(tokenizer, examples, self.first.config.data.max_length),
            int(tokenizer.pad_token_id or 0),
        )
        return [to_arrays(rows.collate([number], pad_id)) for number in range(len(rows))]

    def measure(self, tried: Sequence[TriedStudent]) -> Results:
        """Measures the best students and the teacher twice together on test texts; its second copy shows the noise."""
        students = [student for student in tried if student["selected"]]
        length = self.first.config.data.max_length
        texts = draw_texts(self.first.splits.test, self.budget, length, 0, self.first.task)
        reference = replace(self.search.teacher, inputs=texts.inputs(self.first.tokenizer))
        built = {"teacher": reference, "again": reference}
        for number, student in enumerate(students):
            folder = Path(student["folder"])
            tokenizer = load_tokenizer(folder / TOKENIZER)
            built[str(number)] = TimedModel(self.target, folder, texts.inputs(tokenizer))
        latencies = time_together(
            built, self.budget, self.budget.lengths[0], self.options.rounds, self.console, "timing"
        )
        teacher_ms = latencies["teacher"].best_ms
        measured: list[MeasuredStudent] = [
            {**student, "speedup": teacher_ms / latency.best_ms, "latency": latency_entry(latency)}
            for student, latency in ((each, latencies[str(number)]) for number, each in enumerate(students))
        ]
        peers = (PEERS[method] for method in self.options.methods if method in PEERS)
        packages = ("torch", "transformers", "onnxruntime", *peers)
        return {
            "settings": shared_settings(self.first) | {"seeds": [setup.run.seed for setup in self.setups]},
            "machine": describe_machine()
            | {"commit": find_commit(), "versions": {name: version(name) for name in packages}},
            "teacher": self._describe_teacher(reference, latencies["teacher"]),
            "teacher_again": teacher_ms / latencies["again"].best_ms,
            "students": measured,
            "tried": tried,
        }

    def _describe_teacher(self, built: TimedModel, latency: Latency) -> TeacherResult:
        runner = OnnxModel(built.path, self.options.threads)
        scores = self.measure_scores(self.first, runner, self.first.tokenizer)
        size = measure_size(self.first.load_teacher(), built.bytes)
        return {**scores, **size, "latency": latency_entry(latency)}


def latency_entry(latency: Latency) -> LatencyEntry:
    """Returns a latency as it is written to results.json."""
    return cast(LatencyEntry, asdict(latency))


def measure_size(model: PreTrainedModel, size: int) -> ModelSize:
    """Returns the parameters with and without the token embeddings, and the bytes on disk."""
    embeddings = sum(parameter.numel() for parameter in model.get_input_embeddings().parameters())
    total = model.num_parameters()
    return {"params": total, "without_embeddings": total - embeddings, "bytes": size}


if __name__ == "__main__":
    main()
