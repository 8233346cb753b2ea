"""Reads a student without attention with numpy alone, and texts with the tokenizers library.

Stillroom ships this file beside the arrays of such students:

    from reader import Reader

    reader = Reader("student/numpy")
    reader.classify(["Where is my card?"])      # one (answer, logits) for each text
    reader.encode(["Where is my card?"])        # vectors [texts, width] of length 1, if it is a sentence encoder

    echo "Where is my card?" | python reader.py   # in the folder of this file

Tables and linear layers are in float32, or in 8 bits with a scale for each row of a table and each output of a layer.
"""

# mypy: ignore-errors

import json
import sys
from functools import cached_property
from pathlib import Path
from string import punctuation

import numpy as np

MULTIPLIER = 1_000_003  # of the first id in the hash of two
LARGEST = 255  # level of an input of 8 bits
ROWS = 256  # texts at a time
UNPADDED_ROWS = 512  # texts at a time, if none is padded
WORDS = 100_000  # that are remembered with their ids
ID = np.dtype(np.int32)


class Reader:
    """A student in a folder with `config.json`, `weights.npz` and `tokenizer.json`."""

    def __init__(self, folder="."):
        self.folder = Path(folder)
        self.config = json.loads((self.folder / "config.json").read_text("utf-8"))
        with np.load(self.folder / "weights.npz") as stored:
            self.weights = {name: stored[name] for name in stored.files}
        for name in [name for name in self.weights if name.endswith(".weight.scales")]:
            self.weights[name.removesuffix(".scales")] = self.weights[name.removesuffix(".scales")] * self.weights[name]
        self.names = ["input_ids", "attention_mask", "token_type_ids"]

    @cached_property
    def tokenizer(self):
        """The tokenizer of the folder, which pads the rows of a batch."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokenizer.enable_padding(pad_id=self.config.get("pad_token_id") or 0)
        return tokenizer

    @cached_property
    def truncation(self):
        """How the student's texts were truncated: `max_length` in tokens, and `direction`, the side."""
        return {"max_length": 512, "direction": "right"} | (self.tokenizer.truncation or {})

    @cached_property
    def labels(self):
        """The names of the classes."""
        names = self.config["id2label"]
        return [names[str(number)] for number in range(len(names))]

    @cached_property
    def words(self):
        """The ids of words.

        None if the tokenizer doesn't split at blanks, has tokens of several words or removes the beginning of long
        texts, or if tokens aren't pooled one by one.
        """
        stored = json.loads((self.folder / "tokenizer.json").read_text("utf-8"))
        kinds = [(stored.get(part) or {}).get("type") for part in ("normalizer", "pre_tokenizer", "model")]
        splits = kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]
        by_word = splits and not any(" " in token["content"] for token in stored["added_tokens"])
        keeps_start = self.truncation["direction"] == "right"
        return WordIds(self.tokenizer) if by_word and keeps_start and self.pools_tokens else None

    @cached_property
    def pools_tokens(self):
        """Whether a text's features are sums or maxima of the vectors of its tokens, in any order."""
        config = self.config
        is_plain = config["encoder"] == "static" and not config["ngram_buckets"] and not config["pair"]
        return is_plain and "order" not in config["pooling"]

    def classify(self, texts, max_length=None):
        """Returns (answer, logits) for each text or pair of texts, truncated as in training or at `max_length` tokens.

        The answer is the label with the largest logit, all labels with a positive logit if a text may have several, a
        number, or the label of each token that isn't special.
        """
        results = []
        for rows, logits in self.run(texts, max_length):
            results += zip(self.choose_classes(rows, logits), logits, strict=True)
        return results

    def encode(self, texts, max_length=None):
        """Returns a sentence encoder's vectors of length 1 [texts, width]; for `max_length` see `classify`."""
        if not texts:
            return self.encode([""], max_length)[:0]
        return np.concatenate([vectors for _, vectors in self.run(texts, max_length)])

    def run(self, texts, max_length=None):
        """Yields the encodings, if they were needed, and the logits of some texts at a time."""
        max_length = max_length or self.truncation["max_length"]
        self.tokenizer.enable_truncation(max_length, direction=self.truncation["direction"])
        size = ROWS if self.words is None else UNPADDED_ROWS
        for start in range(0, len(texts), size):
            some = texts[start : start + size]
            if self.words is not None:
                yield None, self.finish(self.pool_tokens(*self.words.encode(some, max_length)))
                continue
            rows = self.tokenizer.encode_batch(some)
            inputs = (np.array([getattr(row, name) for row in rows]) for name in ("ids", "attention_mask", "type_ids"))
            yield rows, self.compute_logits(*inputs)

    def choose_classes(self, rows, logits):
        """Returns what the logits of texts mean, see `classify`."""
        labels, problem = self.labels, self.config.get("problem_type")
        if logits[0].ndim == 2:
            classes = zip(rows, logits.argmax(-1), strict=True)
            return [
                [labels[predicted[i]] for i, special in enumerate(row.special_tokens_mask) if not special]
                for row, predicted in classes
            ]
        if problem == "regression" or len(labels) == 1:
            return logits[:, 0].tolist()
        if problem == "multi_label_classification":
            return [[labels[label] for label in np.flatnonzero(row > 0)] for row in logits]
        return [labels[label] for label in logits.argmax(-1).tolist()]

    def __call__(self, inputs):
        """Returns the logits of a batch of named inputs."""
        return self.compute_logits(*(inputs[name] for name in self.names))

    def compute_logits(self, ids, mask, types=None):
        """Returns float32 [rows, labels] for inputs [rows, length].

        A tagger's are [rows, length, labels]; a sentence encoder's are vectors [rows, width].
        """
        ids, mask = np.asarray(ids), np.asarray(mask)
        counts = mask.sum(1)
        if self.pools_tokens and counts.all():
            return self.finish(self.pool_tokens(ids[mask > 0], counts))
        counted = mask.astype(np.float32)[..., None]
        vectors = ENCODERS[self.config["encoder"]](self, self.look_up("words", ids), counted)
        if "classifier.weight" in self.weights and "dense.weight" not in self.weights:
            return self.apply_linear("classifier", vectors)
        return self.finish(self.pool(ids, vectors, counted, types))

    def finish(self, pooled):
        """Returns the logits, or the vectors of length 1, of texts with these features."""
        if "classifier.weight" not in self.weights:
            return pooled / np.maximum(np.linalg.norm(pooled, axis=-1, keepdims=True), np.float32(1e-12))
        return self.apply_linear("classifier", np.maximum(self.apply_linear("dense", pooled), 0))

    @cached_property
    def shares(self):
        """The learned weight of each token [tokens, 1]."""
        return np.exp(self.weights["importance"])

    @cached_property
    def weighted_words(self):
        """The table whose rows, times the factors if there are any, are the weighted vectors of tokens."""
        words, scales = self.weights["words"], self.weights.get("words.scales")
        return (words * self.shares, None) if scales is None else (words, scales * self.shares)

    def pool_tokens(self, ids, counts):
        """Returns the features of each row [rows, features x kinds].

        The longest rows come first, so that the rows which have a token at a place are neighbors: nothing is padded.

        Args:
            ids: Ids of all rows in turn [tokens].
            counts: Number of each row's, at least 1 [rows].
        """
        kinds, width = self.config["pooling"], self.weights["words"].shape[1]
        order = np.argsort(-counts, kind="stable")
        starts, lengths = (np.cumsum(counts) - counts)[order], counts[order]
        pooled = {kind: np.zeros((len(counts), width), np.float32) for kind in kinds}
        totals = np.zeros((len(counts), 1), np.float32)
        remaining = np.searchsorted(-lengths, -np.arange(lengths[0]), side="left")
        for position, rows in enumerate(remaining.tolist()):
            tokens = ids[starts[:rows] + position]
            vectors = None if kinds == ["weighted"] else self.look_up("words", tokens)
            if "mean" in kinds:
                pooled["mean"][:rows] += vectors
            if "max" in kinds:
                highest = pooled["max"][:rows]
                np.maximum(highest, vectors, out=highest) if position else np.copyto(highest, vectors)
            if "weighted" in kinds:
                shares = self.shares[tokens]
                weighted = take_rows(*self.weighted_words, tokens) if vectors is None else vectors * shares
                pooled["weighted"][:rows] += weighted
                totals[:rows] += shares
        if "mean" in kinds:
            pooled["mean"] /= lengths[:, None]
        if "weighted" in kinds:
            pooled["weighted"] /= np.maximum(totals, np.float32(1e-6))
        result = np.empty((len(counts), len(kinds) * width), np.float32)
        result[order] = np.concatenate([pooled[kind] for kind in kinds], 1)
        return result

    def look_up(self, name, ids):
        """Returns rows of a table; of one in 8 bits, these alone become floats."""
        return take_rows(self.weights[name], self.weights.get(f"{name}.scales"), ids)

    def apply_linear(self, name, x):
        """Returns a linear layer's outputs; its weight is [inputs, outputs], and its inputs may be rounded to bytes."""
        if f"{name}.grid" in self.weights:
            scale, zero = self.weights[f"{name}.grid"]
            x = x / scale
            np.clip(np.round(x, out=x), -zero, LARGEST - zero, out=x)
            x *= scale
        return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def pool(self, ids, vectors, counted, types):
        """Returns the features of each row, [rows, features]."""
        second = np.zeros_like(counted) if types is None else np.asarray(types, np.float32)[..., None]
        buckets = self.config["ngram_buckets"]
        if buckets:
            hashed = (ids[:, :-1].astype(np.int64) * MULTIPLIER + ids[:, 1:]) % buckets
            ids = np.concatenate([ids, hashed + self.config["vocab_size"]], 1)
            vectors = np.concatenate([vectors, self.look_up("ngrams", hashed)], 1)
            counted = np.concatenate([counted, counted[:, 1:] * counted[:, :-1]], 1)
            second = np.concatenate([second, second[:, 1:]], 1)
        shares = counted
        if "importance" in self.weights:
            shares = counted * np.exp(self.weights["importance"][ids])
        elif "importance.weight" in self.weights:
            shares = counted * np.exp(self.apply_linear("importance", vectors))
        if not self.config["pair"]:
            return self.pool_rows(vectors, counted, shares)
        one, two = (self.pool_rows(vectors, counted * each, shares * each) for each in (1 - second, second))
        return np.concatenate([one, two, np.abs(one - two), one * two], 1)

    def pool_rows(self, vectors, counted, shares):
        """Returns the results of all kinds of pooling, [rows, features x kinds]."""
        pooled = []
        for kind in self.config["pooling"]:
            if kind == "max":
                pooled.append(np.where(counted == 0, np.float32(-1e4), vectors).max(1))
            elif kind == "order":
                scales = self.weights["scales"]
                first = (vectors * counted)[:, : len(scales)]
                pooled.append((first * scales[: first.shape[1]]).sum(1))
            else:
                share = counted if kind == "mean" else shares
                total = np.maximum(share.sum(1), np.float32(1e-6))
                pooled.append(np.matmul(share.transpose(0, 2, 1), vectors)[:, 0] / total)
        return np.concatenate(pooled, 1)


