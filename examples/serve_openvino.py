"""Classifies texts with a model that a run exported to student/openvino-int8 (or openvino). Torch is not imported.

    python examples/serve_openvino.py runs/few-bits/student/openvino-int8 "Where is my card?" "Top up failed"

Needs: pip install openvino tokenizers numpy, and exported_folder.py beside it
"""

import sys
from pathlib import Path

import numpy as np
import openvino
from exported_folder import check_arguments, load_file, read_cleaning, read_config, read_labels
from tokenizers import Tokenizer


class Classifier:
    """A text classifier in an exported folder."""

    def __init__(self, folder: Path, threads: int = 1):
        config = read_config(folder, "tokenizer.json", "model.xml", "model.bin")
        self.labels, self.clean = read_labels(folder, config), read_cleaning(folder)
        self.tokenizer = load_file(folder / "tokenizer.json", Tokenizer.from_file)
        self.tokenizer.enable_padding(pad_id=config.get("pad_token_id") or 0)
        self.tokenizer.enable_truncation(128)
        # Otherwise OpenVINO uses bfloat16 for all float operations on processors that support it.
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self.model = load_file(folder / "model.xml", lambda file: openvino.Core().compile_model(file, "CPU", settings))
        self.names = [value.any_name for value in self.model.inputs]

    def __call__(self, texts: list[str]) -> list[tuple[str, float]]:
        """Returns (label, probability) of each text."""
        rows = self.tokenizer.encode_batch([self.clean(text) for text in texts])
        fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        inputs = {name: np.asarray([getattr(row, fields[name]) for row in rows], np.int64) for name in self.names}
        logits = self.model(inputs)[0]
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        return [(self.labels[i], float(row[i])) for i, row in zip(probabilities.argmax(-1), probabilities, strict=True)]


if __name__ == "__main__":
    check_arguments(sys.argv[1:], "a folder and texts")
    for text, (label, probability) in zip(sys.argv[2:], Classifier(Path(sys.argv[1]))(sys.argv[2:]), strict=True):
        print(f"{label}\t{probability:.3f}\t{text}")
