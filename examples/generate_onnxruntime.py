"""Continues a prompt with a language model that a run exported to its ONNX folder; torch is not imported.

    python examples/generate_onnxruntime.py runs/small-lm/student/onnx-decoder "It was a dark" --tokens 60

Needs: pip install onnxruntime tokenizers numpy, and exported_folder.py beside it
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
from exported_folder import exit_with_error, load_file, read_config
from tokenizers import Tokenizer


class Generator:
    """A decoder with a key-value cache in an exported folder."""

    def __init__(self, folder: Path, threads: int = 1):
        config = read_config(folder, "generation_config.json", "tokenizer.json", "model.onnx")
        self.positions = config.get("max_position_embeddings") or config.get("n_positions")
        settings = load_file(folder / "generation_config.json", lambda file: json.loads(Path(file).read_text("utf-8")))
        ends = settings.get("eos_token_id")
        self.ends = ends if isinstance(ends, list) else [ends]
        self.tokenizer = load_file(folder / "tokenizer.json", Tokenizer.from_file)
        self.tokenizer.no_truncation()  # some tokenizers have the limit of their last training
        options = onnxruntime.SessionOptions()
        # By default the inputs of products with weight-only quantization would be rounded, too.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        options.intra_op_num_threads = threads
        self.session = load_file(
            folder / "model.onnx",
            lambda file: onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"]),
        )
        inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.cache = {name: shape for name, shape in inputs.items() if name.startswith("past_key_values")}
        if not self.cache:
            exit_with_error(f"{folder}: expected a decoder with a key-value cache, found none: use onnx-decoder/")
        self.outputs = ["logits", *(name.replace("past_key_values", "present") for name in self.cache)]

    def __call__(self, prompt: str, tokens: int, temperature: float = 0.0, seed: int = 0) -> Iterator[int]:
        """Yields the next tokens: the most likely ones, or sampled ones at a temperature above 0."""
        random = np.random.default_rng(seed)
        ids, seen = self.tokenizer.encode(prompt).ids, 0
        if not ids:
            exit_with_error("prompt: expected at least one token, found none: there is nothing to continue")
        if self.positions and len(ids) + tokens > self.positions:
            exit_with_error(
                f"--tokens: expected at most {self.positions - len(ids)} after this prompt, found {tokens}: the model "
                f"has {self.positions} positions"
            )
        past = {name: np.zeros((1, heads, 0, width), np.float32) for name, (_, heads, _, width) in self.cache.items()}
        for _ in range(tokens):
            positions = np.arange(seen, seen + len(ids), dtype=np.int64)[None]
            inputs = {"input_ids": np.asarray([ids], np.int64), "position_ids": positions}
            inputs["attention_mask"] = np.ones((1, seen + len(ids)), np.int64)
            logits, *present = self.session.run(self.outputs, inputs | past)
            past, seen = dict(zip(self.cache, present, strict=True)), seen + len(ids)
            # The token with the largest sum of logit and Gumbel noise is a sample of the softmax.
            noise = temperature * random.gumbel(size=logits.shape[-1])
            ids = [int((logits[0, -1] + noise).argmax())]
            if ids[0] in self.ends:
                return
            yield ids[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=100, help="maximum number of new tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = Generator(options.folder)
    ids = list(generator(options.prompt, options.tokens, options.temperature, options.seed))
    print(generator.tokenizer.decode(ids))
