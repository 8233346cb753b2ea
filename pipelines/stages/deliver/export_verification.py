"""Verification of exports: every target is reloaded in a fresh process and compared, or set aside."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from compress.errors import ExportError
from compress.export.common.decisions import find_decision_kind
from compress.export.common.fold import fold_norms
from compress.export.common.huggingface import TorchModel
from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget
from compress.export.onnx.decoder import verify_decoder
from compress.export.onnx.graph import OnnxModel
from compress.export.static_vectors.table import compute_text_vectors
from compress.export.verify import flatten_tokens, verify_export
from compress.export.write import check_layers, write_target
from compress.quantize.store import is_quantized, load_quantization
from distill.checkpoint.custom_models import load_model_folder
from pipelines.runs.files import count_bytes
from pipelines.runs.manifest import JsonObject
from pipelines.stages.prepare.compared_texts import Texts, select_texts_and_pairs
from pipelines.stages.prepare.vocabulary import load_student_tokenizer

if TYPE_CHECKING:
    from distill.data.rows.tagged import Tagged
    from distill.data.splits.examples import Examples

REJECTED = "rejected"
MAX_ACCURACY_CHANGE = 0.001  # maximum difference in accuracy between the trained model with rounding and its file
_BATCH = 16
PROMPT_TOKENS, NEW_TOKENS = 8, 100  # tokens of a prompt and of its continuation when a decoder is verified


def load_source(checkpoint: Path, *, reduce_range: bool = False) -> Source:
    """Loads the checkpoint, with its element-wise norms folded, and its quantization parameters, if it is quantized.

    For `reduce_range` see `Source`.
    """
    quantization = load_quantization(checkpoint) if is_quantized(checkpoint) else None
    trained = load_model_folder(checkpoint).float()
    model = fold_norms(trained) if quantization is None else trained
    return Source(
        model,
        load_student_tokenizer(checkpoint, "model"),
        quantization,
        reduce_range,
        None if model is trained else trained,
    )


class ExportVerifier:
    """Exports targets and compares them with the model; the results are appended to `proven` and `rejected`.

    Args:
        source: The model.
        folder: Folder in which each target gets a folder of its name.
        examples: Texts that a quantized target is compared on, and scored on if they have labels.
        drawn: Texts that a float target is compared on.
        max_length: Longest text in tokens.
    """

    def __init__(self, source: Source, folder: Path, examples: "Examples | Tagged", drawn: Texts, max_length: int):
        self.source, self.folder, self.examples = source, folder, examples
        self.max_length = min(max_length, source.tokenizer.model_max_length)
        fix_truncation(source.tokenizer, self.max_length)
        self.drawn = drawn
        self.proven: list[JsonObject] = []
        self.rejected: list[JsonObject] = []

    def export(self, target: ExportTarget) -> None:
        """Writes the target, reloads it in a fresh process and compares it with the model, or sets it aside."""
        source = target.made_from
        if source is not None and str(source) in [each["target"] for each in self.rejected]:
            self.set_aside(target, f"it is made from {source}, which was rejected")
            return
        try:
            write_target(self.source, target, self.folder)
            proof = self.verify_quantized(target) if self.has_quantization(target) else self.verify_float(target)
        except ExportError as error:
            self.set_aside(target, str(error))
        else:
            bits = {"weight_bits": 7} if target.is_quantized and self.source.has_reduced_range else {}
            self.proven.append(proof | bits | {"bytes": count_bytes(self.folder / str(target))})

    def has_quantization(self, target: ExportTarget) -> bool:
        """Returns whether the target has the quantization parameters that the model was trained with."""
        return target.is_quantized and self.source.quantization is not None

    def verify_float(self, target: ExportTarget) -> JsonObject:
        """Compares the logits of the drawn texts with those of the model."""
        if target.format == "onnx-decoder":
            return self.verify_generation(target)
        path = self.folder / str(target)
        if target.kind.reads_texts:
            expected = compute_text_vectors(self.source.model, self.source.tokenizer, self.drawn[0])
        else:
            expected = self.logits
        if target.is_quantized:  # dynamic int8 differs from the float model: compare with the file's own logits
            expected = reference_logits(OnnxModel(path, threads=1), self.source.tokenizer, *self.drawn, self.max_length)
        parity, _ = verify_export(str(target), path, *self.drawn, self.max_length, expected)
        return asdict(parity)

    def verify_generation(self, target: ExportTarget) -> JsonObject:
        """Compares a decoder's generated continuations of the drawn texts' prefixes, and its logits of their tokens."""
        tokenizer, max_tokens = self.source.tokenizer, min(self.max_length, self.source.longest)
        blocks = [np.asarray(ids[:max_tokens], np.int64) for ids in tokenizer(self.drawn[0])["input_ids"] if ids]
        prompts = [block[:PROMPT_TOKENS].tolist() for block in blocks[:_BATCH]]
        new_tokens = min(NEW_TOKENS, self.source.longest - PROMPT_TOKENS)
        parity = verify_decoder(self.source.model, self.folder / str(target), prompts, blocks, new_tokens=new_tokens)
        return {"target": str(target), "rows": len(blocks)} | asdict(parity)

    def verify_quantized(self, target: ExportTarget) -> JsonObject:
        """Compares each layer with the quantized model, then the predictions on all texts and the score."""
        layers = check_layers(self.source, target, self.folder, self.batch)
        texts, pairs = select_texts_and_pairs(self.examples, range(len(self.examples)))
        parity, logits = verify_export(
            str(target),
            self.folder / str(target),
            texts,
            pairs,
            self.max_length,
            self.quantized_logits,
            quantized=True,
            kind=find_decision_kind(self.source.model),
        )
        proof = asdict(parity) | {"layers": layers}
        if self.has_classes:
            labels = np.asarray(self.examples.labels)
            accuracy, trained = (float((each.argmax(-1) == labels).mean()) for each in (logits, self.quantized_logits))
            if abs(accuracy - trained) > MAX_ACCURACY_CHANGE:
                raise ExportError(
                    f"{target}: its accuracy on {len(texts)} texts is {accuracy:.2%}, expected {trained:.2%} as "
                    f"trained, to within {MAX_ACCURACY_CHANGE:.1%}"
                )
            proof |= {"score": accuracy, "trained_score": trained}
        return proof

    @property
    def has_classes(self) -> bool:
        """Whether each text has a class; other tasks are scored in the evaluation."""
        return bool(self.examples.labels) and isinstance(self.examples.labels[0], int)

    def set_aside(self, target: ExportTarget, reason: str) -> None:
        """Moves the target to the rejected targets, together with the reason."""
        folder = self.folder / REJECTED / str(target)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if (self.folder / str(target)).exists():
            shutil.move(self.folder / str(target), folder)
        folder.mkdir(exist_ok=True)
        (folder / "reason.txt").write_text(reason + "\n")
        self.rejected.append({"target": str(target), "reason": reason, "where": f"{REJECTED}/{target}"})

    @cached_property
    def logits(self) -> np.ndarray:
        """Logits of the float checkpoint for the drawn texts."""
        model = TorchModel.of(self.source.trained or self.source.model)
        return reference_logits(model, self.source.tokenizer, *self.drawn, self.max_length)

    @cached_property
    def quantized_logits(self) -> np.ndarray:
        """Logits of the quantized model, as it was trained, for all texts."""
        texts, pairs = select_texts_and_pairs(self.examples, range(len(self.examples)))
        return reference_logits(self.source.runner, self.source.tokenizer, texts, pairs, self.max_length)

    @cached_property
    def batch(self) -> dict[str, np.ndarray]:
        """A padded batch of the drawn texts."""
        texts, pairs = self.drawn
        return tokenize_texts(self.source.tokenizer, texts[:_BATCH], pairs[:_BATCH] if pairs else None, self.max_length)


def fix_truncation(tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Makes the tokenizer truncate on its side from now on.

    transformers writes the side to `tokenizer.json`, which is all that other runtimes read, only after a call that
    truncates.
    """
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        backend.enable_truncation(max_length, direction=tokenizer.truncation_side)


