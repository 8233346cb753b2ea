"""The exported models of a cascade: their inputs, answers, scores and latencies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.cascade.reader import Member
from compress.export.common.targets import ExportTarget
from compress.measure.process import Opener, open_timing_process
from distill.errors import InputError
from distill.tasks.text_classification import MultiLabel
from pipelines.runs.console import CALLS, TEXTS
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.cascade import TEACHER_ROLE, CascadeConfig
from pipelines.settings.this_machine import describe_machine
from pipelines.stages.deliver.evaluated_model import EvaluatedModel
from pipelines.stages.deliver.export import HUGGINGFACE
from pipelines.stages.deliver.timed_texts import EncodedTexts, collate_calls, encode_split, to_arrays
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.vocabulary import load_student_tokenizer

if TYPE_CHECKING:
    from distill.data.splits.examples import Splits
    from distill.tasks.task import Task

Arrays = dict[str, np.ndarray]


class CascadeModels:
    """The students, and the teacher if there is one, as files of ONNX Runtime that take one text per call.

    Args:
        run: The run.
        config: Its settings, with the length of texts.
        data: The data stage.
        models: The exported models.
    """

    def __init__(self, run: Run, config: CascadeConfig, data: Artefact, models: Sequence[EvaluatedModel]):
        self.run, self.config, self.data = run, config, data
        self.models = {each.name: each for each in models}
        self.folders = {name: each.path(find_deployed(each)) for name, each in self.models.items()}
        self.students = [name for name in self.models if name != TEACHER_ROLE]
        self.encode = cache(self._encode)

    @cached_property
    def splits(self) -> "Splits":
        """The data."""
        return read_data(self.data)

    @cached_property
    def task(self) -> "Task":
        """The task of the models."""
        return read_task(self.data)

    @property
    def multi_label(self) -> bool:
        """Whether a text has any number of labels."""
        return isinstance(self.task, MultiLabel)

    @property
    def settings(self) -> JsonObject:
        """The settings of the stages that measure the models, and the machine that they measure on."""
        measure, length = asdict(self.config.measure), self.config.data.max_length
        return {"measure": measure, "max_length": length, "machine": describe_machine()}

    @property
    def inputs(self) -> dict[str, Artefact | str]:
        """The inputs of those stages."""
        return {"data": self.data, **{name: each.export for name, each in self.models.items()}}

    def open_members(self) -> dict[str, Member]:
        """Returns all models, opened in ONNX Runtime."""
        return {name: Member(folder, threads=self.config.measure.threads) for name, folder in self.folders.items()}

    def build_openers(self, names: Iterable[str]) -> dict[str, Opener]:
        """Returns name -> function that opens the model in ONNX Runtime, also in a fresh process."""
        threads = self.config.measure.threads
        return {name: partial(Member, self.folders[name], threads=threads) for name in names}

    def _encode(self, name: str, part: str) -> EncodedTexts:
        checkpoint = self.models[name].path(HUGGINGFACE)
        return encode_split(checkpoint, getattr(self.splits, part), self.config.data.max_length, self.task)

    def find_max_lengths(self) -> dict[str, int]:
        """Returns model -> tokens at which its texts are cut, no more than its tokenizer allows."""
        tokenizers = {name: load_student_tokenizer(each.path(HUGGINGFACE)) for name, each in self.models.items()}
        longest = self.config.data.max_length
        return {name: self.task.max_row_length(each, longest) for name, each in tokenizers.items()}

    def find_truth(self, part: str) -> np.ndarray:
        """Returns the labels of a split: classes [rows], or which labels apply [rows, labels]."""
        return np.asarray(getattr(self.splits, part).labels)

    def compute_logits(self, name: str, member: Member, part: str) -> np.ndarray:
        """Returns a model's logits of a split, [rows, classes], at one text a call as in deployment."""
        rows, pad_id = self.encode(name, part)
        logits = []
        with self.run.console.track(f"{name} on {part}", len(rows), TEXTS) as advance:
            for i in range(len(rows)):
                logits.append(member(to_arrays(rows.collate([i], pad_id))))
                advance(1)
        return np.concatenate(logits)

    def list_timed_inputs(self, name: str, part: str) -> list[Arrays]:
        """Returns a model's inputs for the texts of a split that are timed, one text each."""
        texts = self.encode(name, part)
        drawn = np.random.default_rng(self.run.seed).permutation(len(texts[0]))[: self.config.measure.texts]
        return collate_calls(texts, drawn, batch=1)

    def time_texts(self, openers: Mapping[str, Opener], inputs: Mapping[str, Sequence[Any]]) -> Arrays:
        """Returns the milliseconds of each text's fastest call, [texts] for each name; all take turns in a process.

        Raises:
            TimingError: A model can't be opened or fails, or the process is killed.
        """
        rounds, threads = self.config.measure.rounds, self.config.measure.threads
        total = sum(map(len, inputs.values())) * (rounds + 1)
        with open_timing_process(openers, threads) as process:
            with self.run.console.track("timing texts", total, CALLS) as advance:
                times = process.time_rounds(inputs, rounds=rounds, on_calls=advance)
        return {name: each.min(0) for name, each in times.items()}

    def score_logits(self, part: str, logits: np.ndarray) -> dict[str, float]:
        """Returns the task's scores of logits [rows, classes] for a split."""
        import torch

        from distill.data.batches.batches import EvalBatches

        rows, pad_id = self.encode(self.students[0], part)
        batches, scorer = EvalBatches(rows, self.task.eval_batch_size, pad_id), self.task.scorer(rows)
        for numbers, batch in zip(batches.order, batches, strict=True):
            scorer.record(numbers, batch, torch.from_numpy(logits[numbers]))
        return scorer.scores()

    def find_label(self, logits: np.ndarray) -> str | list[str]:
        """Returns the label, or the labels, of one text's logits [classes]."""
        if self.multi_label:
            return [self.task.labels[i] for i in np.flatnonzero(logits > 0)]
        return str(self.task.labels[int(logits.argmax())])


def find_deployed(model: EvaluatedModel) -> ExportTarget:
    """Returns the target of a model that a cascade runs: its last one for ONNX Runtime, which is rounded if any is.

    Raises:
        InputError: No file for ONNX Runtime reproduces the model.
    """
    targets = [target for target in model.targets if target.format == "onnxruntime"]
    if not targets:
        raise InputError(
            f"{model.name}: expected a file for ONNX Runtime, found none that reproduces the model: it "
            "can't be a member"
        )
    return targets[-1]
