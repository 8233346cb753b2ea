"""Exports and evaluates checkpoints that no run here made."""

from pathlib import Path

from transformers import AutoConfig

from compress.prune.checkpoint import admit
from distill.tasks.choose import choose
from distill.teacher.load import checkpoint_folder
from pipelines.console import Console
from pipelines.data import data_stage, read_data, read_task
from pipelines.evaluate import Candidate, EvaluateConfig, evaluate_stage
from pipelines.export import asked_targets, export_stage, spoken
from pipelines.given import by_label_stage
from pipelines.schemes import is_reduced
from pipelines.stage import Artefact, Run
from pipelines.teacher import MODEL


def standalone(config: EvaluateConfig, console: Console) -> tuple[Run, list[Candidate], Artefact, Artefact]:
    """
    Returns:
        (run, what was measured, data, evaluation)

    Raises:
        InputError: A checkpoint, a data set or a format that can't be, or that don't fit together.
    """
    named = [("student" if config.teacher else "model", config.model)]
    if config.teacher:
        named.insert(0, ("teacher", config.teacher))
    folders = {name: checkpoint_folder(model, name) for name, model in named}
    for folder in folders.values():
        admit(folder)
    run = Run(Path(config.output), config.seed, console)
    name, why = choose(config.task, AutoConfig.from_pretrained(folders[named[0][0]]), named[0][1], config.data)
    console.say(f"  task: {name} ({why})")
    data = data_stage(run, config.data, name)
    splits, task = read_data(data), read_task(data)
    candidates = []
    for name, folder in folders.items():
        ordered = by_label_stage(run, name, folder, data)
        export = export_stage(
            run,
            f"export-{name}",
            ordered,
            ordered.folder / MODEL,
            spoken(splits.test),
            parity=config.measure.parity,
            max_length=config.data.max_length,
            targets=asked_targets(config.export, ordered.folder / MODEL, dynamic=config.dynamic),
            reduced=is_reduced(config.processor, ordered.folder / MODEL, dynamic=config.dynamic),
        )
        candidates.append(Candidate(name, "given", export))
    done = evaluate_stage(run, candidates, splits, data, config.measure, config.data.max_length, task)
    return run, candidates, data, done
