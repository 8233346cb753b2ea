"""Writes a model in any export format, with its tokenizer and config beside it."""

from collections.abc import Callable, Iterable
from pathlib import Path

from compress.errors import CompressError, ExportError
from compress.export.common.huggingface import export_huggingface
from compress.export.common.parity import worst_layer
from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget, by_scheme, with_sources
from compress.export.onnx.fuse import fuse_operators
from compress.export.onnx.graph import ONNX_FILE, export_onnx
from compress.export.onnx.int8 import products_saturate, quantize_int8
from compress.export.onnx.quantized import quantize_fused_graph, quantize_graph
from compress.export.probe import PROBES, ProbeInputs
from compress.quantize.store import save_quantization

MAX_LAYER_DIFFERENCE = 1e-5  # largest allowed difference of a deployed product, as a share of its largest value
_WriteExport = Callable[[Source, ExportTarget, Path], None]  # (model, target, folder of all targets)


def write_targets(source: Source, targets: Iterable[ExportTarget], folder: Path) -> None:
    """Writes the targets, and the targets they are made from, each into a folder of its name.

    Raises:
        ExportError: A format can't express the model.
        CompressError: A format's library isn't installed, or, before anything is written, a format doesn't support the
            model's scheme.
    """
    wanted = with_sources(targets)
    for target in wanted:
        check_quantized(source, target)
    for target in wanted:
        write_target(source, target, folder)


def write_target(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes one target into a folder of its name; the target it is made from must be in `folder` already.

    Raises:
        ExportError: The format can't express the model.
        CompressError: The format's library isn't installed, or the format doesn't support the model's scheme.
    """
    check_quantized(source, target)
    WRITERS[target.format](source, target, folder)
    if target.kind.reads_texts:
        return
    if target.format not in ("huggingface", "onnx-decoder"):  # these write their own
        source.tokenizer.save_pretrained(folder / str(target))
    if target.kind.runtime != "pytorch":
        source.model.config.save_pretrained(folder / str(target))


def check_quantized(source: Source, target: ExportTarget) -> None:
    """Checks that a target that stores quantized weights has a quantized model."""
    if not target.is_quantized:
        return
    if source.quantization is None:
        if target == ExportTarget("onnxruntime", "int8"):
            return  # ONNX Runtime's own int8 needs no stored scales
        raise CompressError(
            f"export {target}: expected a quantized model, found one in float; python -m pipelines.quantize makes one"
        )
    for scheme in {quantized.scheme.name for quantized in source.quantization.values() if quantized.scheme is not None}:
        by_scheme([target.format], scheme)


def check_layers(source: Source, target: ExportTarget, folder: Path, inputs: ProbeInputs) -> float:
    """Returns the largest difference between a product of the written file and its layer, on the file's own inputs.

    It is 0 for a model whose tables alone are quantized. `inputs` are a padded batch of ids, mask and types, each
    [batch, length] int64.

    Raises:
        ExportError: The difference is larger than rounding of float32.
    """
    if all(layer.input_scales == "table" for layer in source.layers.values()):
        return 0.0
    name, difference = worst_layer(PROBES[target.format](source, target, folder, inputs), source.reference)
    if not difference <= MAX_LAYER_DIFFERENCE:  # also catches NaN
        saturated = target.kind.saturates and not source.has_reduced_range and products_saturate()
        raise ExportError(
            f"{target}: {name} has other outputs than in training: they differ by {difference:.1e} of the largest, "
            f"expected at most {MAX_LAYER_DIFFERENCE:.0e}"
            + (
                "; this processor has no VNNI, and its products of 8-bit weights saturate: quantize the float model "
                "with --quantize.reduce_range true, or export this one on a processor with VNNI"
                if saturated
                else ""
            )
        )
    return difference


def write_huggingface(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes a folder that transformers loads."""
    export_huggingface(source.trained or source.model, source.tokenizer, folder / str(target))
    if source.quantization is not None:
        save_quantization(source.quantization, folder / str(target))


def write_onnx(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes an ONNX graph."""
    target_folder = folder / str(target)
    if not target.is_quantized:
        export_onnx(source.model, source.tokenizer, target_folder, source.inputs)
    else:
        quantize_graph(folder / "onnx" / ONNX_FILE, target_folder / ONNX_FILE, source.layers)


def write_decoder(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes the ONNX graph of a decoder with a cache."""
    from compress.export.onnx.decoder import export_decoder, save_prompt_tokenizer

    target_folder = folder / str(target)
    if not target.is_quantized:
        export_decoder(source.model, source.tokenizer, target_folder)
        return
    quantize_graph(folder / "onnx-decoder" / ONNX_FILE, target_folder / ONNX_FILE, source.layers)
    save_prompt_tokenizer(source.tokenizer, target_folder)
    if source.model.generation_config is not None:
        source.model.generation_config.save_pretrained(target_folder)


def write_onnxruntime(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes an ONNX graph that is optimized for ONNX Runtime."""
    file = folder / str(target) / ONNX_FILE
    if not target.is_quantized:
        fuse_operators(folder / "onnx" / ONNX_FILE, file)
    elif source.quantization is None:
        quantize_int8(folder / "onnxruntime" / ONNX_FILE, file, reduce_range=source.reduce_range)
    elif all(layer.input_scales in ("tensor", "table") for layer in source.layers.values()):
        quantize_fused_graph(folder / "onnxruntime" / ONNX_FILE, file, source.layers)
    else:  # no fused operator takes scales computed in each call
        quantize_graph(folder / "onnx" / ONNX_FILE, file, source.layers)


def write_openvino(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes an OpenVINO model."""
    from compress.export.openvino import ir

    assert target.made_from is not None
    ir.export_openvino(folder / str(target.made_from) / ONNX_FILE, folder / str(target) / ir.OPENVINO_FILE)


def write_executorch(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes an ExecuTorch program."""
    from compress.export.executorch.program import export_executorch

    export_executorch(source, folder / str(target), quantized=target.is_quantized)


def write_litert(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes a LiteRT file."""
    from compress.export.litert.model import export_litert

    export_litert(source, folder / str(target), quantized=target.is_quantized)


def write_numpy(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes arrays and the code that reads them."""
    from compress.export.arrays.write import export_arrays

    export_arrays(source.model, folder / str(target), source.layers if target.is_quantized else {})


def write_model2vec(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes a folder that model2vec loads."""
    from compress.export.static_vectors.model2vec import export_model2vec

    export_model2vec(source.model, source.tokenizer, folder / str(target))


def write_static_embedding(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes a folder that Sentence Transformers loads."""
    from compress.export.static_vectors.static_embedding import export_static_embedding

    export_static_embedding(source.model, source.tokenizer, folder / str(target))


def write_torchao(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes a checkpoint with torchao tensors."""
    from compress.export.pytorch.torchao import export_torchao

    export_torchao(source, folder / str(target))


def write_compressed(source: Source, target: ExportTarget, folder: Path) -> None:
    """Writes a checkpoint in the format of compressed-tensors."""
    from compress.export.pytorch.compressed_tensors import export_compressed

    export_compressed(source, folder / str(target))


WRITERS: dict[str, _WriteExport] = {
    "huggingface": write_huggingface,
    "onnx": write_onnx,
    "onnx-decoder": write_decoder,
    "onnxruntime": write_onnxruntime,
    "openvino": write_openvino,
    "executorch": write_executorch,
    "litert": write_litert,
    "torchao": write_torchao,
    "compressed-tensors": write_compressed,
    "numpy": write_numpy,
    "model2vec": write_model2vec,
    "static-embedding": write_static_embedding,
}
