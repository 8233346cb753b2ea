"""The stages of a nested family: its largest student, trained together with its slices, and each slice on its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from distill.data.batches.packing import find_padding_id
from distill.slicing import Shape, find_axes
from distill.slicing.nested import compose_shapes, load_slice, write_slices
from distill.train.module import DistillationModule
from distill.train.nested import EXTRA_WORK, NestedModule
from pipelines.runs.manifest import JsonObject
from pipelines.runs.placement import save_model
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import DistillConfig
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.scoring import compute_outputs
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.train.distill import VERSION as TRAINING_VERSION
from pipelines.stages.train.distill import StudentTraining
from pipelines.stages.train.student_start import read_shape

VERSION = 2  # of these stages' algorithm; bump it when the same inputs give a different result (docs/stages.md)


@dataclass(frozen=True)
class NestedTraining(StudentTraining):
    """The training of the largest student of a family together with its slices.

    Args:
        shapes: Target -> the stage that chose its shape within the shape before it; the largest first.
    """

    shapes: Mapping[str, Artefact]

    def inputs(self) -> dict[str, Artefact | str]:
        """Returns what the largest student depends on, and the other shapes."""
        return super().inputs() | {f"shape-{name}": each for name, each in list(self.shapes.items())[1:]}

    def settings(self) -> JsonObject:
        """Returns the settings that the family depends on."""
        return super().settings() | {"nested": {"version": VERSION, "extra": EXTRA_WORK}}

    def is_trained_already(self, student: PreTrainedModel) -> bool:
        """Returns False: slices are trained even if the largest student lost nothing but tokens."""
        return False

    def slices(self) -> list[Shape]:
        """Returns the shapes of all students but the largest, in its numbers."""
        shapes: list[Shape] = []
        for stage in list(self.shapes.values())[1:]:
            shape = read_shape(stage)
            shapes.append(compose_shapes(shapes[-1], shape) if shapes else shape)
        return shapes

    def create_module(self, student: PreTrainedModel, **settings: Any) -> DistillationModule:
        """Returns the module that trains the student and its slices."""
        return NestedModule(student, axes=find_axes(student), shapes=self.slices(), **settings)

    def work(self, folder: Path) -> JsonObject:
        """Trains the family, writes the largest student to `folder` with the index of its slices."""
        metrics = super().work(folder)
        first, *others = self.shapes
        layers = read_shape(self.shapes[first]).layers
        whole = Shape(tuple(range(len(layers))))
        write_slices(folder / MODEL, {first: whole} | dict(zip(others, self.slices(), strict=True)))
        return metrics


def nested_stage(training: NestedTraining) -> Artefact:
    """Writes `model/`: the largest student of a family, and `nested.json`, the slices of it that were trained too."""
    name = f"distill-{next(iter(training.shapes))}"
    return training.run.stage(
        name, training.settings(), training.inputs(), training.work, version=TRAINING_VERSION, together=True
    )


def slice_stage(run: Run, config: DistillConfig, data: Artefact, nested: Artefact, name: str) -> Artefact:
    """Writes `model/`: a slice of a trained family as a student on its own, and scores it on the validation split."""
    settings = {"slice": name, "max_length": config.data.max_length}

    def work(folder: Path) -> JsonObject:
        model, tokenizer = load_slice(nested.folder / MODEL, name), load_student_tokenizer(nested.folder / MODEL)
        save_model(model, tokenizer, folder / MODEL, run.world)
        task = read_task(data)
        rows = task.encode(tokenizer, read_data(data).validation, config.data.max_length)
        outputs = compute_outputs(model, rows, find_padding_id(tokenizer), task, config.loss.resolved_temperature)
        return {"val/score": outputs.score, "params": model.num_parameters()}

    return run.stage(f"distill-{name}", settings, {"data": data, "nested": nested}, work, version=VERSION)
