"""Ways to break a checkpoint's folder: each function takes a folder and changes its files."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.tiny_models import VOCABULARY

Break = Callable[[Path], None]
NOBODY = 65534


def config_text(text: str) -> Break:
    return lambda folder: (folder / "config.json").write_text(text) and None


def config_with(**changes: Any) -> Break:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def weights(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], name: str = "model.safetensors") -> Break:
    def rewrite(folder: Path) -> None:
        file = folder / name
        save_file(change({key: value.clone() for key, value in load_file(file).items()}), file, {"format": "pt"})

    return rewrite


def without(*parts: str) -> Break:
    """Removes every weight whose name contains one of these parts."""
    return weights(
        lambda tensors: {key: value for key, value in tensors.items() if not any(part in key for part in parts)}
    )


def renamed(old: str, new: str) -> Break:
    return weights(lambda tensors: {key.replace(old, new): value for key, value in tensors.items()})


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Break:
    """Applies `change` to the weights whose names contain this part."""
    return weights(lambda tensors: {key: change(value) if part in key else value for key, value in tensors.items()})


def added(name: str, value: Tensor) -> Break:
    return weights(lambda tensors: tensors | {name: value})


def with_number(value: float) -> Callable[[Tensor], Tensor]:
    def put(tensor: Tensor) -> Tensor:
        tensor.flatten()[3] = value
        return tensor

    return put


def files(**contents: str | None) -> Break:
    """Writes files with the given text; dots in names are written as `__`, and None removes a file."""

    def write(folder: Path) -> None:
        for name, text in contents.items():
            file = folder / name.replace("__", ".")
            if text is None:
                file.unlink(missing_ok=True)
            else:
                file.write_text(text)

    return write


def in_shards(change: Callable[[dict[str, Any]], object] = lambda index: None) -> Break:
    """Splits the weights into two files and an index, which `change` modifies."""

    def split(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, names_in_file in parts.items():
            save_file({name: tensors[name] for name in names_in_file}, folder / file, {"format": "pt"})
        index = {
            "metadata": {},
            "weight_map": {name: file for file, names_in_file in parts.items() for name in names_in_file},
        }
        change(index)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return split


def all_of(*breaks: Break) -> Break:
    def each(folder: Path) -> None:
        for one in breaks:
            one(folder)

    return each


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        (folder / name).unlink(missing_ok=True)


def slow_tokenizer(folder: Path) -> None:
    no_tokenizer(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
    about = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "basic", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def positions(count: int) -> Break:
    """Truncates the model to its first `count` positions and gives the tokenizer a higher limit."""
    return all_of(
        config_with(max_position_embeddings=count),
        changed("position_embeddings", lambda table: table[:count].clone()),
        longest_text(512),
    )


def longest_text(tokens: int) -> Break:
    def write(folder: Path) -> None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": tokens}))

    return write


@contextmanager
def as_nobody() -> Iterator[None]:
    """Enforces file permissions: root, who may read everything, becomes another user within the context."""
    import_module("pipelines.stages.cache.job")  # numba looks for a cache folder when it is imported
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def half(tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) // 2].clone()


def to_integers(tensor: Tensor) -> Tensor:
    return (tensor * 100).to(torch.int8)
