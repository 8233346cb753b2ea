"""Reloads an exported artefact in a fresh process and compares its logits with the model's.

Run as `python -m compress.export.verify TARGET FOLDER SAMPLES OUT`, this file is that fresh process.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compress.errors import ArtefactError
from compress.export.runtimes import open_export

# Largest difference of logits that is rounding: another order of float32 sums, nothing else.
TOLERANCE = {"huggingface": 1e-4} | dict.fromkeys(
    ("onnx", "onnxruntime", "onnx-int8", "onnxruntime-int8", "openvino"), 1e-3
)
BATCH = 16


@dataclass(frozen=True)
class Parity:
    """Largest and mean absolute difference of logits, and the share of texts with the same class."""

    target: str
    texts: int
    max_difference: float
    mean_difference: float
    same_class: float


def verify(
    target: str, folder: Path, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int, expected: np.ndarray
) -> Parity:
    """Compares the artefact in `folder`, reloaded with its own tokenizer in a fresh process, with `expected`.

    Args:
        target: One of TOLERANCE.
        folder: The artefact.
        texts, pairs: Real texts.
        max_length: Longest text in tokens.
        expected: Logits of the trained model for them, [texts, classes]; for a quantized target those of the
            quantized file in the process that wrote it.

    Raises:
        ArtefactError: The fresh process fails, or the logits differ by more than rounding.
    """
    with tempfile.TemporaryDirectory() as scratch:
        samples, out = Path(scratch) / "samples.json", Path(scratch) / "logits.npy"
        samples.write_text(
            json.dumps({"texts": list(texts), "pairs": list(pairs) if pairs else None, "max_length": max_length})
        )
        command = [sys.executable, "-m", "compress.export.verify", target, str(folder), str(samples), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ArtefactError(f"{target}: {folder} can't be reloaded in a fresh process:\n{done.stderr[-2000:]}")
        found = np.load(out)
    parity = compare(target, found, expected)
    if not parity.max_difference <= TOLERANCE[target]:  # also catches NaN
        raise ArtefactError(
            f"{target}: {folder} gives other logits than the trained model: largest difference "
            f"{parity.max_difference:.2e}, expected at most {TOLERANCE[target]:.0e}: it would classify differently"
        )
    return parity


def compare(target: str, found: np.ndarray, expected: np.ndarray) -> Parity:
    if found.shape != expected.shape:
        raise ArtefactError(f"{target}: expected logits {expected.shape}, found {found.shape}")
    difference = np.abs(found.astype(np.float64) - expected)
    same = float((found.argmax(-1) == expected.argmax(-1)).mean())
    return Parity(target, len(expected), float(difference.max()), float(difference.mean()), same)


def reload_logits(target: str, folder: Path, samples: dict) -> np.ndarray:
    """Logits of the samples from the artefact and the tokenizer beside it, nothing else."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(samples["max_length"])
    tokenizer.enable_padding(pad_id=pad_id(folder))
    rows = list(zip(samples["texts"], samples["pairs"], strict=True)) if samples["pairs"] else samples["texts"]
    model = open_export(target, folder, threads=1)
    parts = [model(arrays(tokenizer.encode_batch(rows[i : i + BATCH]), model)) for i in range(0, len(rows), BATCH)]
    return np.concatenate(parts)


def pad_id(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text()).get("pad_token_id") or 0


def arrays(encodings, model) -> dict[str, np.ndarray]:
    fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return {n: np.asarray([getattr(e, fields[n]) for e in encodings], np.int64) for n in model.names}


def main(target: str, folder: str, samples: str, out: str) -> None:
    np.save(out, reload_logits(target, Path(folder), json.loads(Path(samples).read_text())))


if __name__ == "__main__":
    main(*sys.argv[1:])
