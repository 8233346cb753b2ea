"""The stage between two slices of a nested family: the larger one, which the smaller one is searched within."""

from pathlib import Path

from compress.prune.importance.restrict import restrict_scores
from compress.prune.importance.scores import Scores
from distill.checkpoint.custom_models import load_model_folder
from distill.errors import InputError
from distill.slicing import prune
from pipelines.runs.manifest import JsonObject
from pipelines.runs.placement import save_model
from pipelines.runs.stage import Artefact, Run
from pipelines.stages.prepare.data import read_task
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.prune.importance import SCORES
from pipelines.stages.prune.shape_inputs import ShapeInputs
from pipelines.stages.prune.start import find_prunable_axes
from pipelines.stages.train.student_start import read_shape

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def cut_stage(run: Run, inputs: ShapeInputs, shape: Artefact, name: str) -> Artefact:
    """Writes `model/`, the start model pruned to the shape and not trained, and the scores of the units it keeps.

    Raises:
        InputError: A layer is left with one head and one neuron, so that the cost of smaller models can't be predicted.
    """

    def work(folder: Path) -> JsonObject:
        model, task = load_model_folder(inputs.start.folder / MODEL), read_task(inputs.data)
        chosen = read_shape(shape)
        small = prune(model, find_prunable_axes(model, task), chosen)
        axes = find_prunable_axes(small, task)
        lost = set(range(len(chosen.layers))) - {axis.layer for axis in axes}
        if lost:
            raise InputError(
                f"prune.nested: expected units to choose from in every layer of the {name} student, found one head and "
                f"one neuron in layer {min(lost)}: no smaller student can be searched within it; train them apart"
            )
        scores = Scores.load(inputs.scores.folder / SCORES, model)
        save_model(small, load_student_tokenizer(inputs.start.folder / MODEL), folder / MODEL, run.world)
        restrict_scores(scores, chosen, small, axes).save(folder / SCORES)
        return {"params": small.num_parameters()}

    stages = {"start": inputs.start, "scores": inputs.scores, "shape": shape}
    return run.stage(f"cut-{name}", {}, stages, work, version=VERSION, seeded=False)
