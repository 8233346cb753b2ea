"""Answers texts with a cascade of classifiers: each answers what it is sure of, and leaves the rest to the next.

Stillroom ships this file in a cascade's folder; it needs numpy, onnxruntime and tokenizers only:

    from reader import Cascade

    cascade = Cascade("cascade")
    cascade.classify(["Where is my card?"])       # one Answer(label, margin, member) for each text or pair of texts

    echo "Where is my card?" | python reader.py   # in the folder of this file
"""

# mypy: ignore-errors

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

FIELDS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


class Answer(NamedTuple):
    """A label, or the list of labels where a text has several; the margin and the name of the member that answered."""

    label: object
    margin: float
    member: str


class Member:
    """A classifier in an exported folder with `model.onnx` and `tokenizer.json`.

    It has the temperature of its logits, and the margin from which on its answer counts.
    """

    def __init__(self, folder, temperature=1.0, threshold=0.0, threads=1):
        import onnxruntime

        self.folder, self.temperature, self.threshold = Path(folder), temperature, threshold
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # By default ONNX Runtime would round the inputs of products with weight-only quantization.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        self.session = onnxruntime.InferenceSession(
            str(self.folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.names = [value.name for value in self.session.get_inputs()]

    def __call__(self, inputs):
        """Returns logits float32 [rows, classes] of named int64 inputs [rows, length]."""
        return self.session.run(["logits"], {name: inputs[name] for name in self.names})[0]

    def measure_margin(self, logits, multi_label):
        """Returns how sure the member is of the logits of one text."""
        return measure_margins(compute_probabilities(logits, self.temperature, multi_label), multi_label)[0]


class Cascade:
    """The members in a folder with `cascade.json`, in order."""

    def __init__(self, folder=".", threads=1):
        self.folder = Path(folder)
        self.config = json.loads((self.folder / "cascade.json").read_text("utf-8"))
        self.multi_label = self.config["multi_label"]
        self.names = [each["name"] for each in self.config["members"]]
        self.members = [
            Member(self.folder / each["name"], each["temperature"], each["threshold"], threads)
            for each in self.config["members"]
        ]
        self.tokenizers = None

    def classify(self, texts):
        """Returns an Answer for each text, or pair of texts, one at a time."""
        labels, answers = self.config["labels"], []
        for text in texts:
            logits, number = self.answer(self.encode(text))
            label = (
                [labels[i] for i in np.flatnonzero(logits[0] > 0)] if self.multi_label else labels[logits[0].argmax()]
            )
            margin = self.members[number].measure_margin(logits, self.multi_label)
            answers.append(Answer(label, float(margin), self.names[number]))
        return answers

    def answer(self, inputs):
        """Returns (logits [1, classes] of one text, number of the member that answered).

        `inputs` yields the text's inputs for each member; those of members that don't run are not read.
        """
        last = len(self.members) - 1
        for number, (member, batch) in enumerate(zip(self.members, inputs, strict=False)):  # noqa: B007 - used after it
            logits = member(batch)
            if number == last or member.measure_margin(logits, self.multi_label) >= member.threshold:
                break
        return logits, number

    def encode(self, text):
        """Yields the inputs of a text for each member; members with the same tokenizer share them."""
        if self.tokenizers is None:
            self.tokenizers = self.load_tokenizers()
        encodings = {}
        for tokenizer in self.tokenizers:
            if id(tokenizer) not in encodings:
                encoded = tokenizer.encode(*text) if isinstance(text, (tuple, list)) else tokenizer.encode(text)
                encodings[id(tokenizer)] = {n: np.array([getattr(encoded, f)], np.int64) for n, f in FIELDS.items()}
            yield encodings[id(tokenizer)]

    def load_tokenizers(self):
        """Returns the members' tokenizers, which are one object where their files and their lengths are equal."""
        from tokenizers import Tokenizer

        loaded = {}
        contents = [(member.folder / "tokenizer.json").read_text("utf-8") for member in self.members]
        keys = [(each, member["max_length"]) for each, member in zip(contents, self.config["members"], strict=True)]
        for content, length in keys:
            if (content, length) not in loaded:
                tokenizer = loaded[content, length] = Tokenizer.from_str(content)
                tokenizer.no_padding()
                side = (tokenizer.truncation or {}).get("direction", "right")
                tokenizer.enable_truncation(length, direction=side)
        return [loaded[key] for key in keys]


def compute_probabilities(logits, temperature=1.0, multi_label=False):
    """Returns float64 probabilities of logits [rows, classes]: of the classes, or of each of several labels."""
    scaled = np.asarray(logits, np.float64) / temperature
    if multi_label:
        return 0.5 * (1 + np.tanh(0.5 * scaled))
    powers = np.exp(scaled - scaled.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def measure_margins(probabilities, multi_label=False):
    """Returns how sure each row [rows, classes] is, from 0 to 1.

    It is the difference of the two largest probabilities; with several labels, the smallest difference between the
    probabilities that a label applies and that it doesn't.
    """
    if multi_label:
        return np.abs(2 * probabilities - 1).min(-1)
    best = np.partition(probabilities, -2)[:, -2:]
    return best[:, 1] - best[:, 0]


if __name__ == "__main__":
    cascade = Cascade(Path(__file__).parent)
    for line in (line.rstrip("\n") for line in sys.stdin):
        (prediction,) = cascade.classify([line])
        shown = ", ".join(prediction.label) if cascade.multi_label else prediction.label
        print(f"{shown}\t{prediction.member}\t{line}")
