"""Classifies texts with a model that a run exported to student/openvino-int8 (or openvino). Torch is not imported.

    python examples/serve_openvino.py runs/quantized/student/openvino-int8 "Where is my card?" "Top up failed"

Needs: pip install openvino tokenizers numpy, and exported_folder.py beside it
"""

import sys
from pathlib import Path

import numpy as np
import openvino
from exported_folder import check_arguments, load_file, load_tokenizer, read_cleaning, read_config, read_labels


class Classifier:
    """A text classifier in an exported folder."""

    def __init__(self, folder: Path, threads: int = 1):
        config = read_config(folder, "tokenizer.json", "model.xml", "model.bin")
        self.labels, self.clean = read_labels(folder, config), read_cleaning(folder)
        self.tokenizer = load_tokenizer(folder, config)
        self.tokenizer.enable_padding(pad_id=config.get("pad_token_id") or 0, pad_to_multiple_of=8)
        # Otherwise OpenVINO uses bfloat16 for all float operations on processors that support it.
        self.settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        self.core = openvino.Core()
        self.model = load_file(folder / "model.xml", self.core.read_model)
        self.names = [value.any_name for value in self.model.inputs]
        self.compiled: dict[int, openvino.CompiledModel] = {}

    def __call__(self, texts: list[str]) -> list[tuple[str, float]]:
        """Returns (label, probability) of each text."""
        return [self.classify(self.clean(text)) for text in texts]

    def classify(self, text: str) -> tuple[str, float]:
        """Returns (label, probability) of a text."""
        (row,) = self.tokenizer.encode_batch([text])
        fields = {"input_ids": row.ids, "attention_mask": row.attention_mask, "token_type_ids": row.type_ids}
        inputs = {name: np.asarray([fields[name]], np.int64) for name in self.names}
        logits = self.open(len(row.ids))(inputs, share_inputs=True)[0][0]
        probabilities = np.exp(logits - logits.max())
        return self.labels[probabilities.argmax()], float(probabilities.max() / probabilities.sum())

    def open(self, length: int) -> openvino.CompiledModel:
        """Returns the model for one text of this length: with any length, OpenVINO derives all shapes in each call."""
        if length not in self.compiled:
            model = self.model.clone()
            model.reshape(dict.fromkeys(self.names, [1, length]))
            self.compiled[length] = self.core.compile_model(model, "CPU", self.settings)
        return self.compiled[length]


if __name__ == "__main__":
    check_arguments(sys.argv[1:], "a folder and texts")
    for text, (label, probability) in zip(sys.argv[2:], Classifier(Path(sys.argv[1]))(sys.argv[2:]), strict=True):
        print(f"{label}\t{probability:.3f}\t{text}")
