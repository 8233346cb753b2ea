"""The search for the sizes in which `benchmarks.pruned_students` trains the students of each way."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from transformers import PreTrainedModel

from benchmarks.pruning_peers import Size, TrainingSetup, find_ratio, prune_with_torch_pruning
from benchmarks.pruning_textbrewer import build_textbrewer_student, list_sizes
from distill.student.build import build_student
from pipelines.runs.files import write_json
from pipelines.stages.deliver.exported_targets import target_for
from pipelines.stages.prune.budget_timing import (
    TimedModel,
    TimingTexts,
    build_timed,
    draw_texts,
    time_together,
)

ROUNDS = 12  # calls of each text


class FoundSizes(TypedDict):
    """The sizes of a way, and the seconds that their search took."""

    sizes: list[Size]
    seconds: float


class SizeSearch:
    """Searches each way's largest sizes that have the requested speedup, and keeps them in a folder.

    Args:
        setup: The teacher, the data and the budget.
        place: The folder for the results.
    """

    def __init__(self, setup: TrainingSetup, place: Path):
        self.setup, self.place, self.budget = setup, place, setup.config.budget
        self.requested, self.target = self.budget.speedups[0], target_for(self.budget)

    @cached_property
    def texts(self) -> TimingTexts:
        """The validation texts on which the shape stage measures too."""
        length, seed = self.setup.config.data.max_length, self.setup.run.seed
        return draw_texts(self.setup.splits.validation, self.budget, length, seed, self.setup.task)

    @cached_property
    def teacher(self) -> TimedModel:
        """The teacher's files in fp32."""
        reference, place = target_for(self.budget, teacher=True), self.place / "teacher"
        return build_timed(self.setup.load_teacher(), self.setup.tokenizer, reference, place, self.texts)

    def find_sizes(self, way: str) -> FoundSizes:
        """Returns the sizes of a way, which are searched on the first call."""
        if way == "ours":  # its own search is a part of its training
            return {"sizes": [{}], "seconds": 0.0}
        file = self.place / f"sizes-{way}.json"
        if not file.exists():
            self.setup.console.say(f"{way}: searching the size with a speedup of {self.requested:g}x")
            searches: Mapping[str, Callable[[], list[Size]]] = {
                "layers": self._search_depth,
                "textbrewer": self._search_textbrewer,
                "torch-pruning": self._search_ratios,
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            write_json(file, {"sizes": searches[way](), "seconds": time.perf_counter() - start})
        found: FoundSizes = json.loads(file.read_text())
        return found

    def _measure_speedups(self, models: Mapping[str, PreTrainedModel]) -> dict[str, float]:
        """Returns the speedups over the teacher, measured together with it; the files are removed."""
        scratch, tokenizer = self.place / "scratch", self.setup.tokenizer
        built = {
            name: build_timed(model, tokenizer, self.target, scratch / name, self.texts)
            for name, model in models.items()
        }
        latencies = time_together(
            {"teacher": self.teacher} | built, self.budget, self.budget.lengths[0], ROUNDS, self.setup.console, "timing"
        )
        shutil.rmtree(scratch)
        return {name: latencies["teacher"].best_ms / latencies[name].best_ms for name in models}

    def _search_depth(self) -> list[Size]:
        """Returns the largest number of layers that is fast enough, or a single one."""
        teacher = self.setup.load_teacher()
        depths = {f"layers={size.layers}": size.layers for size in list_sizes(teacher) if size.kind == "T3"}
        speedups = self._measure_speedups({spec: build_student(teacher, spec) for spec in depths})
        self._report("layers", speedups)
        return [{"layers": max((depths[spec] for spec in speedups if speedups[spec] >= self.requested), default=1)}]

    def _search_textbrewer(self) -> list[Size]:
        """Returns the deepest T3, and of the narrower students the slowest that is fast enough, or the fastest."""
        teacher = self.setup.load_teacher()
        sizes = {size.label: size for size in list_sizes(teacher)}
        depth = self.find_sizes("layers")["sizes"][0]["layers"]
        full_width = next(size for size in sizes.values() if size.kind == "T3" and size.layers == depth)
        speedups: dict[str, float] = {}
        for kind in {size.kind: None for size in sizes.values() if size.kind != "T3"}:
            own = {label: size for label, size in sizes.items() if size.kind == kind}
            models = {label: build_textbrewer_student(teacher, size, 0) for label, size in own.items()}
            speedups |= self._measure_speedups(models)
        self._report("textbrewer", speedups)
        fast = [label for label, speedup in speedups.items() if speedup >= self.requested]
        fast = fast or [max(speedups, key=lambda label: speedups[label])]
        return [asdict(full_width), asdict(sizes[min(fast, key=lambda label: speedups[label])])]

    def _search_ratios(self) -> list[Size]:
        """Returns Torch-Pruning's smallest ratios that are fast enough, ranked over all layers and within each."""
        teacher = self.setup.load_teacher()
        found: list[Size] = []
        for even in (False, True):
            speedups: dict[str, float] = {}

            def measure(ratio: float, even: bool = even, speedups: dict[str, float] = speedups) -> float:
                pruned = prune_with_torch_pruning(teacher, ratio, even=even)
                speedup = self._measure_speedups({"student": pruned})["student"]
                speedups[f"{'even' if even else 'global'} {ratio:.3f}"] = speedup
                return speedup

            found.append({"ratio": find_ratio(measure, self.requested), "even": even})
            self._report("torch-pruning", speedups)
        return found

    def _report(self, way: str, speedups: Mapping[str, float]) -> None:
        listing = "; ".join(f"{name} {speedup:.2f}x" for name, speedup in speedups.items())
        self.setup.console.say(f"  {way}: {listing}")
