"""`python -m pipelines.export`: exports any checkpoint for deployment and verifies each file in a fresh process."""

from collections.abc import Sequence
from pathlib import Path

from distill.checkpoint.checkpoint import open_checkpoint
from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Run
from pipelines.settings.commands.export import ExportConfig
from pipelines.settings.places import check_data, open_local
from pipelines.stages.deliver.export import (
    check_model,
    check_rejected,
    describe_difference,
    export_stage,
    is_labelled,
    load_examples,
    requested_targets,
)

EXAMPLES = """\
  python -m pipelines.export --model runs/demo/student --data examples/data/banking77/test.csv --output runs/exported
  python -m pipelines.export --model MODEL --data texts.jsonl --text question --export onnx --output runs/exported
  python -m pipelines.export --model runs/quantized/student --data examples/data/banking77 \\
      --export onnx,onnxruntime,openvino --output runs/everywhere"""


def main(argv: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    config = cli.parse(
        ExportConfig,
        argv,
        prog="pipelines.export",
        about="Export a checkpoint for the runtimes that it will be deployed on, in float or, if it is quantized, with "
        "the integers that it was trained with; reload each file in a fresh process and compare.",
        examples=EXAMPLES,
        short={},
    )
    open_local(config.model, "model")
    check_data(config.data)

    from distill.data.config import DataConfig
    from pipelines.settings.schemes import needs_reduced_range
    from pipelines.stages.prepare.data import print_reading_remarks

    console = Console()
    checkpoint = open_checkpoint(config.model, "model")
    folder = checkpoint.folder
    if is_labelled(config, checkpoint):
        export_and_score(config, console)
        return
    print_reading_remarks(console, DataConfig(path=config.data))
    length = check_model(config, checkpoint, console)
    run = Run(Path(config.output), 0, console)
    done = export_stage(
        run,
        "export",
        run.digest(checkpoint),
        folder,
        load_examples(config, checkpoint),
        parity=config.parity,
        max_length=length,
        targets=requested_targets(config.export, folder, dynamic=config.dynamic),
        reduce_range=needs_reduced_range(config.processor, folder, dynamic=config.dynamic),
    )
    rows = [
        (
            proof["target"],
            describe_difference(proof),
            f"{proof['bytes'] / 1e6:.1f}",
            str(done.folder / proof["target"]),
        )
        for proof in done.metrics["parity"]
    ]
    console.table("Exported", ("target", "difference", "MB", "where"), rows)
    console.say(
        "  nothing was scored, because the data has no labels for texts; use pipelines.evaluate for other tasks"
    )
    check_rejected([done])


def export_and_score(config: ExportConfig, console: Console) -> None:
    """Exports the model, scores each file on the whole test split in its own runtime, and times it."""
    import json

    from distill.data.config import DataConfig
    from pipelines.reports.schema import EVALUATION
    from pipelines.settings.commands.distill import MeasureConfig
    from pipelines.settings.commands.evaluate import EvaluateConfig
    from pipelines.stages.deliver.standalone import evaluate_standalone

    settings = EvaluateConfig(
        model=config.model,
        output=config.output,
        data=DataConfig(path=config.data, text=config.text, max_length=config.max_length),
        measure=MeasureConfig(parity=config.parity),
        export=config.export,
        dynamic=config.dynamic,
        processor=config.processor,
    )
    _, candidates, _, done = evaluate_standalone(settings, console)
    entries = json.loads((done.folder / EVALUATION).read_text())
    metric, batch = next(iter(entries[0]["scores"])), entries[0]["latency_batched"]["batch"]
    header = ("target", "difference", metric, "MB", "load ms", "peak MB", "ms, 1 text", f"ms, {batch} texts", "where")
    exports = [candidate.export for candidate in candidates]
    rows = [build_export_row(proof, entries, export.folder) for export in exports for proof in export.metrics["parity"]]
    console.table("Exported and measured", header, rows)
    console.say(f"numbers: {done.folder / 'evaluation.json'}")
    check_rejected(exports)


def build_export_row(proof: JsonObject, entries: Sequence[JsonObject], folder: Path) -> tuple[str, ...]:
    """Returns the table row of an exported file; measurements are included if the file represents its runtime."""
    path = folder / proof["target"]
    entry = next((each for each in entries if Path(each["path"]) == path), None)
    latencies = [f"{entry[key]['best_ms']:.2f}" if entry else "" for key in ("latency", "latency_batched")]
    score = entry["score"] if entry else proof.get("score")
    return (
        proof["target"],
        describe_difference(proof),
        "" if score is None else f"{score:.4f}",
        f"{proof['bytes'] / 1e6:.1f}",
        f"{proof['load_ms']:.0f}" if "load_ms" in proof else "",
        f"{proof['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in proof else "",
        *latencies,
        str(path),
    )


if __name__ == "__main__":
    cli.run(main)
