"""The export stage, and `python -m pipelines.export` for any checkpoint: files to deploy, proven in a fresh process."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill.errors import InputError
from pipelines import cli
from pipelines.console import Console
from pipelines.stage import Artefact, Run, content_hash

if TYPE_CHECKING:
    import numpy as np

    from compress.export.huggingface import TorchModel
    from compress.export.onnx import OnnxModel
    from compress.quantize.prepare import Rounding
    from distill.data.splits import Examples

HUGGINGFACE, ONNX, ONNXRUNTIME, INT8, OPENVINO = "huggingface", "onnx", "onnxruntime", "onnxruntime-int8", "openvino"
PORTABLE_INT8 = "onnx-int8"
TARGETS = (HUGGINGFACE, ONNX, ONNXRUNTIME)
NEEDS = {
    ONNXRUNTIME: ONNX,
    PORTABLE_INT8: ONNX,
    INT8: ONNXRUNTIME,
    OPENVINO: ONNX,
}  # each is made from the other's file
LAYER = 1e-5  # a product of a deployed layer differs by at most this share of its largest value


@dataclass(frozen=True)
class ExportConfig:
    """Settings of `python -m pipelines.export`.

    Args:
        model: A classifier's checkpoint: a local folder or a hub id.
        data: File or folder with texts like those the model will see, for the comparison.
        output: Folder to write to.
        text: Column with the text; found by name when left out.
        parity: Texts on which the artefact is compared with the model.
        max_length: Longest text in tokens.
        target: Which formats to write: huggingface (safetensors), onnx (fp32, for any runtime), onnxruntime (fp32,
            operators joined for its CPU kernels), onnxruntime-int8 (dynamic int8), openvino (fp32); all is every one of
            them but openvino, which is an extra.
    """

    model: str = ""
    data: str = ""
    output: str = ""
    text: str | None = None
    parity: int = 256
    max_length: int = 256
    target: Literal["all", "huggingface", "onnx", "onnxruntime", "onnxruntime-int8", "openvino"] = "all"

    def __post_init__(self) -> None:
        for name in ("model", "data", "output"):
            if not getattr(self, name):
                raise InputError(f"--{name}: missing; see --help for examples")


def export_stage(
    run: Run,
    name: str,
    model: Artefact | str,
    checkpoint: Path,
    examples: "Examples",
    *,
    parity: int,
    max_length: int,
    targets: Sequence[str] = TARGETS,
) -> Artefact:
    """Writes a folder a target from the checkpoint and proves each.

    Args:
        run: The run.
        name: Name of the stage.
        model: What the checkpoint came from, for the stage's key.
        checkpoint: Folder of the trained model.
        examples: Real texts; `parity` of them are compared.
        parity, max_length, targets: See `ExportConfig`.
    """
    settings = {"targets": list(targets), "parity": parity, "max_length": max_length}

    def work(folder: Path) -> dict[str, Any]:
        texts, pairs = sample(examples, parity, run.seed)
        with run.console.track(f"{name}: writing and reloading", len(targets), "files") as advance:
            found = export_all(checkpoint, folder, targets, texts, pairs, max_length, lambda target: advance(1, target))
        proofs = [asdict(proof) | {"bytes": artefact_bytes(folder / proof.target)} for proof in found]
        for proof in proofs:
            run.console.say(
                f"  {proof['target']}: reloaded in a fresh process, largest difference {proof['max_difference']:.1e} "
                f"on {proof['texts']} texts, {proof['bytes'] / 1e6:.1f} MB"
            )
        return {"parity": proofs}

    return run.stage(name, settings, {"model": model, "texts": texts_hash(examples, parity, run.seed)}, work)


def export_all(
    checkpoint: Path,
    folder: Path,
    targets: Sequence[str],
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
    on_target: Callable[[str], None] = lambda target: None,
) -> list[Any]:
    """Writes each target below `folder` and returns its parity with the checkpoint's own logits.

    `on_target` is told each target before it is written.
    """
    from compress.export.huggingface import TorchModel
    from compress.export.onnx import OnnxModel
    from compress.export.verify import verify
    from compress.quantize.store import is_rounded, load_rounding
    from pipelines.words import tokenizer_of

    model = TorchModel(checkpoint)
    tokenizer = tokenizer_of(checkpoint, "model")
    rounding = load_rounding(checkpoint) if is_rounded(checkpoint) else None
    logits = reference_logits(model, tokenizer, texts, pairs, max_length)
    proofs = []
    for target in targets:
        on_target(target)
        write_target(target, model, tokenizer, folder, rounding)
        expected = logits
        if target in (INT8, PORTABLE_INT8):  # rounds on purpose: reloaded it has to give its own logits
            quantized = OnnxModel(folder / target, threads=1)
            expected = reference_logits(quantized, tokenizer, texts, pairs, max_length)
        proofs.append(verify(target, folder / target, texts, pairs, max_length, expected))
    return proofs


def write_target(
    target: str, model: "TorchModel", tokenizer: Any, folder: Path, rounding: "Rounding | None" = None
) -> None:
    """Writes one target below `folder`, where those that it NEEDS are already.

    `rounding` are the numbers of a model whose weights are on a grid: its int8 files have them, and each of their
    products is compared with the layer it stands for. Without it int8 is ONNX Runtime's own, dynamic one.

    Raises:
        ArtefactError: A product that differs from its layer's.
    """
    from compress.export import openvino
    from compress.export.fuse import fuse
    from compress.export.huggingface import export_huggingface
    from compress.export.int8 import quantize_int8
    from compress.export.onnx import FILE, export_onnx
    from compress.export.openvino import export_openvino

    place = folder / target
    if target == HUGGINGFACE:
        export_huggingface(model.model, tokenizer, place)
    elif target == ONNX:
        export_onnx(model.model, tokenizer, place, model.names)
    else:
        if rounding is not None and target in (INT8, PORTABLE_INT8):
            write_rounded(target, model, rounding, folder)
        else:
            rewrite, written = {
                ONNXRUNTIME: (fuse, FILE),
                INT8: (quantize_int8, FILE),
                OPENVINO: (export_openvino, openvino.FILE),
            }[target]
            rewrite(folder / NEEDS[target] / FILE, place / written)
        tokenizer.save_pretrained(place)
        model.model.config.save_pretrained(place)


def write_rounded(target: str, model: "TorchModel", rounding: "Rounding", folder: Path) -> None:
    """The int8 file of a model that was trained to round; where scales come with each call, in standard operators."""
    import copy

    from compress.errors import ArtefactError
    from compress.export.fuse import random_inputs
    from compress.export.onnx import FILE
    from compress.export.parity import layer_differences
    from compress.export.rounded import round_graph, round_joined
    from compress.export.rows import layers_of
    from compress.quantize.prepare import restore

    layers, place = layers_of(model.model, rounding), folder / target / FILE
    joined = target == INT8 and all(layer.inputs in ("tensor", "table") for layer in layers.values())
    write, source = (round_joined, ONNXRUNTIME) if joined else (round_graph, ONNX)
    written = write(folder / source / FILE, place, layers)
    reference = copy.deepcopy(model.model)
    restore(reference, rounding)
    differences = layer_differences(place, written.products, reference, random_inputs(model.names, (12, 7, 3)))
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= LAYER:  # also catches NaN
        raise ArtefactError(
            f"{target}: {worst} gives other products than it was trained with: they differ by {differences[worst]:.1e} "
            f"of the largest, expected at most {LAYER:.0e}"
        )


def with_needed(targets: Sequence[str]) -> list[str]:
    """The targets and what they are made from, each after what it needs."""
    found: list[str] = []
    for target in targets:
        chain = [target]
        while chain[-1] in NEEDS:
            chain.append(NEEDS[chain[-1]])
        found += [each for each in reversed(chain) if each not in found]
    return found


def reference_logits(
    model: "TorchModel | OnnxModel",
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
) -> "np.ndarray":
    """Logits [texts, classes] of the model in memory, by the tokenizer it was trained with."""
    import numpy as np

    parts = []
    for start in range(0, len(texts), 16):
        rows = slice(start, start + 16)
        batch = tokenizer(
            list(texts[rows]),
            list(pairs[rows]) if pairs else None,
            padding=True,
            truncation=True,
            max_length=max_length,
            return_tensors="np",
        )
        parts.append(model(dict(batch)))
    return np.concatenate(parts)


def sample(examples: "Examples", count: int, seed: int) -> tuple[list[str], list[str] | None]:
    """At most `count` texts, drawn by the seed."""
    import numpy as np

    return chosen(examples, np.random.default_rng(seed).permutation(len(examples))[:count])


def chosen(examples: "Examples", rows: "Iterable[int]") -> tuple[list[str], list[str] | None]:
    pairs = [examples.pairs[i] for i in rows] if examples.pairs is not None else None
    return [examples.texts[i] for i in rows], pairs


def texts_hash(examples: "Examples", count: int, seed: int) -> str:
    from pipelines.stage import digest_of

    return digest_of(sample(examples, count, seed))


def artefact_bytes(folder: Path) -> int:
    """Bytes on disk of everything needed to deploy the folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


