"""Teacher ensembles: each teacher has a stage, and one checkpoint outputs the mixture of their predictions."""

from pathlib import Path
from typing import Any

from distill.checkpoint.config import load_config
from distill.checkpoint.folder import checkpoint_folder
from distill.checkpoint.tokenizer import load_tokenizer
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.tasks.text_classification import TextClassification, check_task
from distill.teacher.config import TeacherConfig
from distill.teacher.ensemble import Ensemble, register
from distill.teacher.fingerprint import check_same_tokenizer
from pipelines.runs.stage import Artefact, Run, content_hash
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.layouts import Layouts
from pipelines.stages.cache_writing import load_teacher
from pipelines.stages.data import read_data, read_task
from pipelines.stages.scoring import compute_outputs
from pipelines.stages.teacher import MODEL, teacher_stage

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def check_teachers(teacher: TeacherConfig, loss: LossConfig, source: Path) -> None:
    """Checks that several teachers can form an ensemble.

    Raises:
        InputError: A further teacher uses another tokenizer or was trained for another task, or loss terms on layers or
            a temperature ramp are configured.
    """
    first = load_tokenizer(source)
    for name in teacher.also:
        folder = checkpoint_folder(name)
        check_task(load_config(folder), name)
        TextClassification(()).check_weights(folder, "teacher", new_head=True)
        check_same_tokenizer(first, load_tokenizer(folder), name, "teacher")
    asked = [name for name in ("hidden", "attention", "relations") if getattr(loss, name)]
    if teacher.also and asked:
        raise InputError(
            f"loss.{asked[0]}: expected 0 with several teachers, found {getattr(loss, asked[0])}: they have no layers "
            "in common"
        )
    if teacher.also and "temperature" in loss.ramps:
        raise InputError("loss.ramps temperature: several teachers are mixed at one temperature; leave it out")


def ensemble_stage(
    run: Run, config: DistillConfig, data: Artefact, first: Artefact, precision: str, layouts: Layouts
) -> Artefact:
    """Writes `model/`: all teachers as one checkpoint, each fine-tuned first if necessary.

    Raises:
        InputError: The layout shards the teacher.
    """
    if layouts.teacher.sharded:
        raise InputError(
            f"teacher.layout {layouts.teacher}: several teachers are asked together, whole on each process; use "
            "replicated"
        )
    members = {"teacher": first}
    for number, name in enumerate(config.teacher.also, 2):
        source = checkpoint_folder(name)
        members[f"teacher-{number}"] = teacher_stage(
            run, config, source, content_hash(source), data, precision, layouts.tuned, name=f"teacher-{number}"
        )
    own = config.teacher
    settings = {
        "weights": list(own.weights) or [1.0] * len(members),
        "mix": own.mix,
        "sharpness": own.sharpness,
        "mix_temperature": config.loss.softness,
    }

    def work(folder: Path) -> dict[str, Any]:
        models = [load_teacher(each.folder / MODEL) for each in members.values()]
        tokenizer, splits = load_tokenizer(first.folder / MODEL), read_data(data)
        whole = Ensemble.of(models, **settings)
        whole.save_pretrained(folder / MODEL)
        tokenizer.save_pretrained(folder / MODEL)
        task, pad_id = read_task(data), int(tokenizer.pad_token_id or 0)
        texts = task.encode(tokenizer, splits.validation, config.data.max_length)
        scores = {
            name: compute_outputs(model, texts, pad_id, task).score
            for name, model in zip((*members, "together"), (*models, whole), strict=True)
        }
        told = ", ".join(f"{name} {score:.2%}" for name, score in scores.items())
        run.console.say(f"  ensemble: on the validation split {told}")
        return {f"val/{name}": score for name, score in scores.items()}

    register()
    return run.stage("ensemble", settings, dict(members), work, version=VERSION)
