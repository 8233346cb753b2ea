"""The starting point of a pruned student, and the shape to which it is pruned."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedModel

from compress.prune.reconstruction import Moments, load_moments, reconstruct
from distill.checkpoint.custom_models import load_model_folder
from distill.slicing import Axis, Shape, find_axes, prune
from distill.student.spec import is_relative
from distill.train.config import TrainConfig
from pipelines.runs.stage import Artefact
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.train.recovery_rate import scale_learning_rate

SHAPE, MOMENTS = "shape.json", "moments.safetensors"


@dataclass(frozen=True)
class StudentStart:
    """The starting point of a pruned student.

    Args:
        name: Name of the target.
        source: The stage with the model before it is pruned.
        shape: The stage that chose the units to keep; None if the source is pruned already.
        tokens: The stage that stores the retained tokens; None if all tokens were retained.
        moments: The stage with the moments of layers' inputs; None if pruned layers aren't reconstructed.
    """

    name: str
    source: Artefact
    shape: Artefact | None
    tokens: Artefact | None
    moments: Artefact | None = None

    @property
    def folder(self) -> Path:
        """Folder of the model before it is pruned."""
        return self.source.folder / MODEL

    def inputs(self) -> dict[str, Artefact]:
        """Returns the stages that the student depends on; the names are part of stage keys of finished runs."""
        stages = {"start": self.source, "tokens": self.tokens, "shape": self.shape, "moments": self.moments}
        return {name: stage for name, stage in stages.items() if stage is not None}

    @property
    def is_untrained(self) -> bool:
        """Whether the model to prune is untrained: built from layers of the teacher, or with factorized embeddings."""
        settings = (self.tokens or self.source).manifest["config"]
        return bool(settings["embedding_rank"]) or (
            settings["student"] != "teacher" and is_relative(settings["student"])
        )

    def is_unpruned(self, student: PreTrainedModel) -> bool:
        """Returns whether nothing but tokens was removed from a trained model.

        This is the case if quantization alone makes it fast enough.
        """
        return not self.is_untrained and student.num_parameters() == self.unpruned.num_parameters()

    @cached_property
    def unpruned(self) -> PreTrainedModel:
        """The model to prune, after removal of tokens."""
        return load_model_folder((self.tokens or self.source).folder / MODEL)

    def adapt_training(self, train: TrainConfig, student: PreTrainedModel) -> TrainConfig:
        """Returns the training settings, with a learning rate that depends on the share of weights pruned."""
        return train if self.is_untrained else scale_learning_rate(train, student, self.unpruned)

    def build_student(self) -> PreTrainedModel:
        """Returns the student before it is trained."""
        model = load_model_folder(self.folder)
        return model if self.shape is None else self.prune(model, find_axes(model), read_shape(self.shape))

    def prune(self, model: PreTrainedModel, axes: Sequence[Axis], shape: Shape) -> PreTrainedModel:
        """Returns the model pruned to a shape, reconstructed if there are moments."""
        if self.moments is not None:
            model = reconstruct(model, axes, shape, self._loaded_moments)
        return prune(model, axes, shape)

    @cached_property
    def _loaded_moments(self) -> Moments:
        assert self.moments is not None
        return load_moments(self.moments.folder / MOMENTS)


def read_shape(shape: Artefact) -> Shape:
    """Reads the shape that a shape stage chose."""
    return Shape.from_dict(json.loads((shape.folder / SHAPE).read_text())["shape"])
