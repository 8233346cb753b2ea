"""Inputs of a small run (a teacher and a data set) and the folders of its stages."""

import csv
from pathlib import Path

from support.tiny_models import build_model, make_rows, saved, word_tokenizer


def make_inputs(folder: Path) -> tuple[Path, Path]:
    tokenizer = word_tokenizer()
    return saved(build_model("bert", "Model"), tokenizer, folder / "teacher"), write_data(folder / "data")


def make_classifier_inputs(folder: Path, neurons: int = 512) -> tuple[Path, Path]:
    """Returns a classifier whose neurons make most of its latency if there are many, and data: `model/`, `data/`."""
    tokenizer = word_tokenizer()
    return saved(build_model("bert", intermediate_size=neurons), tokenizer, folder / "model"), write_data(
        folder / "data"
    )


def write_data(folder: Path) -> Path:
    folder.mkdir()
    for split, count, seed in (("train", 120, 1), ("test", 40, 2)):
        write_csv(folder / f"{split}.csv", make_rows(count, seed))
    return folder


def write_csv(file: Path, rows: list[tuple[str, str]]) -> None:
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([("text", "label"), *rows])


def stage_folder(output: Path, name: str) -> Path:
    (folder,) = (output / name).iterdir()
    return folder
