"""Quantized students, calibrated and trained, on every runtime that supports their scheme.

    python -m benchmarks.quantization.quantized_students --data examples/data/banking77 --output runs/quantized
    python -m benchmarks.quantization.quantized_students --data my_texts/ --teacher T --seeds 0 1 --schemes int8-static

For each seed `pipelines.distill` trains the recipe's student in float, and `pipelines.quantize` quantizes it in each
scheme, by calibration only (ptq) and by training on the teacher's cached logits (qat). All figures are read from the
reports of these runs. Printed are two tables: the test accuracy of each scheme and method in PyTorch, as mean and
standard deviation over the seeds, next to the float student's, which is the baseline; and for each
exported file its difference from the quantized PyTorch model, accuracy, size, loading time, peak memory, latency, and
speedup over the same student in fp32 on the same runtime. Finished runs are skipped when the same command runs again;
other arguments are passed on to `pipelines.quantize`.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from benchmarks.common.command import PassThroughParser, run_command
from benchmarks.common.results_folder import copy_stages, find_checkpoint, find_entry, read_report, require_entry
from benchmarks.common.spread import format_accuracy
from compress.export.common.targets import FORMATS, find_target
from compress.quantize.schemes import SCHEMES
from pipelines.reports.schema import Report
from pipelines.runs.console import Console
from pipelines.runs.manifest import JsonObject

METHODS = ("ptq", "qat")
SHARED_STAGES = ("data", "precision", "teacher", "cache", "export-teacher")
Reports: TypeAlias = Mapping[tuple[int, str, str], Report]  # (seed, scheme, method) -> report
HEADER = (
    "seed", "scheme", "method", "target", "difference", "same predictions", "accuracy", "in PyTorch", "MB", "load ms",
    "peak MB", "ms", "speedup over fp32", "ms, batch 32",
)  # fmt: skip


def main() -> None:
    """Trains and quantizes the students that are missing, and prints the tables."""
    parser = PassThroughParser(__doc__)
    parser.add_argument("--config", default="configs/demo.yaml", help="recipe of the float student")
    parser.add_argument("--teacher", help="another teacher than the recipe's")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--output", default="runs/quantized")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=30, help="calls of each text that is timed")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["onnx", "onnxruntime", "openvino"])
    options = parser.parse_options()
    console = Console()
    reports: dict[tuple[int, str, str], Report] = {}
    float_scores = []
    for seed in options.seeds:
        float_run = train_float_student(options, seed)
        float_scores.append(require_entry(read_report(float_run), "student", "pytorch")["score"])
        for scheme in options.schemes:
            for method in options.methods:
                report = quantize_student(options, seed, scheme, method, float_run)
                reports[seed, scheme, method] = report
                console.say(f"seed {seed}, {scheme}, {method}: {describe_scores(report)}")
    print_scores(console, options, float_scores, reports)
    print_files(console, reports)


def train_float_student(options: argparse.Namespace, seed: int) -> Path:
    """Returns the run of the student in float."""
    output = Path(options.output) / f"seed-{seed}" / "float"
    teacher = ["--teacher", options.teacher] if options.teacher else []
    arguments = ["--config", options.config, *teacher, "--data", options.data, "--seed", str(seed)]
    run_command("distill", *arguments, "--measure.rounds", str(options.rounds), "--output", str(output))
    return output


def quantize_student(options: argparse.Namespace, seed: int, scheme: str, method: str, float_run: Path) -> Report:
    """Returns the report of the run that quantizes the student of a float run."""
    output = Path(options.output) / f"seed-{seed}" / f"{scheme}-{method}"
    formats = [name for name in options.formats if scheme not in FORMATS[name].unsupported]
    student, teacher = find_checkpoint(float_run, "distill"), find_checkpoint(float_run, "teacher")
    arguments = ["--config", options.config, "--model", str(student), "--teacher", str(teacher), "--data", options.data]
    arguments += ["--scheme", scheme, "--method", method, "--export", ",".join(formats), "--seed", str(seed)]
    arguments += ["--measure.rounds", str(options.rounds)]
    copy_stages([float_run], output, SHARED_STAGES)
    run_command("quantize", *arguments, *options.more, "--output", str(output))
    return read_report(output)


def describe_scores(report: Report) -> str:
    """Returns the accuracy of each quantized file."""
    entries = [entry for entry in report["models"] if entry["name"] == "student" and entry["precision"] != "fp32"]
    return ", ".join(f"{entry['runtime']} {entry['precision']} {entry['score']:.2%}" for entry in entries)


def read_trained_score(report: Report) -> float:
    """Returns the test accuracy of the quantized student in PyTorch."""
    proofs = [entry["parity"] for entry in report["models"] if entry["parity"]]
    return next(proof["trained_score"] for proof in proofs if "trained_score" in proof)


def print_scores(console: Console, options: argparse.Namespace, float_scores: list[float], reports: Reports) -> None:
    """Prints the accuracy of each scheme and method."""
    rows = []
    for scheme in options.schemes:
        cells = [
            format_accuracy([read_trained_score(reports[seed, scheme, method]) for seed in options.seeds])
            for method in options.methods
        ]
        rows.append((scheme, format_accuracy(float_scores), *cells))
    title = f"Test accuracy, {len(options.seeds)} seeds: {options.data}"
    console.table(title, ("scheme", "float", *options.methods), rows)


def print_files(console: Console, reports: Reports) -> None:
    """Prints a row for each exported file of a quantized student."""
    rows = []
    for (seed, scheme, method), report in reports.items():
        export = next(stage for stage in report["stages"] if stage["name"] == "export")
        proofs = [proof for proof in export["metrics"]["parity"] if "layers" in proof]
        rows += [(str(seed), scheme, method, *format_file(report, proof)) for proof in proofs]
    console.table("Exported files", HEADER, rows)


def format_file(report: Report, proof: JsonObject) -> tuple[str, ...]:
    """Returns the cells of an exported file, whose verification found `proof`."""
    return (
        proof["target"],
        f"{proof['layers']:.0e}",
        f"{proof['agreement']:.2%}",
        f"{proof['score']:.2%}",
        f"{proof['trained_score']:.2%}",
        f"{proof['bytes'] / 1e6:.1f}",
        f"{proof['load_ms']:.0f}",
        f"{proof['peak_bytes'] / 1e6:.0f}",
        *format_latencies(report, proof["target"]),
    )


def format_latencies(report: Report, target: str) -> tuple[str, str, str]:
    """Returns a file's latency, its speedup over fp32 on the same runtime, and its latency in batches."""
    runtime, precision = find_target(target).where
    entry, reference = find_entry(report, "student", runtime, precision), find_entry(report, "student", runtime)
    if entry is None:
        return "", "", ""
    latency, batched = entry["latency"]["best_ms"], entry["latency_batched"]
    speedup = f"{reference['latency']['best_ms'] / latency:.2f}x" if reference else ""
    return f"{latency:.2f}", speedup, f"{batched['best_ms']:.1f}" if batched else ""


if __name__ == "__main__":
    main()
