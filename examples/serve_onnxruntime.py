"""Classifies texts with a model that a run exported to an ONNX folder, without importing torch.

    python examples/serve_onnxruntime.py runs/quantized/student/onnxruntime-int8 "Where is my card?" "Top up failed"

Needs: pip install onnxruntime tokenizers numpy, and exported_folder.py beside it
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
from exported_folder import check_arguments, load_file, load_tokenizer, read_cleaning, read_config, read_labels


class Classifier:
    """A text classifier in an exported folder."""

    def __init__(self, folder: Path, threads: int = 1):
        config = read_config(folder, "tokenizer.json", "model.onnx")
        self.labels, self.clean = read_labels(folder, config), read_cleaning(folder)
        self.tokenizer = load_tokenizer(folder, config)
        self.tokenizer.enable_padding(pad_id=config.get("pad_token_id") or 0)
        options = onnxruntime.SessionOptions()
        # By default the inputs of products with weight-only quantization would be rounded, too.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        options.intra_op_num_threads = threads
        self.session = load_file(
            folder / "model.onnx",
            lambda file: onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"]),
        )
        self.names = [value.name for value in self.session.get_inputs()]

    def __call__(self, texts: list[str]) -> list[tuple[str, float]]:
        """Returns (label, probability) of each text."""
        rows = self.tokenizer.encode_batch([self.clean(text) for text in texts])
        fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        inputs = {name: np.asarray([getattr(row, fields[name]) for row in rows], np.int64) for name in self.names}
        logits = self.session.run(None, inputs)[0]
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        return [(self.labels[i], float(row[i])) for i, row in zip(probabilities.argmax(-1), probabilities, strict=True)]


if __name__ == "__main__":
    check_arguments(sys.argv[1:], "a folder and texts")
    for text, (label, probability) in zip(sys.argv[2:], Classifier(Path(sys.argv[1]))(sys.argv[2:]), strict=True):
        print(f"{label}\t{probability:.3f}\t{text}")