def take_rows(table, factors, ids):
    """Returns rows of a table, each times its factor; without factors, the rows as they are."""
    rows = table.take(ids, 0)
    return rows if factors is None else rows * factors[ids]


class WordIds(dict):
    """Word -> the bytes of its ids, for tokenizers that treat every word between two blanks alone.

    Args:
        tokenizer: Such a tokenizer: BERT's.
    """

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        special = {letter for token in self.tokenizer.get_added_tokens_decoder().values() for letter in token.content}
        self.marks = "".join({*punctuation} - special)
        whole, bare = self.tokenizer.encode("a").ids, self.split("a")
        first = whole.index(bare[0])
        self.before, self.after = (pack_ids(ids) for ids in (whole[:first], whole[first + len(bare) :]))

    def split(self, word):
        """Returns the ids of a word."""
        return self.tokenizer.encode(word, add_special_tokens=False).ids

    def __missing__(self, word):
        base = word.rstrip(self.marks)
        if 1 < len(word) > len(base):  # a mark is a token of its own, so that `card?` is `card` and `?`
            packed = b"".join(self[part] for part in ([base] if base else []) + list(word[len(base) :]))
        else:
            packed = pack_ids(self.split(word))
        if len(self) < WORDS:
            self[word] = packed
        return packed

    def encode(self, texts, max_length):
        """Returns the ids of all texts in turn [tokens], with special tokens, and the number of each text's [texts]."""
        limit, find = ID.itemsize * max_length - len(self.after), self.__getitem__
        rows = [b"".join([self.before, *map(find, text.split(" "))])[:limit] + self.after for text in texts]
        return np.frombuffer(b"".join(rows), ID), np.array([len(row) for row in rows]) // ID.itemsize


