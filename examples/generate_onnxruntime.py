"""Goes on from a prompt with what a run of a language model left in its ONNX folder. No torch is imported.

    python examples/generate_onnxruntime.py runs/small-lm/student/onnx-decoder "It was a dark" --tokens 60

Needs: pip install onnxruntime tokenizers numpy, and exported_folder.py beside it
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
from exported_folder import loaded, read_config, refuse
from tokenizers import Tokenizer


class Writer:
    def __init__(self, folder: Path, threads: int = 1):
        read_config(folder, "generation_config.json", "tokenizer.json", "model.onnx")
        settings = loaded(folder / "generation_config.json", lambda file: json.loads(Path(file).read_text()))
        ends = settings.get("eos_token_id")
        self.ends = ends if isinstance(ends, list) else [ends]
        self.tokenizer = loaded(folder / "tokenizer.json", Tokenizer.from_file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = loaded(
            folder / "model.onnx",
            lambda file: onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"]),
        )
        inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.cache = {name: shape for name, shape in inputs.items() if name.startswith("past_key_values")}
        if not self.cache:
            refuse(f"{folder}: expected a decoder with a cache of keys and values, found none: take onnx-decoder/")
        self.outputs = ["logits", *(name.replace("past_key_values", "present") for name in self.cache)]

    def __call__(self, prompt: str, tokens: int, temperature: float = 0.0, seed: int = 0) -> Iterator[int]:
        """The tokens that follow, one after the other: the likeliest, or drawn at a temperature above 0."""
        random = np.random.default_rng(seed)
        ids, seen = self.tokenizer.encode(prompt).ids, 0
        past = {name: np.zeros((1, heads, 0, width), np.float32) for name, (_, heads, _, width) in self.cache.items()}
        for _ in range(tokens):
            places = np.arange(seen, seen + len(ids), dtype=np.int64)[None]
            given = {"input_ids": np.asarray([ids], np.int64), "position_ids": places}
            given["attention_mask"] = np.ones((1, seen + len(ids)), np.int64)
            logits, *present = self.session.run(self.outputs, given | past)
            past, seen = dict(zip(self.cache, present, strict=True)), seen + len(ids)
            noise = temperature * random.gumbel(size=logits.shape[-1])  # the largest is then a draw from the softmax
            ids = [int((logits[0, -1] + noise).argmax())]
            if ids[0] in self.ends:
                return
            yield ids[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=100, help="how many at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    writer = Writer(asked.folder)
    print(writer.tokenizer.decode(list(writer(asked.prompt, asked.tokens, asked.temperature, asked.seed))))
