"""LiteRT on the CPU through XNNPACK: writing and running a .tflite file with one signature per text length."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.errors import CompressError, ExportError
from compress.export.common.quiet import quiet
from compress.export.common.targets import check_installed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compress.export.common.parity import Product
    from compress.export.common.source import Source

LITERT_FILE = "model.tflite"
SHORTEST, LONGEST = 16, 512  # tokens per signature: its shapes are fixed
SIGNATURE = "tokens_"  # followed by the number of tokens


def check_litert() -> None:
    """Checks that LiteRT is installed.

    Raises:
        CompressError: LiteRT isn't installed.
    """
    check_installed(["litert"])


def list_signature_lengths(longest: int) -> list[int]:
    """Returns the signatures' lengths, doubling from SHORTEST: texts longer than that are at most half padding."""
    limit = min(longest, LONGEST)
    lengths = [SHORTEST]
    while lengths[-1] < limit:
        lengths.append(lengths[-1] * 2)
    return [min(length, limit) for length in lengths]


def export_litert(source: "Source", folder: Path, *, quantized: bool) -> None:
    """Writes `folder/model.tflite`, which takes one text: with a signature for each length and shared weights.

    Args:
        source: The model.
        folder: Where to write.
        quantized: Whether to write integer weights instead of floats.

    Raises:
        CompressError: LiteRT isn't installed.
        ExportError: LiteRT can't express the model.
    """
    check_litert()
    from compress.export.litert.integers import write_integers

    constants = {name: value.numpy() for name, value in list_vectors(source.model).items()}
    program = write_integers(convert_model(source), source.layers if quantized else {}, constants)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LITERT_FILE).write_bytes(program)


def list_vectors(model: "nn.Module") -> "dict[str, Tensor]":
    """Returns every parameter except the weights of linear layers and tables: biases and norm parameters."""
    from torch import nn

    return {
        f"{name}.{parameter}".replace(".", "_"): value.detach()
        for name, module in model.named_modules()
        for parameter, value in module.named_parameters(recurse=False)
        if not (isinstance(module, nn.Linear | nn.Embedding) and parameter == "weight")
    }


def convert_model(source: "Source") -> bytes:
    """Returns the float32 program of the model, with its `vectors` among the inputs.

    As constants they would be folded through products into the weights, which would then be off their grids.
    """
    import torch

    model = named_logits(source)
    try:
        with quiet(), torch.no_grad():
            import litert_torch

            converter = litert_torch.Converter()
            for length in list_signature_lengths(source.longest):
                example = {name: torch.ones(1, length, dtype=torch.int64) for name in source.inputs}
                converter.signature(f"{SIGNATURE}{length}", model, sample_kwargs=example | list_vectors(source.model))
            return bytes(converter.convert().model_content())
    except Exception as error:  # noqa: BLE001 - the export passes raise errors of any class
        raise ExportError(f"litert: the model can't be exported: {error}") from error


def named_logits(source: "Source") -> "nn.Module":
    """Returns a module that maps the model's inputs and `vectors`, by name, to its logits."""
    from torch import nn
    from torch.func import functional_call

    from distill.checkpoint.outputs import read_logits

    model: Any = copy.deepcopy(source.model)
    model.set_attn_implementation("eager")  # a fused attention's scale would be folded into weights too
    names = {name.replace(".", "_"): name for name, _ in model.named_parameters()}

    class NamedLogits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **given: "Tensor") -> "dict[str, Tensor]":
            inputs = {name: given.pop(name) for name in source.inputs}
            changed = {names[name]: value for name, value in given.items()}
            return {"logits": read_logits(functional_call(self.model, changed, kwargs=inputs))}

    return NamedLogits().eval()


class LiteRTProgram:
    """Signatures of a file, or of the bytes of one, each called with one text."""

    def __init__(self, program: bytes | Path, threads: int):
        check_litert()
        from ai_edge_litert.interpreter import Interpreter

        source = {"model_content": program} if isinstance(program, bytes) else {"model_path": str(program)}
        self.interpreter = Interpreter(**source, num_threads=threads)
        self.interpreter.allocate_tensors()  # here instead of in the first call
        signatures = self.interpreter.get_signature_list()
        self.names = list(next(iter(signatures.values()))["inputs"])
        self.lengths = sorted(int(name.removeprefix(SIGNATURE)) for name in signatures)
        self.runners: dict[int, Any] = {}

    def __call__(self, text: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns every output for one text, with inputs [tokens] each, from the shortest signature that fits it.

        Raises:
            CompressError: The text is longer than the longest signature.
        """
        count = len(text["attention_mask"])
        length = next((length for length in self.lengths if length >= count), None)
        if length is None:
            raise CompressError(
                f"litert: expected texts of at most {self.lengths[-1]} tokens, found one of {count}: shapes are fixed "
                "in a .tflite file, and the rest of the text would be left out"
            )
        if length not in self.runners:
            self.runners[length] = self.interpreter.get_signature_runner(f"{SIGNATURE}{length}")
        padded = {name: np.pad(text[name], (0, length - count)).astype(np.int32)[None] for name in self.names}
        result: dict[str, np.ndarray] = self.runners[length](**padded)
        return result


class LitertModel:
    """Exported model in LiteRT, one text at a time."""

    def __init__(self, folder: Path, threads: int):
        self.program = LiteRTProgram(folder / LITERT_FILE, threads)
        self.names = self.program.names

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the logits of a padded batch of ids, mask and types, each [batch, length] int64.

        They are [batch, classes], or [batch, length, classes] for each token.

        Raises:
            CompressError: A text is longer than the longest signature.
        """
        logits = [self.program(text)["logits"] for text in iterate_texts(inputs, self.names)]
        if logits[0].ndim == 3:  # signatures have lengths of their own
            logits = [fit_length(each, inputs["attention_mask"].shape[1]) for each in logits]
        return np.concatenate(logits)


def fit_length(logits: np.ndarray, length: int) -> np.ndarray:
    """Returns logits [1, any length, classes] without the tokens after `length`, or with zeros up to it."""
    logits = logits[:, :length]
    return np.pad(logits, ((0, 0), (0, length - logits.shape[1]), (0, 0)))


def iterate_texts(inputs: Mapping[str, np.ndarray], names: list[str]) -> Iterator[dict[str, np.ndarray]]:
    """Yields each text of a padded batch, without the padding after it."""
    for row, mask in enumerate(inputs["attention_mask"]):
        count = int(np.flatnonzero(mask).max(initial=0)) + 1
        yield {name: inputs[name][row, :count] for name in names}


def run_litert_products(file: Path, source: "Source", inputs: Mapping[str, np.ndarray]) -> "dict[str, Product]":
    """Returns the input and output of each integer product in the file, exposed as extra outputs."""
    from compress.export.common.parity import Product
    from compress.export.litert.integers import expose_litert_products

    batch = list(iterate_texts(inputs, source.inputs))
    longest = max(len(text["attention_mask"]) for text in batch)
    length = next(length for length in LiteRTProgram(file, threads=1).lengths if length >= longest)
    content, products = expose_litert_products(file.read_bytes(), f"{SIGNATURE}{length}", source.layers)
    program = LiteRTProgram(content, threads=1)
    outputs = [program(text) for text in batch]

    def values(name: str) -> np.ndarray:
        """Returns an output of all texts, [rows, numbers]."""
        return np.concatenate([each[name].reshape(-1, each[name].shape[-1]) for each in outputs])

    return {
        name: Product(values(ends.input), values(ends.output), biased=ends.biased) for name, ends in products.items()
    }
