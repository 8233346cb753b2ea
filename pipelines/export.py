"""The export stage, and `python -m pipelines.export` for any checkpoint: files to deploy, proven in a fresh process."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import ArtefactError
from compress.export.targets import Target, check_float, check_installed, formats_of, with_sources
from compress.quantize.config import Processor
from distill.errors import InputError
from pipelines import cli
from pipelines.compared_texts import sample, spoken, texts_hash
from pipelines.console import Console
from pipelines.settings.places import check_data, check_models
from pipelines.stage import SCRATCH, Artefact, Run, content_hash

if TYPE_CHECKING:
    from distill.data.splits import Examples
    from distill.data.tagged import Tagged

VERSION = 1  # of this stage's algorithm; raise it when the same inputs give another result (docs/stages.md)
HUGGINGFACE = Target("huggingface")
ALWAYS = (HUGGINGFACE, Target("onnx"), Target("onnxruntime"))


@dataclass(frozen=True)
class ExportConfig:
    """Settings of `python -m pipelines.export`.

    Args:
        model: A checkpoint of any task: a local folder or a hub id; with quantization.safetensors beside it its files
            compute in few bits, as it was trained to.
        data: File or folder with texts like those the model will see, for the comparison.
        output: Folder to write to.
        text: Column with the text; found by name when left out.
        parity: Texts on which an artefact in float is compared with the model; one in few bits is on all of them.
        max_length: Longest text in tokens; 0: 256, or as many as the model has positions for where these are fewer.
        export: Formats to write beside the checkpoint: onnx (standard operators, for any runtime), onnxruntime
            (operators joined for its CPU kernels), openvino, executorch, litert, torchao or compressed-tensors
            (quantized checkpoints).
        dynamic: Also ONNX Runtime's own dynamic int8, of a model in float.
        processor: Where that will run: weights have 7 bits for avx2 and avx512, x86 without VNNI, and for here where
            this machine is one.
    """

    model: str = ""
    data: str = ""
    output: str = ""
    text: str | None = None
    parity: int = 256
    max_length: int = 0
    export: str = "onnx,onnxruntime"
    dynamic: bool = False
    processor: Processor = "here"

    def __post_init__(self) -> None:
        for name in ("model", "data", "output"):
            if not getattr(self, name):
                raise InputError(f"--{name}: missing; see --help for examples")
        check_installed(formats_of(self.export))


def export_stage(
    run: Run,
    name: str,
    model: Artefact | str,
    checkpoint: Path,
    examples: "Examples | Tagged",
    *,
    parity: int,
    max_length: int,
    targets: Sequence[Target] = ALWAYS,
    reduced: bool = False,
) -> Artefact:
    """Writes a folder a target from the checkpoint and proves each; one that misses is put aside, with the reason.

    Args:
        run: The run.
        name: Name of the stage.
        model: What the checkpoint came from, for the stage's key.
        checkpoint: Folder of the trained model.
        examples: Real texts; an artefact in float is compared on `parity` of them, one in few bits on all.
        parity, max_length: See `ExportConfig`.
        targets: What to write.
        reduced: ONNX Runtime's own int8 has weights of 7 bits.

    Raises:
        ArtefactError: None of them is the model.
        VerificationError: A process that compares was killed; nothing is recorded, and the next run makes the stage.
    """
    settings: dict[str, Any] = {"targets": [str(t) for t in targets], "parity": parity, "max_length": max_length}
    settings |= {"reduced": True} if reduced else {}

    def work(folder: Path) -> dict[str, Any]:
        from pipelines.proof import Proof, proof_text, source_of

        remove_results(folder)
        drawn = sample(examples, parity, run.seed)
        proof = Proof(source_of(checkpoint, reduced=reduced), folder, examples, drawn, max_length)
        wanted = with_sources(targets)
        with run.console.track(f"{name}: writing and reloading", len(wanted), "files") as advance:
            for target in wanted:
                advance(1, str(target))
                proof.prove(target)
        for each in proof.proven:
            run.console.say(f"  {proof_text(each)}")
        for each in proof.refused:
            run.console.say(f"  {each['target']}: refused, kept in {each['where']}: {each['reason']}")
        if not proof.proven:
            raise ArtefactError(f"{name}: no target is the model: {proof.refused[0]['reason']}")
        return {"parity": proof.proven} | ({"refused": proof.refused} if proof.refused else {})

    return run.stage(name, settings, {"model": model, "texts": texts_hash(examples)}, work, version=VERSION)


def remove_results(folder: Path) -> None:
    """Removes what an attempt that was cut short has written or put aside."""
    for each in folder.iterdir():
        if each.is_dir() and each.name != SCRATCH:
            shutil.rmtree(each)


def artefact_bytes(folder: Path) -> int:
    """Bytes on disk of everything needed to deploy the folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


