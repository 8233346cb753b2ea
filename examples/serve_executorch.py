"""Classifies texts with what a run left in student/executorch-int8 (or executorch).

    python examples/serve_executorch.py runs/few-bits/student/executorch-int8 "Where is my card?" "Top up failed"

Needs: pip install executorch torch tokenizers numpy, and exported_folder.py beside it. ExecuTorch's Python bindings
import torch; its C++, Java and Swift ones run the same file without.
"""

import json
import sys
from pathlib import Path

import numpy as np
from exported_folder import check_words, labels_of, loaded, read_config
from tokenizers import Tokenizer


class Classifier:
    def __init__(self, folder: Path):
        config = read_config(folder, "tokenizer.json", "model.pte", "inputs.json")
        self.labels = labels_of(folder, config)
        self.tokenizer = loaded(folder / "tokenizer.json", Tokenizer.from_file)
        self.tokenizer.enable_padding(pad_id=config.get("pad_token_id") or 0)
        self.tokenizer.enable_truncation(128)
        self.names = loaded(folder / "inputs.json", lambda file: json.loads(Path(file).read_text()))
        from executorch.runtime import Runtime  # slow, and it logs to stderr: folders are checked first

        # The program has the memory that the method works in.
        self.program = loaded(folder / "model.pte", Runtime.get().load_program)
        self.method = self.program.load_method("forward")

    def __call__(self, texts: list[str]) -> list[tuple[str, float]]:
        """(label, probability) of each text."""
        import torch

        rows = self.tokenizer.encode_batch(texts)
        fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        inputs = [torch.tensor([getattr(row, fields[name]) for row in rows]) for name in self.names]
        logits = self.method.execute(inputs)[0].numpy()
        chances = np.exp(logits - logits.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        return [(self.labels[i], float(row[i])) for i, row in zip(chances.argmax(-1), chances, strict=True)]


if __name__ == "__main__":
    check_words(sys.argv[1:], "a folder and texts")
    for text, (label, chance) in zip(sys.argv[2:], Classifier(Path(sys.argv[1]))(sys.argv[2:]), strict=True):
        print(f"{label}\t{chance:.3f}\t{text}")
