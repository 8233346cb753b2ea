"""Inputs of a small run (a teacher and a data set) and the folders of its stages."""

import csv
from pathlib import Path

from transformers import BertTokenizerFast

from support.tiny_models import VOCABULARY, build_model, make_rows, saved


def make_inputs(place: Path) -> tuple[Path, Path]:
    tokenizer = BertTokenizerFast(vocab={word: i for i, word in enumerate(VOCABULARY)}, model_max_length=64)
    teacher = saved(build_model("bert", "Model"), tokenizer, place / "teacher")
    data = place / "data"
    data.mkdir()
    for split, count, seed in (("train", 120, 1), ("test", 40, 2)):
        write_csv(data / f"{split}.csv", make_rows(count, seed))
    return teacher, data


def write_csv(file: Path, rows: list[tuple[str, str]]) -> None:
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([("text", "label"), *rows])


def stage_folder(output: Path, name: str) -> Path:
    (folder,) = (output / name).iterdir()
    return folder