def describe_verification(proof: JsonObject) -> str:
    """Returns what was compared for a target, and how much it differs."""
    line = f"{proof['target']}: reloaded" + (", " if "tokens" in proof else " in a fresh process, ")
    if "layers" in proof:
        line += f"layers differ by {proof['layers']:.1e}, {proof['agreement']:.2%} of the predictions agree"
        if "score" in proof:
            line += f", accuracy {proof['score']:.2%} ({proof['trained_score']:.2%} as trained)"
    else:
        line += f"largest difference {proof['max_difference']:.1e} on {proof['rows']} "
        line += f"texts, the same {proof['tokens']} tokens generated" if "tokens" in proof else "texts"
    return f"{line}, {proof['bytes'] / 1e6:.1f} MB"


def reference_logits(
    model: TorchModel | OnnxModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | Sequence[list[str]],
    pairs: Sequence[str] | None,
    max_length: int,
) -> np.ndarray:
    """Returns logits of the model in memory, computed with its own tokenizer.

    They are [texts, classes], or [tokens, classes] of all tokens for models with logits per token.
    """
    parts = []
    for start in range(0, len(texts), _BATCH):
        rows = slice(start, start + _BATCH)
        batch = tokenize_texts(tokenizer, texts[rows], pairs[rows] if pairs else None, max_length)
        parts.append(flatten_tokens(model(batch), batch["attention_mask"]))
    return np.concatenate(parts)


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | Sequence[list[str]],
    pairs: Sequence[str] | None,
    max_length: int,
) -> dict[str, np.ndarray]:
    """Returns a padded batch of ids, mask and types, each [batch, length] int64; texts may be lists of words."""
    batch = tokenizer(
        list(texts),
        list(pairs) if pairs else None,
        padding=True,
        padding_side="right",
        truncation=True,
        max_length=max_length,
        is_split_into_words=not isinstance(texts[0], str),
        return_tensors="np",
    )
    types = {"token_type_ids": np.zeros_like(batch["input_ids"])}  # zeros if the tokenizer returns none
    return {name: value.astype(np.int64) for name, value in {**types, **batch}.items()}