EXAMPLES = """\
  python -m pipelines.export --model runs/demo/student --data examples/data/banking77/test.csv --output runs/exported
  python -m pipelines.export --model MODEL --data texts.jsonl --text question --export onnx --output runs/exported
  python -m pipelines.export --model runs/few-bits/student --data examples/data/banking77 \\
      --export onnx,onnxruntime,openvino,executorch,torchao --output runs/everywhere"""


def main(argv: Sequence[str]) -> None:
    config = cli.parse(
        ExportConfig,
        argv,
        prog="pipelines.export",
        about="Write a checkpoint for the runtimes it is to be deployed on, in float or in the few bits that it was "
        "trained for; reload each file in a fresh process and compare.",
        examples=EXAMPLES,
        short={},
    )
    check_models([("model", config.model)])
    check_data(config.data)

    from distill.data.config import DataConfig
    from distill.teacher.load import checkpoint_folder
    from pipelines.data import say_reading
    from pipelines.schemes import is_reduced

    console = Console()
    folder = checkpoint_folder(config.model, "model")
    if is_labelled(config, folder):
        evaluated(config, console)
        return
    say_reading(console, DataConfig(path=config.data))
    length = check_model(config, folder, console)
    run = Run(Path(config.output), 0, console)
    done = export_stage(
        run,
        "export",
        content_hash(folder),
        folder,
        examples_for(config, folder),
        parity=config.parity,
        max_length=length,
        targets=asked_targets(config.export, folder, dynamic=config.dynamic),
        reduced=is_reduced(config.processor, folder, dynamic=config.dynamic),
    )
    rows = [
        (p["target"], difference_text(p), f"{p['bytes'] / 1e6:.1f}", str(done.folder / p["target"]))
        for p in done.metrics["parity"]
    ]
    console.table("Exported", ("target", "difference", "MB", "where"), rows)
    console.say("  nothing was scored: no labels of texts in the data; pipelines.evaluate scores models of other tasks")
    check_refused([done])


def is_labelled(config: ExportConfig, folder: Path) -> bool:
    """Whether the model decides on texts as wholes and the data says what is right."""
    from compress.prune.checkpoint import admit
    from distill.checkpoint.config import load_config
    from distill.data.columns import LABEL, first_of
    from distill.data.source import read_splits
    from distill.data.splits import Examples
    from distill.tasks.choose import TASKS, by_head
    from distill.tasks.text_classification import TextClassification

    admit(folder)
    name = by_head(load_config(folder), config.model)
    if name not in TASKS or not issubclass(TASKS[name], TextClassification) or TASKS[name].form is not Examples:
        return False
    splits = read_splits(config.data)
    return first_of(splits.get("test", splits["train"]), LABEL) is not None


def check_model(config: ExportConfig, folder: Path, console: Console) -> int:
    """Longest text of a model whose answers aren't scored.

    Raises:
        InputError: Weights that aren't those of the model, or a tokenizer that isn't its own.
    """
    from distill.checkpoint.config import load_config
    from distill.tasks.choose import TASKS, by_head, language_of
    from distill.tasks.sentence_embedding import SentenceEmbedding
    from pipelines.tasks import fitted_length, read_models

    about = load_config(folder)
    task = TASKS.get(by_head(about, config.model) or language_of(about), SentenceEmbedding)(())
    task.check_weights(folder, "model")
    length, note = fitted_length(config.max_length, task, read_models({"model": folder}, task))
    if note:
        console.say(f"  model{note}")
    return length


