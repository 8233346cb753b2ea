"""The export stage: deployable files, each reloaded in a fresh process and compared with the model."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import ExportError
from compress.export.common.targets import ExportTarget, check_float, parse_formats, with_sources
from distill.checkpoint.checkpoint import Checkpoint
from distill.errors import InputError
from pipelines.runs.console import Console
from pipelines.runs.manifest import SCRATCH, JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.export import ExportConfig
from pipelines.stages.prepare.compared_texts import as_plain_texts, hash_texts, sample_texts

if TYPE_CHECKING:
    from distill.data.rows.tagged import Tagged
    from distill.data.splits.examples import Examples


VERSION = 5  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
HUGGINGFACE = ExportTarget("huggingface")
ALWAYS = (HUGGINGFACE, ExportTarget("onnx"), ExportTarget("onnxruntime"))


def export_stage(
    run: Run,
    name: str,
    model: Artefact | str,
    checkpoint: Path,
    examples: "Examples | Tagged",
    *,
    parity: int,
    max_length: int,
    targets: Sequence[ExportTarget] = ALWAYS,
    reduce_range: bool = False,
) -> Artefact:
    """Exports the checkpoint to a folder per target and verifies each; rejected targets are set aside with the reason.

    Args:
        run: The run.
        name: Name of the stage.
        model: The checkpoint's stage or content hash, for the stage's key.
        checkpoint: Folder of the trained model.
        examples: Real texts; float targets are compared on `parity` of them, quantized targets on all.
        parity: See `ExportConfig`.
        max_length: See `ExportConfig`.
        targets: Targets to export.
        reduce_range: Whether weights of ONNX Runtime's dynamic int8 quantization have 7 bits.

    Raises:
        ExportError: No target matches the model.
        VerificationError: A comparing process was killed; nothing is recorded, and the next run repeats the stage.
    """
    settings: JsonObject = {"targets": [str(each) for each in targets], "parity": parity, "max_length": max_length}
    settings |= {"reduce_range": True} if reduce_range else {}

    def work(folder: Path) -> JsonObject:
        from pipelines.stages.deliver.export_verification import ExportVerifier, describe_verification, load_source

        remove_results(folder)
        drawn = sample_texts(examples, parity, run.seed)
        verifier = ExportVerifier(
            load_source(checkpoint, reduce_range=reduce_range), folder, examples, drawn, max_length
        )
        all_targets = with_sources(targets)
        with run.console.track(f"{name}: writing and reloading", len(all_targets), "files") as advance:
            for target in all_targets:
                advance(1, str(target))
                verifier.export(target)
        for proof in verifier.proven:
            run.console.say(f"  {describe_verification(proof)}")
        for rejection in verifier.rejected:
            run.console.say(f"  {rejection['target']}: rejected, moved to {rejection['where']}: {rejection['reason']}")
        if not verifier.proven:
            raise ExportError(
                f"{name}: expected a target that reproduces the model, found none: {verifier.rejected[0]['reason']}"
            )
        return {"parity": verifier.proven} | ({"rejected": verifier.rejected} if verifier.rejected else {})

    return run.stage(name, settings, {"model": model, "texts": hash_texts(examples)}, work, version=VERSION)


def remove_results(folder: Path) -> None:
    """Removes what an interrupted attempt has written or set aside."""
    for each in folder.iterdir():
        if each.is_dir() and each.name != SCRATCH:
            shutil.rmtree(each)


def is_labelled(config: ExportConfig, checkpoint: Checkpoint) -> bool:
    """Returns whether the model classifies whole texts and the data has labels."""
    from distill.data.sources.columns import LABEL, SCORE, find_column
    from distill.data.sources.tables import read_splits
    from distill.data.splits.examples import Examples
    from distill.tasks.choose import TASKS, find_task_of_head
    from distill.tasks.text_classification import TextClassification

    name = find_task_of_head(checkpoint.config, checkpoint.name)
    if name not in TASKS or not issubclass(TASKS[name], TextClassification) or TASKS[name].split_class is not Examples:
        return False
    splits = read_splits(config.data)
    names = (*LABEL, *SCORE) if name == "regression" else LABEL
    return find_column(splits.get("test", splits["train"]), names) is not None


def check_model(config: ExportConfig, checkpoint: Checkpoint, console: Console) -> int:
    """Returns the maximum text length of a model that is exported without being scored.

    Raises:
        InputError: The weights or the tokenizer don't belong to the model.
    """
    from distill.tasks.choose import TASKS, find_language_task, find_task_of_head
    from distill.tasks.sentence_embedding import SentenceEmbedding
    from pipelines.settings.lengths import fitted_length
    from pipelines.settings.tokenizers import load_checked_tokenizer

    model_config = checkpoint.config
    name = find_task_of_head(model_config, checkpoint.name) or find_language_task(model_config)
    task = TASKS.get(name, SentenceEmbedding)(())
    task.check_weights(checkpoint.folder, checkpoint.role)
    tokenizer = load_checked_tokenizer(checkpoint, task)
    length, note = fitted_length(config.max_length, task, {checkpoint.role: (model_config, tokenizer)})
    if note:
        console.say(f"  model{note}")
    return task.max_row_length(tokenizer, length)


def load_examples(config: ExportConfig, checkpoint: Checkpoint) -> "Examples | Tagged":
    """Returns texts in the form that the model takes: lists of words for a tagger, contexts as pairs for questions."""
    from distill.data.config import DataConfig
    from distill.data.sources.columns import find_columns
    from distill.data.sources.tables import read_splits
    from distill.data.splits.examples import Examples
    from distill.data.splits.raw_rows import read_strings
    from distill.tasks.choose import TASKS, find_language_task, find_task_of_head
    from distill.tasks.text_classification import TextClassification

    data, model_config = DataConfig(path=config.data, text=config.text), checkpoint.config
    task = TASKS.get(find_task_of_head(model_config, checkpoint.name) or find_language_task(model_config))
    if task is not None and not issubclass(task, TextClassification):
        return as_plain_texts(task.read_unlabelled(data))
    splits = read_splits(config.data)
    table = splits.get("test", splits["train"])
    columns = find_columns(table, data, f"data {config.data!r}", labelled=False)
    pairs = read_strings(table, columns.text_pair) if columns.text_pair else None
    return Examples(read_strings(table, columns.text), pairs)


def requested_targets(export: str, folder: Path, *, dynamic: bool = False) -> list[ExportTarget]:
    """Returns the checkpoint and the requested formats as targets, quantized if the checkpoint is.

    Raises:
        CompressError: A format is unknown, or doesn't support the model.
    """
    from compress.quantize.prepare import find_lowest_precision
    from compress.quantize.store import is_quantized, load_quantization

    formats = parse_formats(export)
    if is_quantized(folder):
        return [HUGGINGFACE, *list_quantized_targets(formats, find_lowest_precision(load_quantization(folder)))]
    check_float(formats, str(folder))
    return [
        HUGGINGFACE,
        *(ExportTarget(name) for name in formats),
        *([ExportTarget("onnxruntime", "int8")] if dynamic else []),
    ]


def list_quantized_targets(formats: Iterable[str], precision: str) -> list[ExportTarget]:
    """Returns targets for the formats that support quantized models; the others are skipped."""
    return [ExportTarget(name, precision) for name in formats if ExportTarget(name).kind.supports_quantized]


def describe_difference(proof: JsonObject) -> str:
    """Returns the largest difference of a layer's products, or else of the logits."""
    return f"{proof['layers']:.1e} per layer" if "layers" in proof else f"{proof['max_difference']:.1e} of logits"


def check_rejected(exports: Sequence[Artefact]) -> None:
    """Checks that no target was rejected.

    Raises:
        InputError: A target was rejected; the other targets were exported.
    """
    rejected = [
        f"{export.name} {rejection['target']}: {rejection['reason']}"
        for export in exports
        for rejection in export.metrics.get("rejected", [])
    ]
    if rejected:
        raise InputError(
            f"{rejected[0]}{f' (and {len(rejected) - 1} more)' if len(rejected) > 1 else ''}. It was moved to rejected/"
            " in the stage's folder, with the reason; the other files were verified"
        )
