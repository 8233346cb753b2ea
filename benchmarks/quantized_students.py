"""Students in few bits, calibrated and trained, on every runtime that holds them: what is lost, kept and won.

    python -m benchmarks.quantized_students --data examples/data/banking77 --output runs/quantized
    python -m benchmarks.quantized_students --data my_texts/ --teacher T --seeds 0 1 2 --schemes int8-static

The commands of a user make everything: for each seed `pipelines.distill` trains the student of the recipe in float, and
`pipelines.quantize` makes it round, by each scheme, calibrated only (ptq) and trained (qat) on the teacher's cached
logits. The tables are read from their reports. What is finished is skipped when the same command runs again.
Words that aren't its own go to `pipelines.quantize`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.command import command
from benchmarks.kept import checkpoint_of
from benchmarks.recipes import lend
from benchmarks.two_teachers import told
from compress.export.common.targets import FORMATS
from compress.quantize.schemes import SCHEMES
from pipelines.runs.console import Console

METHODS = ("ptq", "qat")
LENT = ("data", "precision", "teacher", "cache", "export-teacher")  # stages that the float student's run has made
Report = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/demo.yaml", help="recipe of the float student")
    parser.add_argument("--teacher", help="the recipe's own where left out")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--output", default="runs/quantized")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=30, help="calls of each text that is timed")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["onnx", "onnxruntime", "openvino"])
    given, more = parser.parse_known_args()
    given.more = more
    console, reports = Console(), dict[tuple[int, str, str], Report]()
    floats: dict[int, float] = {}
    for seed in given.seeds:
        made, floats[seed] = float_student(given, seed)
        for scheme in given.schemes:
            for method in given.methods:
                reports[seed, scheme, method] = quantized(given, seed, scheme, method, made)
                console.say(f"seed {seed}, {scheme}, {method}: {scores(reports[seed, scheme, method])}")
    show_scores(console, given, floats, reports)
    show_targets(console, reports)


def float_student(given: argparse.Namespace, seed: int) -> tuple[Path, float]:
    """The run that made the student in float, and its test accuracy."""
    output = Path(given.output) / f"seed-{seed}" / "float"
    teacher = ["--teacher", given.teacher] if given.teacher else []
    words = ["--config", given.config, *teacher, "--data", given.data, "--seed", str(seed)]
    command("distill", *words, "--measure.rounds", str(given.rounds), "--output", str(output))
    whole = entry(json.loads((output / "report.json").read_text()), "student", "pytorch", "fp32")
    assert whole is not None
    return output, whole["score"]


def quantized(given: argparse.Namespace, seed: int, scheme: str, method: str, made: Path) -> Report:
    """The report of the student of a run, made to round."""
    output = Path(given.output) / f"seed-{seed}" / f"{scheme}-{method}"
    formats = [name for name in given.formats if scheme not in FORMATS[name].refuses]
    student, teacher = checkpoint_of(made, "distill"), checkpoint_of(made, "teacher")
    words = ["--config", given.config, "--model", str(student), "--teacher", str(teacher), "--data", given.data]
    words += ["--scheme", scheme, "--method", method, "--export", ",".join(formats), "--seed", str(seed)]
    words += ["--measure.rounds", str(given.rounds)]
    lend([made], output, LENT)
    command("quantize", *words, *given.more, "--output", str(output))
    return json.loads((output / "report.json").read_text())


def entry(report: Report, name: str, runtime: str, precision: str) -> Report | None:
    found = [e for e in report["models"] if (e["name"], e["runtime"], e["precision"]) == (name, runtime, precision)]
    return found[0] if found else None


def scores(report: Report) -> str:
    own = [e for e in report["models"] if e["name"] == "student" and e["precision"] != "fp32"]
    return ", ".join(f"{e['runtime']} {e['precision']} {e['score']:.2%}" for e in own)


def as_trained(report: Report) -> float:
    """Test accuracy of the student that rounds, in PyTorch."""
    told = [entry["parity"] or {} for entry in report["models"]]
    return float(next(parity["trained_score"] for parity in told if "trained_score" in parity))


def show_scores(
    console: Console, given: argparse.Namespace, floats: dict[int, float], reports: dict[tuple[int, str, str], Report]
) -> None:
    rows = []
    for scheme in given.schemes:
        cells = [told([as_trained(reports[seed, scheme, method]) for seed in given.seeds]) for method in given.methods]
        rows.append((scheme, told(list(floats.values())), *cells))
    console.table(f"Test accuracy, {len(given.seeds)} seeds: {given.data}", ("scheme", "float", *given.methods), rows)


def show_targets(console: Console, reports: dict[tuple[int, str, str], Report]) -> None:
    """Every deployed file beside the model it was made from, and beside the same student in float there."""
    rows = []
    for (seed, scheme, method), report in reports.items():
        exported = next(stage for stage in report["stages"] if stage["name"] == "export")
        for proof in exported["metrics"]["parity"]:
            if "layers" not in proof:
                continue
            rows.append((
                str(seed), scheme, method, proof["target"], f"{proof['layers']:.0e}", f"{proof['same_class']:.2%}",
                f"{proof['score']:.2%}", f"{proof['trained_score']:.2%}", f"{proof['bytes'] / 1e6:.1f}",
                f"{proof['load_ms']:.0f}", f"{proof['peak_bytes'] / 1e6:.0f}", *times(report, proof["target"]),
            ))  # fmt: skip
    header = ("seed", "scheme", "how", "target", "layers", "same class", "accuracy", "trained", "MB", "load ms")
    header += ("peak MB", "ms", "faster than fp32", "ms, batch 32")
    console.table("Deployed files", header, rows)


def times(report: Report, target: str) -> tuple[str, str, str]:
    from compress.export.common.targets import target_of

    runtime, precision = target_of(target).where
    own, whole = entry(report, "student", runtime, precision), entry(report, "student", runtime, "fp32")
    if own is None:
        return "", "", ""
    one, many = own["latency"]["best_ms"], own["latency_batched"]["best_ms"]
    return f"{one:.2f}", f"{whole['latency']['best_ms'] / one:.2f}x" if whole else "", f"{many:.1f}"


if __name__ == "__main__":
    main()
