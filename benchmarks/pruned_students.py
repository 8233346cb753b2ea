"""At equal measured speed, which student keeps most of its teacher's accuracy: ours or other tools', in one run.

    pip install -c constraints.txt -e '.[bench]'
    python -m benchmarks.pruned_students --teacher FOLDER --data examples/data/banking77 --speedup 4

Speed is that of single texts of the test split on ONNX Runtime, one thread, all models in turn in one measurement, over
the teacher in fp32 on the same runtime with the same joined operators (export `onnxruntime`); accuracy is that of the
deployed file on the test split, one text a call. What each way gets:

    ours           `python -m pipelines.distill --teacher T --data D --speedup X`: the shape is chosen by the budget
                   road, for each seed and learning rate anew, and measured until it is met; words that the training
                   texts lack are removed, which costs bytes and no time. Cached logits.
    layers         layers=K, the largest K that isn't slower than asked for; layers spread evenly, widths untouched, so
                   it is mostly faster than asked for. Ours' training loop, batches and cached logits.
    textbrewer     TextBrewer 0.2.1's GeneralDistiller with the teacher in each step, at our temperature and without
                   dropout as everyone; of its kinds of students the one with whole layers copied and the narrower one
                   (random weights) that come nearest to the speed and aren't slower. See `pruning_textbrewer.py`.
    torch-pruning  Torch-Pruning 1.6.1's magnitude pruner, its ratio searched by measuring until the speed is met;
                   ranked over the whole model as in its BERT example, and evenly. Then trained as `layers`.

All have the same seeds, splits, epochs and batch size. The learning rate, and of the peers' two kinds of students one,
is chosen on the validation split with the first seed; the other seeds take it over. A seed also decides which rows are
held out for validation. Everything that was trained or searched stays in the output folder, and the same command goes
on from there; speed is measured anew each time.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.pruning_peers import TRAIN, Lesson, Size, Trained, nearest_ratio, torch_pruned
from benchmarks.pruning_settings import config_of, config_of_run, settings_of
from benchmarks.pruning_table import show
from benchmarks.pruning_textbrewer import brewed_sizes, brewed_student
from compress.export.common.huggingface import TorchModel
from compress.export.common.source import Source
from compress.export.common.targets import with_sources
from compress.export.onnx.graph import OnnxModel
from compress.export.processors import resolve_reduced
from compress.export.write import write_targets
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.encode import encode
from distill.data.splits.labelled import Examples
from distill.student.build import build_student
from pipelines.runs.console import Console
from pipelines.runs.stage import digest_of, write_json
from pipelines.settings.this_machine import commit, describe
from pipelines.stages.budget_timing import Built, Texts, build, target_for, texts_of, time_together
from pipelines.stages.evaluate import arrays

WAYS = ("ours", "layers", "textbrewer", "torch-pruning")
PEERS = {"textbrewer": "textbrewer", "torch-pruning": "torch_pruning"}  # way -> its package
ROUNDS = 12  # of a measurement in a search
ROUNDING = 2e-3  # largest difference of logits between runtimes in float32
RESULT, TOKENIZER = "result.json", "tokenizer"


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    missing = [way for way in given.ways if way in PEERS and find_spec(PEERS[way]) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: not installed; pip install -e '.[bench]', or leave out with --ways")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    console = Console()
    configs = [config_of_run(Path(run), given.speedup) for run in given.ours]
    configs = configs or [config_of(given, seed) for seed in given.seeds]
    bench = Bench(given, [Lesson(config, console) for config in configs], console)
    tried = {way: bench.students(way) for way in given.ways}
    results = bench.results([student for students in tried.values() for student in students if student["taken"]])
    results["tried"] = [student for students in tried.values() for student in students]
    write_json(Path(given.output) / "results.json", results)
    show(console, results)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--teacher", default="", help="folder of a classifier trained on the data")
    found.add_argument("--data", default="examples/data/banking77")
    found.add_argument("--speedup", type=float, default=4.0)
    found.add_argument("--precision", choices=("fp32", "int8"), default="fp32", help="the students'; int8 is dynamic")
    found.add_argument("--epochs", type=int, default=10)
    found.add_argument("--seeds", nargs="+", type=int, default=[0])
    found.add_argument("--rates", nargs="+", type=float, default=[5e-4, 1e-3], help="learning rates to choose from")
    found.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    found.add_argument(
        "--ours", nargs="+", default=[], help="finished runs with this speed-up; all others take their settings"
    )
    found.add_argument("--limit", type=int, default=0, help="train on so many rows only")
    found.add_argument("--batch-size", type=int, default=32)
    found.add_argument("--temperature", type=float, default=2.0)
    found.add_argument("--max-length", type=int, default=128)
    found.add_argument("--validation-fraction", type=float, default=0.05)
    found.add_argument("--trials", type=int, default=150, help="steps before the last comparison of our shapes")
    found.add_argument("--rounds", type=int, default=20, help="times each text is run in the last measurement")
    found.add_argument("--threads", type=int, default=1, help="of training; speed is measured with one")
    found.add_argument("--output", default="runs/pruned-students")
    return found


class Bench:
    """Searches sizes, trains, and measures; what is finished lies in a folder named by the settings."""

    def __init__(self, given: argparse.Namespace, lessons: Sequence[Lesson], console: Console):
        self.given, self.lessons, self.console = given, lessons, console
        self.first, self.budget = lessons[0], lessons[0].config.budget
        if any(settings_of(each) != settings_of(self.first) for each in lessons):
            raise SystemExit("--ours: expected runs that differ in their seed only")
        self.wanted, self.target = self.budget.speedups[0], target_for(self.budget)
        self.rates = [self.first.config.train.learning_rate] if given.ours else given.rates
        self.place = Path(given.output) / "students" / digest_of(settings_of(self.first))[:8]

    @cached_property
    def texts(self) -> Texts:
        """Validation texts, as the shape stage measures on."""
        length = self.first.config.data.max_length
        return texts_of(self.first.splits.validation, self.budget, length, self.first.run.seed, self.first.task)

    @cached_property
    def teacher(self) -> Built:
        reference, place = target_for(self.budget, teacher=True), self.place / "teacher"
        return build(self.first.teacher(), self.first.tokenizer, reference, place, self.texts)

    def speedups(self, models: Mapping[str, PreTrainedModel]) -> dict[str, float]:
        """Measured beside the teacher; the files go again."""
        scratch = self.place / "scratch"
        built = {
            name: build(model, self.first.tokenizer, self.target, scratch / name, self.texts)
            for name, model in models.items()
        }
        found = time_together({"teacher": self.teacher} | built, self.budget, ROUNDS)
        shutil.rmtree(scratch)
        return {name: found["teacher"].best_ms / found[name].best_ms for name in models}

    def sizes(self, way: str) -> list[Size]:
        """The sizes that a way is trained in, searched once."""
        if way == "ours":
            return [{}]
        file = self.place / f"sizes-{way}.json"
        if not file.exists():
            self.console.say(f"{way}: looking for the size that is {self.wanted:g}x as fast")
            search = {"layers": self.depths, "textbrewer": self.brewed_kinds, "torch-pruning": self.ratios}[way]
            file.parent.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            write_json(file, {"sizes": search(), "seconds": time.perf_counter() - start})
        return json.loads(file.read_text())["sizes"]

    def search_seconds(self, way: str, trained: Trained) -> float:
        """What choosing the size took: ours for each student, the others' once for all."""
        file = self.place / f"sizes-{way}.json"
        return trained.search_seconds if way == "ours" else json.loads(file.read_text())["seconds"]

    def depths(self) -> list[Size]:
        teacher = self.first.teacher()
        options = {f"layers={size.layers}": size.layers for size in brewed_sizes(teacher) if size.kind == "T3"}
        found = self.speedups({spec: build_student(teacher, spec) for spec in options})
        self.say("layers", found)
        return [{"layers": max((options[spec] for spec in found if found[spec] >= self.wanted), default=1)}]

    def brewed_kinds(self) -> list[Size]:
        """The deepest of whole layers, and of the narrower ones the slowest that isn't too slow, else the fastest."""
        teacher = self.first.teacher()
        sizes = {size.label: size for size in brewed_sizes(teacher)}
        depth = self.sizes("layers")[0]["layers"]
        whole = next(size for size in sizes.values() if size.kind == "T3" and size.layers == depth)
        found: dict[str, float] = {}
        for kind in {size.kind: None for size in sizes.values() if size.kind != "T3"}:
            found |= self.speedups(
                {label: brewed_student(teacher, size, 0) for label, size in sizes.items() if size.kind == kind}
            )
        self.say("textbrewer", found)
        fast = [label for label in found if found[label] >= self.wanted] or [max(found, key=lambda label: found[label])]
        return [asdict(whole), asdict(sizes[min(fast, key=lambda label: found[label])])]

    def ratios(self) -> list[Size]:
        teacher, found = self.first.teacher(), []
        for even in (False, True):
            measured: dict[str, float] = {}

            def speedup(ratio: float, even: bool = even, measured: dict[str, float] = measured) -> float:
                result = self.speedups({"student": torch_pruned(teacher, ratio, even=even)})["student"]
                measured[f"{'even' if even else 'global'} {ratio:.3f}"] = result
                return result

            found.append({"ratio": nearest_ratio(speedup, self.wanted), "even": even})
            self.say("torch-pruning", measured)
        return found

    def say(self, way: str, found: Mapping[str, float]) -> None:
        self.console.say(f"  {way}: {'; '.join(f'{name} {speed:.2f}x' for name, speed in found.items())}")

    def students(self, way: str) -> list[dict[str, Any]]:
        """Every size and rate with the first seed; the best on the validation split, `taken`, with the others."""
        options = [(size, rate) for size in self.sizes(way) for rate in self.rates]
        tried = [self.student(way, self.first, size, rate) for size, rate in options]
        best = max(range(len(tried)), key=lambda number: tried[number]["validation"])
        found = [entry | {"taken": number == best} for number, entry in enumerate(tried)]
        rest = [self.student(way, lesson, *options[best]) | {"taken": True} for lesson in self.lessons[1:]]
        return found + rest

    def student(self, way: str, lesson: Lesson, size: Size, rate: float) -> dict[str, Any]:
        """Trains, deploys and scores one, or reads what an earlier call found."""
        name = digest_of([size, rate])[:8]
        folder = self.place / way / name / f"seed-{lesson.run.seed}"
        if not (folder / RESULT).exists():
            self.console.say(f"{way}: training, seed {lesson.run.seed}, rate {rate:g} ({folder})")
            training = folder / "training"
            training.mkdir(parents=True, exist_ok=True)
            trained = TRAIN[way](lesson, size, rate, training)
            scores = self.deployed(lesson, trained, folder)
            about = {"way": way, "seed": lesson.run.seed, "rate": rate, "size": size, "label": trained.label}
            seconds = {"seconds": trained.seconds, "search_seconds": self.search_seconds(way, trained)}
            write_json(folder / RESULT, about | scores | seconds)
            shutil.rmtree(training)
        return json.loads((folder / RESULT).read_text()) | {"folder": str(folder)}

    def deployed(self, lesson: Lesson, trained: Trained, folder: Path) -> dict[str, Any]:
        """Writes the files and scores what was written."""
        model, tokenizer = TorchModel.of(trained.model), trained.tokenizer
        chain = with_sources([self.target])
        reduced = resolve_reduced("auto", "here", [self.target.format]) if self.target.rounded else False
        write_targets(Source(trained.model, tokenizer, reduced=reduced), chain, folder)
        runner = OnnxModel(folder / str(self.target), self.given.threads)
        if self.budget.precision == "fp32":
            check_same(runner, model, self.inputs(lesson.splits.validation, tokenizer)[:50], str(folder))
        for target in chain[:-1]:
            shutil.rmtree(folder / str(target))
        tokenizer.save_pretrained(folder / TOKENIZER)
        size = {"bytes": Built(self.target, folder, runner, []).bytes}
        return self.scores(lesson, runner, tokenizer) | parameters(trained.model) | size

    def scores(self, lesson: Lesson, runner: OnnxModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
        """Accuracy on both splits, one text a call as it will be used: dynamic int8 rounds a whole batch alike."""
        found = {}
        for part in ("validation", "test"):
            examples: Examples = getattr(lesson.splits, part)
            classes = [int(runner(batch)[0].argmax()) for batch in self.inputs(examples, tokenizer)]
            found[part] = float(np.mean(np.asarray(classes) == np.asarray(examples.labels)))
        return found

    def inputs(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, np.ndarray]]:
        rows, pad = encode(tokenizer, examples, self.first.config.data.max_length), int(tokenizer.pad_token_id or 0)
        return [arrays(rows.collate([number], pad)) for number in range(len(rows))]

    def results(self, students: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """All students and the teacher twice, measured in turn on test texts: its second copy tells what is noise."""
        length = self.first.config.data.max_length
        texts = texts_of(self.first.splits.test, self.budget, length, 0, self.first.task)
        reference = replace_inputs(self.teacher, texts.inputs(self.first.tokenizer))
        built = {"teacher": reference, "again": replace_inputs(reference, reference.inputs, self.budget.threads)}
        for number, student in enumerate(students):
            folder = Path(student["folder"])
            runner = OnnxModel(folder / str(self.target), self.budget.threads)
            tokenizer = load_tokenizer(folder / TOKENIZER)
            built[str(number)] = Built(self.target, folder, runner, texts.inputs(tokenizer))
        found = time_together(built, self.budget, self.given.rounds)
        first = found["teacher"].best_ms
        rows = [
            student | {"speedup": first / found[str(number)].best_ms, "latency": asdict(found[str(number)])}
            for number, student in enumerate(students)
        ]
        about = parameters(self.first.teacher()) | {"latency": asdict(found["teacher"]), "bytes": reference.bytes}
        scores = self.scores(self.first, self.teacher.runner, self.first.tokenizer)  # type: ignore[arg-type]
        packages = ("torch", "transformers", "onnxruntime", *(PEERS[way] for way in self.given.ways if way in PEERS))
        return {
            "settings": settings_of(self.first) | {"seeds": [lesson.run.seed for lesson in self.lessons]},
            "machine": describe() | {"commit": commit(), "versions": {name: version(name) for name in packages}},
            "teacher": about | scores,
            "teacher_again": first / found["again"].best_ms,
            "students": rows,
        }


def parameters(model: PreTrainedModel) -> dict[str, Any]:
    """How many there are, with and without the word embeddings, which cost no time."""
    words: Any = model.get_input_embeddings().weight
    return {"params": model.num_parameters(), "without_words": model.num_parameters() - words.numel()}


def replace_inputs(built: Built, inputs: Sequence[dict[str, np.ndarray]], threads: int = 0) -> Built:
    """The same files on other inputs, opened once more where `threads` are given."""
    runner = OnnxModel(built.folder / str(built.target), threads) if threads else built.runner
    return Built(built.target, built.folder, runner, inputs)


def check_same(runner: OnnxModel, model: TorchModel, samples: Iterable[dict[str, np.ndarray]], where: str) -> None:
    """A file that computes something else than what was trained isn't worth measuring."""
    worst = max(float(np.abs(runner(batch) - model(batch)).max()) for batch in samples)
    if not worst <= ROUNDING:
        raise SystemExit(f"{where}: logits differ by {worst:.1e} from PyTorch's")


if __name__ == "__main__":
    main()
