"""Students of one data set under several settings of its data, trained in one folder so that stages are shared."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, TypedDict

import torch

from benchmarks.common.plans import read_plan
from benchmarks.common.rate_search import train_at_best
from benchmarks.common.results_folder import Results
from distill.data.batches.batches import EvalBatches
from distill.errors import InputError
from pipelines.runs.console import Console
from pipelines.runs.stage import Run
from pipelines.settings.plan import RunPlan
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.scoring import compute_logits
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.run_stages import run_stages

_COSTS: tuple[Literal["rows", "steps", "seconds", "data_seconds"], ...] = ("rows", "steps", "seconds", "data_seconds")
_DATA_STAGES = ("augment", "select", "cache")


class StudentResult(TypedDict):
    """A line of results.jsonl.

    Args:
        variant: Name of the settings of the data.
        rate: Learning rate.
        seed: Seed of the student and of the choice of data.
        validation, test: Scores.
        rows: Rows of an epoch.
        steps: Steps of the training.
        seconds: Of the training.
        data_seconds: Of the stages that prepare the student's data and the teacher's answers.
    """

    variant: str
    rate: float
    seed: int
    validation: float
    test: float
    rows: int
    steps: int
    seconds: float
    data_seconds: float


class StudentRuns:
    """Trainings in one folder, whose results are kept.

    Args:
        output: The folder.
        arguments: Settings of every run.
        batch: Rows of a batch.
    """

    def __init__(self, output: Path, arguments: Sequence[str], batch: int):
        self.output, self.arguments, self.batch = output, arguments, batch
        self.results: Results[StudentResult] = Results(output)

    def train(
        self, variant: str, more: Sequence[str], rate: float, seed: int, samples_seen: int | None
    ) -> StudentResult:
        """Returns the result of a training, which is run if it isn't known.

        Args:
            variant: Name of the settings.
            more: The settings.
            rate: Learning rate.
            seed: Seed.
            samples_seen: Epochs times rows of the training, as nearly as whole epochs can; at least one epoch. None
                trains for the epochs of the settings.
        """
        known = self.results.find(variant=variant, rate=rate, seed=seed)
        return known or self.results.add(self._train(variant, more, rate, seed, samples_seen))

    def _train(
        self, variant: str, more: Sequence[str], rate: float, seed: int, samples_seen: int | None
    ) -> StudentResult:
        arguments = [*self.arguments, *more, f"--output={self.output / 'runs'}", f"--seed={seed}"]
        plan = read_plan([*arguments, f"--learning_rate={rate}", "--until=cache"])
        stages, _ = run_stages(self.open_run(plan), plan)
        splits = read_data(stages["data"])
        rows = len(splits.train) + len(splits.unlabelled) * plan.settings.loss.needs_teacher
        epochs = max(1, round(samples_seen / rows)) if samples_seen else plan.settings.train.epochs
        settings = replace(plan.settings, until="distill", train=replace(plan.settings.train, epochs=epochs))
        plan = replace(plan, settings=settings)
        stages, _ = run_stages(self.open_run(plan), plan)
        metrics = stages["distill"].manifest
        return StudentResult(
            variant=variant, rate=rate, seed=seed, validation=float(metrics["metrics"]["val/score"]),
            test=self.score(stages["distill"].folder / MODEL, stages, plan.settings.data.max_length), rows=rows,
            steps=epochs * -(-rows // self.batch), seconds=float(metrics["wall_seconds"]),
            data_seconds=sum(float(stages[name].manifest["wall_seconds"]) for name in _DATA_STAGES if name in stages),
        )  # fmt: skip

    def open_run(self, plan: RunPlan) -> Run:
        """Returns the run of a plan in the folder."""
        return Run(Path(plan.settings.output), plan.settings.seed, Console(quiet=True))

    def score(self, model: Path, stages: Mapping[str, Any], max_length: int) -> float:
        """Returns a model's score on the test split, by the task's own metric; texts are cut to `max_length` tokens."""
        from distill.checkpoint.tokenizer import load_tokenizer

        splits, task, tokenizer = read_data(stages["data"]), read_task(stages["data"]), load_tokenizer(model)
        task.configure_tokenizer(tokenizer, model)
        student, rows = task.load(str(model), 0).eval(), task.encode(tokenizer, splits.test, max_length)
        scorer, batches = task.scorer(rows), EvalBatches(rows, 64, int(tokenizer.pad_token_id or 0))
        with torch.no_grad():
            for numbers, batch in zip(batches.order, batches, strict=True):
                scorer.record(numbers, batch, compute_logits(student, batch))
        return float(next(iter(scorer.scores().values())))

    def compare(
        self,
        variants: Mapping[str, Sequence[str]],
        rates: Sequence[float],
        seeds: Sequence[int],
        samples_seen: Mapping[str, int | None],
    ) -> None:
        """Trains every variant: the first seed at each rate, the others at the best by its validation score."""
        for variant, more in variants.items():
            try:
                train = partial(self.train, variant, more, samples_seen=samples_seen[variant])
                train_at_best(train, rates, seeds, lambda result: result["validation"])
            except InputError as error:
                print(f"{variant}: {error}", flush=True)

    def table(self, variants: Sequence[str], baseline: str) -> list[tuple[str, ...]]:
        """Returns for each variant the mean and spread of the test score, the gain over the baseline, and the cost."""
        best_results = {variant: self.find_best(variant) for variant in variants}
        base = {each["seed"]: each["test"] for each in self.find_best(baseline)}
        table = []
        for variant, results in best_results.items():
            if not results:
                continue
            scores = [100 * each["test"] for each in results]
            pairs = [(each["test"], base[each["seed"]]) for each in results if each["seed"] in base]
            gains = [100 * (test - other) for test, other in pairs]
            means = {name: mean(float(each[name]) for each in results) for name in _COSTS}
            gain = f"{mean(gains):+.2f} ± {spread(gains):.2f}" if gains else ""
            cost = (f"{value:,.0f}" for value in means.values())
            table.append(
                (variant, f"{mean(scores):.2f}", f"{spread(scores):.2f}", gain, f"{results[0]['rate']:g}", *cost)
            )
        return table

    def find_best(self, variant: str) -> list[StudentResult]:
        """Returns a variant's results at its best rate, the one at which all its seeds were trained."""
        results = [each for each in self.results.all if each["variant"] == variant]
        if not results:
            return []
        first = [each for each in results if each["seed"] == results[0]["seed"]]
        rate = max(first, key=lambda each: each["validation"])["rate"]
        return [each for each in results if each["rate"] == rate]


def choose_variants(variants: Mapping[str, Sequence[str]], only: Sequence[str] | None) -> dict[str, Sequence[str]]:
    """Returns the variants with these names, or all.

    Raises:
        SystemExit: There is no variant of a name.
    """
    unknown = [name for name in only or () if name not in variants]
    if unknown:
        raise SystemExit(f"--only: expected some of {', '.join(variants)}, found {', '.join(unknown)}")
    return {name: more for name, more in variants.items() if only is None or name in only}


HEADER = ("data", "test", "spread", "gain", "rate", "rows", "steps", "seconds", "data seconds")


def spread(values: Sequence[float]) -> float:
    """Returns the standard deviation; 0 of one value."""
    return stdev(values) if len(values) > 1 else 0.0