EXAMPLES = """\
  python -m pipelines.export --model runs/demo/student --data examples/data/banking77/test.csv --output runs/exported
  python -m pipelines.export --model MODEL --data texts.jsonl --text question --target onnx --output runs/exported"""


def main(argv: Sequence[str]) -> None:
    config = cli.parse(
        ExportConfig,
        argv,
        prog="pipelines.export",
        about="Write a checkpoint as a Hugging Face folder and as ONNX in fp32 and int8; reload each and compare.",
        examples=EXAMPLES,
        short={},
    )
    from distill.data.columns import find_columns
    from distill.data.config import DataConfig
    from distill.data.source import read_splits
    from distill.data.splits import Examples, strings
    from distill.teacher.load import checkpoint_folder

    console = Console()
    splits = read_splits(config.data)
    table = splits.get("test", splits["train"])
    wanted = DataConfig(path=config.data, text=config.text)
    columns = find_columns(table, wanted, f"data {config.data!r}", labelled=False)
    pairs = strings(table, columns.text_pair) if columns.text_pair else None
    folder = checkpoint_folder(config.model, "model")
    run = Run(Path(config.output), 0, console)
    targets = with_needed((*TARGETS, INT8) if config.target == "all" else (config.target,))
    done = export_stage(
        run,
        "export",
        content_hash(folder),
        folder,
        Examples(strings(table, columns.text), pairs),
        parity=config.parity,
        max_length=config.max_length,
        targets=targets,
    )
    rows = [
        (p["target"], f"{p['max_difference']:.1e}", f"{p['bytes'] / 1e6:.1f}", str(done.folder / p["target"]))
        for p in done.metrics["parity"]
    ]
    console.table("Exported", ("target", "largest difference", "MB", "where"), rows)


if __name__ == "__main__":
    cli.run(main)
