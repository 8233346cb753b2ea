"""Verification of an exported artefact: reloads it in a fresh process and compares its logits with the model's.

The fresh process runs this file as `python -m compress.export.verify TARGET FOLDER SAMPLES OUT`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import ExportError, VerificationError
from compress.export.common.decisions import DecisionKind, predictions_agree
from compress.export.common.targets import ExportTarget, find_target
from compress.export.runtimes import open_export
from compress.measure.memory import read_peak_memory
from compress.subprocesses import end_with_parent, signal_name
from distill.checkpoint.readers import CHECKPOINT_READERS

# Share of predictions that must agree if activations are quantized: a difference of the last bit may flip one.
MIN_AGREEMENT = 0.995
BATCH = 16
NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Parity:
    """Agreement of an artefact with the model it was made from.

    Args:
        target: Name of the target.
        rows: Number of compared rows of logits: one per text, or one per token for token-level models.
        max_difference, mean_difference: Of logits, absolute.
        agreement: Share of predictions that agree; for a classifier, those of the same class.
        load_ms: Time until the model can be called, including the start of the runtime.
        peak_bytes: Peak memory of the process that loaded and ran it, Python included.
    """

    target: str
    rows: int
    max_difference: float
    mean_difference: float
    agreement: float
    load_ms: float = 0.0
    peak_bytes: int = 0


def verify_export(
    target: str,
    folder: Path,
    texts: Sequence[str] | Sequence[Sequence[str]],
    pairs: Sequence[str] | None,
    max_length: int,
    expected: np.ndarray,
    *,
    quantized: bool = False,
    kind: DecisionKind = "class",
) -> tuple[Parity, np.ndarray]:
    """Reloads the artefact in `folder` with its own tokenizer in a fresh process and compares it with `expected`.

    Args:
        target: Name of the target.
        folder: The artefact.
        texts, pairs: Real texts, or the words of each.
        max_length: Longest text in tokens.
        expected: Logits of the trained model for them, [texts, classes]; for token-level models [tokens, classes].
        quantized: Whether activations are quantized: a difference of the last bit may then move logits by a step, so
            that predictions are compared instead.
        kind: Kind of predictions.

    Returns:
        The comparison, and the artefact's logits.

    Raises:
        VerificationError: The fresh process was ended by a signal, for example for lack of memory.
        ExportError: The fresh process fails; the logits differ by more than rounding of float32; or, with `quantized`,
            more than 1 - MIN_AGREEMENT of the predictions differ.
    """
    with tempfile.TemporaryDirectory() as scratch:
        samples, out = Path(scratch) / "samples.json", Path(scratch) / "answers.npz"
        samples.write_text(
            json.dumps(
                {
                    "texts": list(texts),
                    "pairs": list(pairs) if pairs else None,
                    "max_length": max_length,
                    "readers": CHECKPOINT_READERS,
                    "parent": os.getpid(),
                }
            )
        )
        command = [sys.executable, "-m", "compress.export.verify", target, str(folder), str(samples), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - this module itself
        if done.returncode < 0:
            raise VerificationError(
                f"{target}: the process that verifies {folder} was killed by {signal_name(-done.returncode)} before "
                "it had compared anything, so the file is unverified; run the same command again, with more memory if "
                "it ran out"
            )
        if done.returncode:
            raise ExportError(f"{target}: {folder} can't be reloaded in a fresh process:\n{done.stderr[-2000:]}")
        outputs = np.load(out)
    logits = outputs["logits"]
    parity = compare_logits(target, logits, expected, kind, outputs["lengths"])
    parity = replace(parity, load_ms=float(outputs["load_ms"]), peak_bytes=int(outputs["peak_bytes"]))
    check_parity(parity, folder, quantized=quantized)
    return parity, logits


def compare_logits(
    target: str, found: np.ndarray, expected: np.ndarray, kind: DecisionKind = "class", lengths: np.ndarray = NONE
) -> Parity:
    """Returns the differences between found and expected logits.

    Raises:
        ExportError: Their shapes differ.
    """
    if found.shape != expected.shape:
        raise ExportError(f"{target}: expected logits {expected.shape}, found {found.shape}")
    difference = np.abs(found.astype(np.float64) - expected)
    agreement = float(predictions_agree(kind, found, expected, lengths).mean())
    return Parity(target, len(expected), float(difference.max()), float(difference.mean()), agreement)


def check_parity(parity: Parity, folder: Path, *, quantized: bool) -> None:
    """Checks that the artefact agrees with the model within the tolerance of its target.

    Raises:
        ExportError: The difference is larger.
    """
    tolerance = find_target(parity.target).kind.tolerance
    if quantized and not (parity.agreement >= MIN_AGREEMENT and np.isfinite(parity.max_difference)):
        raise ExportError(
            f"{parity.target}: {folder} predicts differently from the trained model: expected at least "
            f"{MIN_AGREEMENT:.1%} of its predictions to agree, found {parity.agreement:.2%}"
        )
    if not quantized and not parity.max_difference <= tolerance:  # also catches NaN
        raise ExportError(
            f"{parity.target}: {folder} has other logits than the trained model: largest difference "
            f"{parity.max_difference:.2e}, expected at most {tolerance:.0e}: predictions would change"
        )


def run_samples(target: ExportTarget, folder: Path, samples: dict[str, Any]) -> dict[str, Any]:
    """Returns logits of the samples, load time and peak memory, using only the artefact and the tokenizer beside it."""
    CHECKPOINT_READERS.update(samples["readers"])
    start = time.perf_counter()
    model = open_export(target, folder, threads=1)
    load_ms = (time.perf_counter() - start) * 1e3
    if target.kind.reads_texts:
        logits, lengths = model(samples["texts"]), np.ones(len(samples["texts"]), np.int64)
    else:
        logits, lengths = run_batches(model, folder, samples)
    return {"logits": logits, "lengths": lengths, "load_ms": load_ms, "peak_bytes": read_peak_memory()}


def run_batches(model: Any, folder: Path, samples: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits of the samples and the tokens of each, with the tokenizer in `folder`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    side = (tokenizer.truncation or {}).get("direction", "right")
    tokenizer.enable_truncation(samples["max_length"], direction=side)
    tokenizer.enable_padding(pad_id=pad_id(folder))
    rows = list(zip(samples["texts"], samples["pairs"], strict=True)) if samples["pairs"] else samples["texts"]
    is_words = not isinstance(samples["texts"][0], str)
    parts, lengths = [], []
    for number, first in enumerate(range(0, len(rows), BATCH)):
        encoded = tokenizer.encode_batch(rows[first : first + BATCH], is_pretokenized=is_words)
        mask = np.asarray([each.attention_mask for each in encoded])
        run = run_singly if getattr(model, "alternates", False) and number % 2 == 0 else run_together
        parts.append(run(model, pad_batch(encoded, model), mask))
        lengths.append(mask.sum(1))
    return np.concatenate(parts), np.concatenate(lengths)


def run_together(model: Any, inputs: dict[str, np.ndarray], mask: np.ndarray) -> np.ndarray:
    """Returns the logits of a batch as rows."""
    return flatten_tokens(model(inputs), mask)


def run_singly(model: Any, inputs: dict[str, np.ndarray], mask: np.ndarray) -> np.ndarray:
    """Returns the logits of a batch as rows, from calls of one text without padding."""
    singles = [
        ({n: value[[i], :length] for n, value in inputs.items()}, mask[[i], :length])
        for i, length in enumerate(mask.sum(1))
    ]
    return np.concatenate([run_together(model, *single) for single in singles])


def flatten_tokens(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns the logits of a batch as rows: one per text, or one per token that isn't padding."""
    return logits if logits.ndim == 2 else logits[mask.astype(bool)]


def pad_id(folder: Path) -> int:
    """Returns the id of the padding token of the tokenizer in a folder."""
    return json.loads((folder / "config.json").read_text()).get("pad_token_id") or 0


def pad_batch(encodings: list[Any], model: Any) -> dict[str, np.ndarray]:
    """Returns a padded batch as the arrays that the model reads."""
    fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return {n: np.asarray([getattr(e, fields[n]) for e in encodings], np.int64) for n in model.names}


def main(target: str, folder: str, samples: str, out: str) -> None:
    """Runs a target on stored samples and writes its logits, in a process of its own."""
    request = json.loads(Path(samples).read_text())
    end_with_parent(request["parent"])
    np.savez(out, **run_samples(find_target(target), Path(folder), request))


if __name__ == "__main__":
    main(*sys.argv[1:])
