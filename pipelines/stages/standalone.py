"""Export and evaluation of checkpoints that weren't trained by a run of this output folder."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from compress.prune.slicing.checkpoint import register_pruned
from distill.checkpoint.config import load_config
from distill.checkpoint.folder import checkpoint_folder
from distill.tasks.choose import TASKS, choose
from pipelines.runs.console import Console
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.evaluate_config import EvaluateConfig
from pipelines.settings.schemes import is_reduced
from pipelines.settings.task_settings import fitted_length, read_models
from pipelines.stages.compared_texts import as_plain_texts
from pipelines.stages.data import data_stage, read_data, read_task
from pipelines.stages.evaluate import Candidate, evaluate_stage
from pipelines.stages.export import export_stage, requested_targets
from pipelines.stages.label_order import by_label_stage
from pipelines.stages.teacher import MODEL


def standalone(config: EvaluateConfig, console: Console) -> tuple[Run, list[Candidate], Artefact, Artefact]:
    """Exports and evaluates the configured checkpoints.

    Returns:
        (run, what was measured, data, evaluation)

    Raises:
        InputError: A checkpoint, a data set or a format is invalid, or they don't fit together.
    """
    named = [("student" if config.teacher else "model", config.model)]
    if config.teacher:
        named.insert(0, ("teacher", config.teacher))
    folders = {name: checkpoint_folder(model, name) for name, model in named}
    for folder in folders.values():
        register_pruned(folder)
    run = Run(Path(config.output), config.seed, console)
    first = load_config(folders[named[0][0]], named[0][0])
    name, why = choose(config.task, first, named[0][1], config.data)
    config, shorter = check_models(config, name, folders)
    console.say(f"  task: {name} ({why}{shorter})")
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
            as_plain_texts(splits.test),
            parity=config.measure.parity,
            max_length=config.data.max_length,
            targets=requested_targets(config.export, ordered.folder / MODEL, dynamic=config.dynamic),
            reduced=is_reduced(config.processor, ordered.folder / MODEL, dynamic=config.dynamic),
        )
        candidates.append(Candidate(name, "given", export))
    done = evaluate_stage(run, candidates, splits, data, config.measure, config.data.max_length, task)
    return run, candidates, data, done


def check_models(config: EvaluateConfig, task: str, folders: Mapping[str, Path]) -> tuple[EvaluateConfig, str]:
    """Returns the configuration with its text length, and a note if that is shorter than usual; see `fitted_length`.

    Raises:
        InputError: A checkpoint is incomplete, or a tokenizer doesn't belong to its model.
    """
    kind = TASKS[task](())
    for role, folder in folders.items():
        kind.check_weights(folder, role)
    length, note = fitted_length(config.data.max_length, kind, read_models(folders, kind))
    return replace(config, data=replace(config.data, max_length=length)), note