def evaluated(config: ExportConfig, console: Console) -> None:
    """Exports, scores each file on the whole test split in its own runtime, and times it."""
    import json

    from distill.data.config import DataConfig
    from pipelines.alone import standalone
    from pipelines.config import MeasureConfig
    from pipelines.evaluate import EvaluateConfig

    settings = EvaluateConfig(
        model=config.model,
        output=config.output,
        data=DataConfig(path=config.data, text=config.text, max_length=config.max_length),
        measure=MeasureConfig(parity=config.parity),
        export=config.export,
        dynamic=config.dynamic,
        processor=config.processor,
    )
    _, candidates, _, done = standalone(settings, console)
    entries = json.loads((done.folder / "evaluation.json").read_text())
    metric, many = next(iter(entries[0]["scores"])), settings.measure.batch
    header = ("target", "difference", metric, "MB", "load ms", "peak MB", "ms, 1 text", f"ms, {many} texts", "where")
    exports = [candidate.export for candidate in candidates]
    rows = [file_row(proof, entries, export.folder) for export in exports for proof in export.metrics["parity"]]
    console.table("Exported and measured", header, rows)
    console.say(f"numbers: {done.folder / 'evaluation.json'}")
    check_refused(exports)


def file_row(proof: dict[str, Any], entries: Sequence[dict[str, Any]], folder: Path) -> tuple[str, ...]:
    """A file's proof, and what was measured of it where it is the one that stands for its runtime."""
    place = folder / proof["target"]
    entry = next((each for each in entries if Path(each["path"]) == place), None)
    took = [f"{entry[key]['best_ms']:.2f}" if entry else "" for key in ("latency", "latency_batched")]
    score = entry["score"] if entry else proof.get("score")
    return (
        proof["target"],
        difference_text(proof),
        "" if score is None else f"{score:.4f}",
        f"{proof['bytes'] / 1e6:.1f}",
        f"{proof['load_ms']:.0f}" if "load_ms" in proof else "",
        f"{proof['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in proof else "",
        *took,
        str(place),
    )


def examples_for(config: ExportConfig, folder: Path) -> "Examples | Tagged":
    """Texts as the model reads them: of a tagger the words of each, of questions their contexts beside them."""
    from transformers import AutoConfig

    from compress.prune.checkpoint import admit
    from distill.data.columns import find_columns
    from distill.data.config import DataConfig
    from distill.data.source import read_splits
    from distill.data.splits import Examples, strings
    from distill.tasks.choose import TASKS, by_head, language_of
    from distill.tasks.text_classification import TextClassification

    admit(folder)
    wanted = DataConfig(path=config.data, text=config.text)
    about = AutoConfig.from_pretrained(folder)
    task = TASKS.get(by_head(about, config.model) or language_of(about))
    if task is not None and not issubclass(task, TextClassification):
        return spoken(task.read_bare(wanted))
    splits = read_splits(config.data)
    table = splits.get("test", splits["train"])
    columns = find_columns(table, wanted, f"data {config.data!r}", labelled=False)
    pairs = strings(table, columns.text_pair) if columns.text_pair else None
    return Examples(strings(table, columns.text), pairs)


def asked_targets(export: str, folder: Path, *, dynamic: bool = False) -> list[Target]:
    """The checkpoint and the formats asked for: in few bits where it was quantized.

    Raises:
        CompressError: A format that isn't known, or holds no such model.
    """
    from compress.quantize.prepare import precision_of
    from compress.quantize.store import is_rounded, load_rounding

    formats = formats_of(export)
    if is_rounded(folder):
        return [HUGGINGFACE, *rounded_targets(formats, precision_of(load_rounding(folder)))]
    check_float(formats, str(folder))
    return [HUGGINGFACE, *(Target(name) for name in formats), *([Target("onnxruntime", "int8")] if dynamic else [])]


def rounded_targets(formats: Iterable[str], precision: str) -> list[Target]:
    """The formats that hold models in few bits."""
    return [Target(name, precision) for name in formats if Target(name).kind.rounded]


def difference_text(proof: dict[str, Any]) -> str:
    return f"{proof['layers']:.1e} a layer" if "layers" in proof else f"{proof['max_difference']:.1e} of logits"


def check_refused(exports: Sequence[Artefact]) -> None:
    """
    Raises:
        InputError: A target was refused; the others are there.
    """
    refused = [f"{e.name} {each['target']}: {each['reason']}" for e in exports for each in e.metrics.get("refused", [])]
    if refused:
        raise InputError(
            f"{refused[0]}{f' (and {len(refused) - 1} more)' if len(refused) > 1 else ''}. It lies aside in refused/ "
            "of the stage's folder, with the reason; the others were proven"
        )


if __name__ == "__main__":
    cli.run(main)
