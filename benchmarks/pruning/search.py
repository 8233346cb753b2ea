"""The search for the sizes in which `benchmarks.pruning.pruned_students` trains the students of each method."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from transformers import PreTrainedModel

from benchmarks.pruning.peers import Size, TrainingSetup, find_ratio, prune_with_torch_pruning
from benchmarks.pruning.textbrewer import TextBrewerSize, build_textbrewer_student, list_sizes
from distill.student.build import build_student
from pipelines.runs.files import write_json
from pipelines.stages.deliver.exported_targets import find_budget_target
from pipelines.stages.prune.budget_timing import (
    TimedModel,
    TimingTexts,
    build_timed,
    draw_texts,
    time_together,
)

ROUNDS = 12  # calls of each text
# Methods that choose from what the searches of others measured, whose seconds are theirs too.
SHARED = {"layers-slower": ("layers",), "fresh-slower": ("fresh",), "textbrewer": ("layers", "fresh")}


class FoundSizes(TypedDict):
    """The sizes of a method, and the seconds that their search took."""

    sizes: list[Size]
    seconds: float


class SizeSearch:
    """Searches each method's largest sizes that have the requested speedup, and keeps them in a folder.

    Args:
        setup: The teacher, the data and the budget.
        folder: The folder for the results.
    """

    def __init__(self, setup: TrainingSetup, folder: Path):
        self.setup, self.folder, self.budget = setup, folder, setup.config.budget
        self.requested, self.target = self.budget.speedups[0], find_budget_target(self.budget)

    @cached_property
    def texts(self) -> TimingTexts:
        """The validation texts on which the shape stage measures too."""
        length, seed = self.setup.config.data.max_length, self.setup.run.seed
        return draw_texts(self.setup.splits.validation, self.budget, length, seed, self.setup.task)

    @cached_property
    def teacher(self) -> TimedModel:
        """The teacher's files in fp32."""
        reference, folder = find_budget_target(self.budget, teacher=True), self.folder / "teacher"
        return build_timed(self.setup.load_teacher(), self.setup.tokenizer, reference, folder, self.texts)

    def find_sizes(self, method: str) -> FoundSizes:
        """Returns the sizes of a method, which are searched on the first call."""
        if method == "ours":  # its own search is a part of its training
            return {"sizes": [{}], "seconds": 0.0}
        file = self.folder / f"sizes-{method}.json"
        if not file.exists():
            self.setup.console.say(f"{method}: searching the size with a speedup of {self.requested:g}x")
            searches: Mapping[str, Callable[[], list[Size]]] = {
                "layers": self._search_depth,
                "layers-slower": self._search_slower_depth,
                "fresh": self._search_fresh,
                "fresh-slower": self._search_slower_fresh,
                "textbrewer": self._search_textbrewer,
                "torch-pruning": self._search_ratios,
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            seconds = sum(self.find_sizes(each)["seconds"] for each in SHARED.get(method, ()))
            start = time.perf_counter()
            write_json(file, {"sizes": searches[method](), "seconds": seconds + time.perf_counter() - start})
        sizes: FoundSizes = json.loads(file.read_text())
        return sizes

    def _measure_speedups(self, models: Mapping[str, PreTrainedModel]) -> dict[str, float]:
        """Returns the speedups over the teacher, measured together with it; the files are removed."""
        scratch, tokenizer = self.folder / "scratch", self.setup.tokenizer
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
        fast = [depth for depth, speedup in self._depths.items() if speedup >= self.requested]
        return [{"layers": max(fast, default=1)}]

    def _search_slower_depth(self) -> list[Size]:
        """Returns the smallest number of layers that is too slow; nothing if each is fast enough."""
        slow = [depth for depth, speedup in self._depths.items() if speedup < self.requested]
        return [{"layers": min(slow)}] if slow else []

    @cached_property
    def _depths(self) -> dict[int, float]:
        """Number of layers -> speedup."""
        teacher = self.setup.load_teacher()
        depths = {f"layers={size.layers}": size.layers for size in list_sizes(teacher) if size.kind == "T3"}
        speedups = self._measure_speedups({spec: build_student(teacher, spec) for spec in depths})
        self._report("layers", speedups)
        return {depths[spec]: speedup for spec, speedup in speedups.items()}

    def _search_fresh(self) -> list[Size]:
        """Returns the slowest of TextBrewer's narrow sizes that is fast enough, or the fastest of all."""
        speedups = self._narrow
        fast = [label for label in speedups if speedups[label] >= self.requested]
        return [self._find_size(min(fast, key=lambda label: speedups[label]) if fast else max_key(speedups))]

    def _search_slower_fresh(self) -> list[Size]:
        """Returns the fastest of TextBrewer's narrow sizes that is too slow; nothing if each is fast enough."""
        slow = {label: speedup for label, speedup in self._narrow.items() if speedup < self.requested}
        return [self._find_size(max_key(slow))] if slow else []

    def _find_size(self, label: str) -> Size:
        return asdict(next(size for size in list_sizes(self.setup.load_teacher()) if size.label == label))

    @cached_property
    def _narrow(self) -> dict[str, float]:
        """Label of each of TextBrewer's narrow sizes -> speedup."""
        teacher = self.setup.load_teacher()
        speedups: dict[str, float] = {}
        kinds: dict[str, list[TextBrewerSize]] = {}
        for size in list_sizes(teacher):
            kinds.setdefault(size.kind, []).append(size)
        for group in (sizes for kind, sizes in kinds.items() if kind != "T3"):
            speedups |= self._measure_speedups(
                {size.label: build_textbrewer_student(teacher, size, 0) for size in group}
            )
        self._report("narrow students", speedups)
        return speedups

    def _search_textbrewer(self) -> list[Size]:
        """Returns the deepest T3 and the slowest narrow student that are fast enough."""
        depth = self.find_sizes("layers")["sizes"][0]["layers"]
        sizes = list_sizes(self.setup.load_teacher())
        full_width = next(size for size in sizes if size.kind == "T3" and size.layers == depth)
        return [asdict(full_width), *self.find_sizes("fresh")["sizes"]]

    def _search_ratios(self) -> list[Size]:
        """Returns Torch-Pruning's smallest ratios that are fast enough, ranked over all layers and within each."""
        teacher = self.setup.load_teacher()
        sizes: list[Size] = []
        for per_layer in (False, True):
            speedups: dict[str, float] = {}

            def measure(ratio: float, per_layer: bool = per_layer, speedups: dict[str, float] = speedups) -> float:
                pruned = prune_with_torch_pruning(teacher, ratio, per_layer=per_layer)
                speedup = self._measure_speedups({"student": pruned})["student"]
                speedups[f"{'per layer' if per_layer else 'global'} {ratio:.3f}"] = speedup
                return speedup

            sizes.append({"ratio": find_ratio(measure, self.requested), "per_layer": per_layer})
            self._report("torch-pruning", speedups)
        return sizes

    def _report(self, method: str, speedups: Mapping[str, float]) -> None:
        listing = "; ".join(f"{name} {speedup:.2f}x" for name, speedup in speedups.items())
        self.setup.console.say(f"  {method}: {listing}")


def max_key(speedups: Mapping[str, float]) -> str:
    """Returns the label of the fastest."""
    return max(speedups, key=lambda label: speedups[label])
