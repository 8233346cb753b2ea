"""The stages that fit the biases of a trained classifier's classes to the validation split."""

import shutil
from pathlib import Path

import torch

from distill.checkpoint.custom_models import load_model_folder, save_model_folder
from distill.data.batches.packing import find_padding_id
from distill.tasks.class_biases import add_class_biases, fit_class_biases
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.scoring import compute_outputs
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prepare.vocabulary import load_student_tokenizer

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def class_biases_stage(run: Run, name: str, model: Artefact, data: Artefact, max_length: int) -> Artefact:
    """Writes `model/`: the model of another stage with biases of its classes fitted to the validation split.

    Only the biases of the output layer change, so that a quantized model stays as it is otherwise.

    Args:
        run: The run.
        name: Name of the stage.
        model: The stage of the trained model.
        data: The data stage.
        max_length: Maximum number of tokens of a text.
    """

    def work(folder: Path) -> JsonObject:
        task, source, validation = read_task(data), model.folder / MODEL, read_data(data).validation
        tokenizer, network = load_student_tokenizer(source), load_model_folder(source)
        task.configure_tokenizer(tokenizer, source)
        encoded = task.encode(tokenizer, validation, max_length)
        outputs = compute_outputs(network, encoded, find_padding_id(tokenizer), task)
        logits = torch.cat([sample["logits"] for sample in outputs.samples]).double()
        labels = torch.from_numpy(encoded.labels)
        biases = fit_class_biases(logits, labels)
        add_class_biases(network, biases)
        shutil.copytree(source, folder / MODEL)
        save_model_folder(network, folder / MODEL)
        score = float(((logits + biases).argmax(-1) == labels).double().mean())
        most = int(biases.abs().argmax())
        run.console.say(
            f"  {name}: validation {outputs.score:.2%}, with fitted biases {score:.2%}; the largest is "
            f"{biases[most]:+.2f}, of {task.labels[most]!r}"
        )
        return {"val/score": score, "val/score_before": outputs.score, "biases": biases.tolist()}

    return run.stage(
        name, {"max_length": max_length}, {"model": model, "data": data}, work, version=VERSION, seeded=False
    )
