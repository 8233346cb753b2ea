"""Classifies texts with a model that a run exported to student/executorch-int8 (or executorch).

    python examples/serve_executorch.py runs/phone-int8/student/executorch-int8 "Where is my card?" "Top up failed"

Needs: pip install executorch torch tokenizers numpy, and exported_folder.py beside it. ExecuTorch's Python bindings
import torch; its C++, Java and Swift ones run the same file without.
"""

import json
import sys
from pathlib import Path

import numpy as np
from exported_folder import check_arguments, load_file, load_tokenizer, read_cleaning, read_config, read_labels

MAX_BATCH = 32  # texts that the program accepts at a time


class Classifier:
    """A text classifier in an exported folder."""

    def __init__(self, folder: Path):
        config = read_config(folder, "tokenizer.json", "model.pte", "inputs.json")
        self.labels, self.clean = read_labels(folder, config), read_cleaning(folder)
        self.tokenizer = load_tokenizer(folder, config)
        self.tokenizer.enable_padding(pad_id=config.get("pad_token_id") or 0)
        self.names = load_file(folder / "inputs.json", lambda file: json.loads(Path(file).read_text("utf-8")))
        from executorch.runtime import Runtime  # slow, and logs to stderr: the folder is checked first

        # The program must stay alive: it owns the memory of its methods.
        self.program = load_file(folder / "model.pte", Runtime.get().load_program)
        self.method = self.program.load_method("forward")

    def __call__(self, texts: list[str]) -> list[tuple[str, float]]:
        """Returns (label, probability) of each text."""
        import torch

        rows = self.tokenizer.encode_batch([self.clean(text) for text in texts])
        fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        inputs = [torch.tensor([getattr(row, fields[name]) for row in rows]) for name in self.names]
        parts = zip(*(tensor.split(MAX_BATCH) for tensor in inputs), strict=True)
        # A copy, because the next call reuses the memory.
        logits = np.concatenate([self.method.execute(list(part))[0].numpy().copy() for part in parts])
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        return [(self.labels[i], float(row[i])) for i, row in zip(probabilities.argmax(-1), probabilities, strict=True)]


if __name__ == "__main__":
    check_arguments(sys.argv[1:], "a folder and texts")
    for text, (label, probability) in zip(sys.argv[2:], Classifier(Path(sys.argv[1]))(sys.argv[2:]), strict=True):
        print(f"{label}\t{probability:.3f}\t{text}")
