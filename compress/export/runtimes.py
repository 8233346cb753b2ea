"""Opens exported artefacts in the runtimes they were written for; each maps arrays to logits."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from compress.export.common.quiet import quiet
from compress.export.common.targets import ExportTarget, find_target
from distill.checkpoint.readers import CHECKPOINT_READERS


def build_opener(target: ExportTarget, folder: Path, threads: int) -> Callable[[], Any]:
    """Returns a function that opens an artefact silently, as `open_export` does, also after being sent to a process."""
    return partial(_open_with_readers, dict(CHECKPOINT_READERS), target, folder, threads)


def _open_with_readers(readers: Mapping[str, str], target: ExportTarget, folder: Path, threads: int) -> Any:
    CHECKPOINT_READERS.update(readers)
    with quiet():  # libraries that are imported now warn, such as of missing GPUs
        return open_export(target, folder, threads)


def open_export(target: ExportTarget | str, folder: Path, threads: int) -> Any:
    """Opens the artefact of kind `target` in `folder`, with `threads` threads (PyTorch's are set by the caller).

    The returned model maps a padded batch of ids, mask and types, each [batch, length] int64, to logits [batch,
    classes], and has the `names` of its inputs; that of a library which reads texts maps texts to vectors.

    Raises:
        CompressError: The runtime isn't installed.
    """
    target = find_target(target) if isinstance(target, str) else target
    runtime, _ = target.where
    if target.format == "onnx-decoder":
        from compress.export.onnx.generate import OnnxDecoder

        return OnnxDecoder(folder, threads)
    if runtime == "onnxruntime":
        from compress.export.onnx.graph import OnnxModel

        return OnnxModel(folder, threads)
    if runtime == "openvino":
        from compress.export.openvino.ir import OpenVinoModel

        return OpenVinoModel(folder, threads)
    if runtime == "executorch":
        from compress.export.executorch.program import ExecutorchModel

        return ExecutorchModel(folder, threads)
    if runtime == "litert":
        from compress.export.litert.model import LitertModel

        return LitertModel(folder, threads)
    if runtime == "numpy":
        from compress.export.arrays.reader import Reader

        return Reader(folder)
    if runtime == "model2vec":
        from compress.export.static_vectors.model2vec import Model2VecModel

        return Model2VecModel(folder)
    if runtime == "static-embedding":
        from compress.export.static_vectors.static_embedding import StaticEmbeddingModel

        return StaticEmbeddingModel(folder)
    from compress.export.common.huggingface import TorchModel

    return TorchModel(folder)