def pack_ids(ids):
    """Returns the bytes of ids, which are faster to join than lists."""
    return np.array(ids, ID).tobytes()


def keep_vectors(reader, vectors, counted):
    """Returns the vectors of the table."""
    return vectors


def convolve(reader, vectors, counted):
    """Returns vectors after residual convolutions, [rows, length, features]."""
    hidden = reader.apply_linear("widen", vectors)
    size, length = reader.config["kernel_size"], vectors.shape[1]
    before = (size - 1) // 2
    for layer in range(reader.config["encoder_layers"]):
        padded = np.pad(hidden * counted, ((0, 0), (before, size - 1 - before), (0, 0)))
        windows = np.concatenate([padded[:, i : i + length] for i in range(size)], -1)
        hidden = hidden + np.maximum(reader.apply_linear(f"convolution.{layer}", windows), 0)
    return hidden


def recur(reader, vectors, counted):
    """Returns vectors after gated recurrent layers in both directions, [rows, length, features]."""
    length, hidden = vectors.shape[1], vectors
    positions, last = np.arange(length)[None], counted.sum((1, 2)).astype(np.int64)[:, None] - 1
    reverse = np.where(positions <= last, last - positions, positions)[..., None]
    for layer in range(reader.config["encoder_layers"]):
        forward = run_gates(reader, f"forward.{layer}", hidden)
        backward = run_gates(reader, f"backward.{layer}", np.take_along_axis(hidden, reverse, 1))
        hidden = np.concatenate([forward, np.take_along_axis(backward, reverse, 1)], -1)
    return hidden


