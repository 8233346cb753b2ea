"""Verification of exports: every target is reloaded in a fresh process and compared, or set aside."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.errors import ArtefactError
from compress.export.common.decisions import kind_of
from compress.export.common.huggingface import TorchModel
from compress.export.common.source import Source
from compress.export.common.targets import Target
from compress.export.onnx.decoder import verify_decoder
from compress.export.onnx.graph import OnnxModel
from compress.export.verify import flatten_tokens, verify
from compress.export.write import check_layers, write_target
from compress.quantize.store import is_quantized, load_quantization
from distill.checkpoint.pruned import load_pruned
from pipelines.runs.files import count_bytes
from pipelines.stages.compared_texts import select_rows
from pipelines.stages.vocabulary import tokenizer_of

if TYPE_CHECKING:
    from distill.data.rows.tagged import Tagged
    from distill.data.splits.labelled import Examples

REFUSED = "refused"
LOST = 0.001  # maximum difference in accuracy between the trained model with rounding and its file
BATCH = 16
BEGUN, WRITTEN = 8, 100  # tokens of a prompt and of its continuation when a decoder is verified
Texts = tuple[list[Any], list[str] | None]  # a text is a string or a list of words


def source_of(checkpoint: Path, *, reduced: bool = False) -> Source:
    """Loads the checkpoint and its rounding parameters, if it is quantized; for `reduced` see `Source`."""
    rounding = load_quantization(checkpoint) if is_quantized(checkpoint) else None
    return Source(load_pruned(checkpoint).float(), tokenizer_of(checkpoint, "model"), rounding, reduced)


class Proof:
    """Exports targets and compares them with the model; the results are appended to `proven` and `refused`.

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
        self.drawn = drawn
        self.proven: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []

    def prove(self, target: Target) -> None:
        """Writes the target, reloads it in a fresh process and compares it with the model, or sets it aside."""
        made_from = target.made_from
        if made_from is not None and str(made_from) in [each["target"] for each in self.refused]:
            self.put_aside(target, f"it is made from {made_from}, which was refused")
            return
        try:
            write_target(self.source, target, self.folder)
            proof = self.rounded_proof(target) if self.rounds(target) else self.float_proof(target)
        except ArtefactError as error:
            self.put_aside(target, str(error))
        else:
            bits = {"weight_bits": 7} if target.rounded and self.source.has_reduced_range else {}
            self.proven.append(proof | bits | {"bytes": count_bytes(self.folder / str(target))})

    def rounds(self, target: Target) -> bool:
        """Returns whether the target has the rounding parameters that the model was trained with."""
        return target.rounded and self.source.rounding is not None

    def float_proof(self, target: Target) -> dict[str, Any]:
        if target.format == "onnx-decoder":
            return self.written_proof(target)
        place, expected = self.folder / str(target), self.logits
        if target.rounded:  # dynamic int8 differs from the float model: compare with the file's own logits
            expected = reference_logits(
                OnnxModel(place, threads=1), self.source.tokenizer, *self.drawn, self.max_length
            )
        parity, _ = verify(str(target), place, *self.drawn, self.max_length, expected)
        return asdict(parity)

    def written_proof(self, target: Target) -> dict[str, Any]:
        """Compares a decoder's generated continuations of the drawn texts' prefixes, and its logits of their tokens."""
        tokenizer, most = self.source.tokenizer, min(self.max_length, self.source.longest)
        blocks = [np.asarray(ids[:most], np.int64) for ids in tokenizer(self.drawn[0])["input_ids"] if ids]
        prompts = [block[:BEGUN].tolist() for block in blocks[:BATCH]]
        room = self.source.longest - BEGUN
        parity = verify_decoder(
            self.source.model, self.folder / str(target), prompts, blocks, new_tokens=min(WRITTEN, room)
        )
        return {"target": str(target), "texts": len(blocks)} | asdict(parity)

    def rounded_proof(self, target: Target) -> dict[str, Any]:
        """Compares each layer with the quantized model, then the predictions on all texts and the score."""
        layers = check_layers(self.source, target, self.folder, self.batch)
        texts, pairs = select_rows(self.examples, range(len(self.examples)))
        parity, logits = verify(
            str(target),
            self.folder / str(target),
            texts,
            pairs,
            self.max_length,
            self.trained,
            rounds=True,
            kind=kind_of(self.source.model),
        )
        proof = asdict(parity) | {"layers": layers}
        if self.of_classes:
            labels = np.asarray(self.examples.labels)
            found, trained = (float((each.argmax(-1) == labels).mean()) for each in (logits, self.trained))
            if abs(found - trained) > LOST:
                raise ArtefactError(
                    f"{target}: its accuracy on {len(texts)} texts is {found:.2%}, expected {trained:.2%} as trained, "
                    f"to within {LOST:.1%}"
                )
            proof |= {"score": found, "trained_score": trained}
        return proof

    @property
    def of_classes(self) -> bool:
        """Whether each text has a class; other tasks are scored in the evaluation."""
        return bool(self.examples.labels) and isinstance(self.examples.labels[0], int)

    def put_aside(self, target: Target, reason: str) -> None:
        """Moves the target to the refused targets, together with the reason."""
        place = self.folder / REFUSED / str(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        if (self.folder / str(target)).exists():
            shutil.move(self.folder / str(target), place)
        place.mkdir(exist_ok=True)
        (place / "reason.txt").write_text(reason + "\n")
        self.refused.append({"target": str(target), "reason": reason, "where": f"{REFUSED}/{target}"})

    @cached_property
    def logits(self) -> np.ndarray:
        """Logits of the float checkpoint for the drawn texts."""
        model = TorchModel.of(self.source.model)
        return reference_logits(model, self.source.tokenizer, *self.drawn, self.max_length)

    @cached_property
    def trained(self) -> np.ndarray:
        """Logits of the model with rounding, as it was trained, for all texts."""
        texts, pairs = select_rows(self.examples, range(len(self.examples)))
        return reference_logits(self.source.runner, self.source.tokenizer, texts, pairs, self.max_length)

    @cached_property
    def batch(self) -> dict[str, np.ndarray]:
        """A padded batch of the drawn texts."""
        texts, pairs = self.drawn
        return tokenized(self.source.tokenizer, texts[:BATCH], pairs[:BATCH] if pairs else None, self.max_length)


def proof_text(proof: dict[str, Any]) -> str:
    told = f"{proof['target']}: reloaded" + (", " if "tokens" in proof else " in a fresh process, ")
    if "layers" in proof:
        told += f"layers differ by {proof['layers']:.1e}, {proof['same_class']:.2%} of {proof['texts']} answers alike"
        if "score" in proof:
            told += f", accuracy {proof['score']:.2%} ({proof['trained_score']:.2%} as trained)"
    else:
        told += f"largest difference {proof['max_difference']:.1e} on {proof['texts']} "
        told += f"texts, the same {proof['tokens']} tokens written" if "tokens" in proof else "answers"
    return f"{told}, {proof['bytes'] / 1e6:.1f} MB"


def reference_logits(
    model: TorchModel | OnnxModel,
    tokenizer: Any,
    texts: Sequence[Any],
    pairs: Sequence[str] | None,
    max_length: int,
) -> np.ndarray:
    """Returns logits of the model in memory, computed with its own tokenizer.

    They are [texts, classes], or [tokens, classes] of all tokens for models with logits per token.
    """
    parts = []
    for start in range(0, len(texts), BATCH):
        rows = slice(start, start + BATCH)
        batch = tokenized(tokenizer, texts[rows], pairs[rows] if pairs else None, max_length)
        parts.append(flatten_tokens(model(batch), batch["attention_mask"]))
    return np.concatenate(parts)


def tokenized(
    tokenizer: Any, texts: Sequence[Any], pairs: Sequence[str] | None, max_length: int
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
