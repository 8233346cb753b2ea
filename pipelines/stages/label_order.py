"""Stages for checkpoints that are already trained: their labels are reordered to match the data's."""

from pathlib import Path
from typing import Any

from distill.errors import InputError
from pipelines.runs.stage import Artefact, Run, content_hash
from pipelines.stages.data import read_task
from pipelines.stages.teacher import MODEL

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def by_label_stage(run: Run, name: str, folder: Path, data: Artefact) -> Artefact:
    """Writes `model/`: the checkpoint with its labels in the data's order, matched by name.

    Raises:
        InputError: The checkpoint's head lacks the data's labels or its weights.
    """
    stage = f"{name}-by-label"
    if data.digest is None:  # a dry run doesn't read the labels
        return run.planned(stage)
    from compress.export.common.huggingface import export_huggingface
    from distill.checkpoint.config import load_config
    from distill.checkpoint.tokenizer import load_tokenizer

    task, own = read_task(data), load_config(folder, name)
    task.check(own, str(folder))
    rows = task.head_rows(own)
    missing = task.missing_head(folder) if rows is not None else ""
    if rows is None or missing:
        raise InputError(
            f"{name} {str(folder)!r}: has no head for the data's {len(task.labels)} labels "
            f"({', '.join(task.labels[:4])}, …){f': {missing}' if missing else ''}: there is nothing to score"
        )

    def work(place: Path) -> dict[str, Any]:
        tokenizer = load_tokenizer(folder, name)
        task.settle_tokenizer(tokenizer, folder)
        export_huggingface(task.load_headed(str(folder), rows), tokenizer, place / MODEL)
        return {}

    settings = {"task": task.name, "labels": list(task.labels)}
    return run.stage(stage, settings, {"model": content_hash(folder)}, work, version=VERSION)


def check_in_float(folder: Path, name: str) -> None:
    """Checks that a checkpoint isn't quantized.

    Raises:
        InputError: The checkpoint is quantized.
    """
    from compress.quantize.store import FILE, is_rounded
    from distill.checkpoint.config import read_object

    config = read_object(folder, name)
    if is_rounded(folder) or "quantization_config" in config:
        where = FILE if is_rounded(folder) else "quantization_config in config.json"
        raise InputError(
            f"{name} {str(folder)!r}: is quantized already ({where}), expected a checkpoint in float: rounding rounded "
            "weights again would lose more; start from the one it was made from"
        )
