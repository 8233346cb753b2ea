"""Classifies texts with a model that a run exported to student/litert-int8 (or litert), without torch or transformers.

    python examples/serve_litert.py runs/phone-int8/student/litert-int8 "Where is my card?" "Top up failed"

Needs: pip install ai-edge-litert tokenizers numpy, and exported_folder.py beside it. LiteRT's Java,
Swift and C++ run the same file.
"""

import sys
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from exported_folder import check_arguments, load_file, load_tokenizer, read_cleaning, read_config, read_labels


class Classifier:
    """A text classifier in an exported folder."""

    def __init__(self, folder: Path):
        config = read_config(folder, "tokenizer.json", "model.tflite")
        self.labels, self.clean = read_labels(folder, config), read_cleaning(folder)
        self.tokenizer = load_tokenizer(folder, config)
        self.interpreter = load_file(folder / "model.tflite", lambda file: Interpreter(file, num_threads=1))
        # Shapes are fixed: there is a signature per length, such as tokens_16, and all share their weights.
        self.signatures = {int(name.split("_")[1]): name for name in self.interpreter.get_signature_list()}
        truncation = self.tokenizer.truncation
        longest = min(truncation["max_length"], max(self.signatures))
        self.tokenizer.enable_truncation(longest, direction=truncation["direction"])

    def __call__(self, text: str) -> tuple[str, float]:
        """Returns the text's (label, probability)."""
        row = self.tokenizer.encode(self.clean(text))
        length = min(length for length in self.signatures if length >= len(row.ids))
        row.pad(length)
        run = self.interpreter.get_signature_runner(self.signatures[length])
        fields = {"input_ids": row.ids, "attention_mask": row.attention_mask, "token_type_ids": row.type_ids}
        logits = run(**{name: np.asarray([fields[name]], np.int32) for name in run.get_input_details()})["logits"][0]
        probabilities = np.exp(logits - logits.max())
        best = int(probabilities.argmax())
        return self.labels[best], float(probabilities[best] / probabilities.sum())


if __name__ == "__main__":
    check_arguments(sys.argv[1:], "a folder and texts")
    classifier = Classifier(Path(sys.argv[1]))
    for text in sys.argv[2:]:
        label, probability = classifier(text)
        print(f"{label}\t{probability:.3f}\t{text}")
