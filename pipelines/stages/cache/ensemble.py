"""Teacher ensembles: each teacher has a stage, and one checkpoint outputs the mixture of their predictions."""

from pathlib import Path

from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.packing import find_padding_id
from distill.teacher.ensemble import Ensemble, register_ensemble
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.plan import RunPlan
from pipelines.stages.cache.writing import load_teacher
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.scoring import compute_outputs
from pipelines.stages.prepare.teacher import MODEL, teacher_stage

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def ensemble_stage(run: Run, plan: RunPlan, data: Artefact, first: Artefact, precision: str) -> Artefact:
    """Writes `model/`: all teachers as one checkpoint, each fine-tuned first if necessary."""
    members = {"teacher": first}
    for number, checkpoint in enumerate(plan.additional_teachers, 2):
        name = f"teacher-{number}"
        members[name] = teacher_stage(run, plan, checkpoint, data, precision, name=name)
    config, mixture = plan.settings, plan.settings.teacher
    settings = {
        "weights": list(mixture.weights) or [1.0] * len(members),
        "mix": mixture.mix,
        "sharpness": mixture.sharpness,
        "mix_temperature": config.loss.resolved_temperature,
    }

    def work(folder: Path) -> JsonObject:
        models = [load_teacher(each.folder / MODEL) for each in members.values()]
        tokenizer, splits = load_tokenizer(first.folder / MODEL), read_data(data)
        ensemble = Ensemble.from_models(models, **settings)
        ensemble.save_pretrained(folder / MODEL)
        tokenizer.save_pretrained(folder / MODEL)
        task, pad_id = read_task(data), find_padding_id(tokenizer)
        texts = task.encode(tokenizer, splits.validation, config.data.max_length)
        scores = {
            name: compute_outputs(model, texts, pad_id, task).score
            for name, model in zip((*members, "together"), (*models, ensemble), strict=True)
        }
        listing = ", ".join(f"{name} {score:.2%}" for name, score in scores.items())
        run.console.say(f"  ensemble: validation scores: {listing}")
        return {f"val/{name}": score for name, score in scores.items()}

    register_ensemble()
    return run.stage("ensemble", settings, dict(members), work, version=VERSION)