def run_gates(reader, name, vectors):
    """Returns the states of a gated recurrent layer, [rows, length, width] (torch.nn.GRU's equations)."""
    inputs = reader.apply_linear(f"{name}.input", vectors)
    state = np.zeros((len(vectors), inputs.shape[-1] // 3), np.float32)
    states = []
    for step in range(vectors.shape[1]):
        recurrent = np.split(reader.apply_linear(f"{name}.state", state), 3, -1)
        new = np.split(inputs[:, step], 3, -1)
        reset, update = (1 / (1 + np.exp(-(one + other))) for one, other in zip(new[:2], recurrent[:2], strict=True))
        state = (1 - update) * np.tanh(new[2] + reset * recurrent[2]) + update * state
        states.append(state)
    return np.stack(states, 1)


ENCODERS = {"static": keep_vectors, "cnn": convolve, "gru": recur}

if __name__ == "__main__":
    lines, reader = [line.rstrip("\n") for line in sys.stdin], Reader(Path(__file__).parent)
    encodes = "classifier.weight" not in reader.weights
    results = reader.encode(lines) if encodes else [prediction for prediction, _ in reader.classify(lines)]
    for line, result in zip(lines, results, strict=True):
        values = map(str, result) if isinstance(result, (list, np.ndarray)) else [str(result)]
        print(f"{' '.join(values)}\t{line}")
