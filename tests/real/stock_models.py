"""Predictions of published folders by stock libraries alone, in a process that doesn't import this repository.

    python stock_models.py REQUEST.json ANSWER.json

The request names a task, texts (lists of words for a tagger), the maximum length, a checkpoint for `from_pretrained`
and ONNX folders by name. The answer has the checkpoint's parameters, its FLOPs on 32 tokens, and of each model
the predictions for every text: the class, the class of each word, or the likeliest token at each position.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

CLASSES = {
    "text-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "causal-lm": transformers.AutoModelForCausalLM,
}
OURS = {"distill", "compress", "pipelines"}
TOKENS = 32


def main(request_file: str, result_file: str) -> None:
    torch.set_num_threads(1)
    request = json.loads(Path(request_file).read_text())
    folder, remote = request["checkpoint"], request["trust_remote_code"]
    model = CLASSES[request["task"]].from_pretrained(folder, trust_remote_code=remote, attn_implementation="eager")
    runners = {"pytorch": (folder, torch_runner(model.eval()))}
    runners |= {name: (each, onnx_runner(each)) for name, each in request["onnx"].items()}
    result = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": count_flops(model),
        "labels": model.config.id2label,
        "predictions": {name: predictions(*each, request) for name, each in runners.items()},
    }
    assert not OURS & {name.partition(".")[0] for name in sys.modules}
    Path(result_file).write_text(json.dumps(result))


def predictions(folder: str, run: Callable[[Any], np.ndarray], request: dict[str, Any]) -> list[Any]:
    """Returns the likeliest class of each text or position; of a tagger that of each word, None for words cut off."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    split, results = request["task"] == "token-classification", []
    for text in request["texts"]:
        encoded = tokenizer(text, is_split_into_words=split, truncation=True, max_length=request["max_length"])
        chosen = run({name: np.asarray([values]) for name, values in encoded.items()})[0].argmax(-1).tolist()
        if split:
            firsts = {word: chosen[i] for i, word in reversed([*enumerate(encoded.word_ids())])}
            chosen = [firsts.get(number) for number in range(len(text))]
        results.append(chosen)
    return results


def torch_runner(model: torch.nn.Module) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    @torch.inference_mode()
    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        return model(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits.numpy()

    return run


def onnx_runner(folder: str) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(Path(folder) / "model.onnx"), options, ["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        zeros = np.zeros_like(inputs["input_ids"])  # token types, where the tokenizer gives none
        return session.run(None, {name: inputs.get(name, zeros) for name in names})[0]

    return run


@torch.inference_mode()
def count_flops(model: torch.nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, TOKENS, dtype=torch.long))
    return counter.get_total_flops()


if __name__ == "__main__":
    main(*sys.argv[1:])
