"""Plain sentences to train on, and pairs with a number each to measure on."""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from distill.data.cells import a_number
from distill.data.columns import LABEL, PAIR, SCORE, find_columns, first_of
from distill.data.config import DataConfig
from distill.data.encode import IGNORED, Encoded, encode
from distill.data.files import format_of, read_utf8, split_of
from distill.data.source import READERS, check_single, read_splits, read_table
from distill.data.splits import Examples, Named, Splits, by_strata, clean, hold, overlap, strings
from distill.errors import InputError

NUMBER = (*SCORE, *LABEL)
LINES = "train.txt"


def load_sentences(config: DataConfig, seed: int = 0) -> Splits:
    """Reads every sentence of train, without labels, and the pairs of validation and test with their numbers.

    Of a table of pairs both texts are sentences; of a txt file (`train.txt` in a folder, or `config.unlabelled`) every
    line is one. A sentence that was there before is dropped and counted. Where there is no validation or test split,
    pairs of train are held out, and their sentences are not trained on.

    Args:
        config: What to read; `label` is the column with the number.
        seed: Seed of the pairs that are held out.

    Raises:
        InputError: No pairs with numbers to measure on, a cell that is no number, or no text to train on.
    """
    if not config.path:
        raise InputError("data: no path given; name a folder, a file or a hub data set with --data")
    tables = read_parts(config)
    absent = [split for split in ("validation", "test") if split not in tables]
    measured = {split: table for split, table in tables.items() if split != "train" or absent}
    pairs = {split: pairs_of(table, config, split, absent) for split, table in measured.items()}
    notes: dict[str, int | str] = {}
    hold(pairs, notes, config, by_strata(seed, lambda part: [""] * len(part.texts)))
    validation, test = (examples(pairs[split]) for split in ("validation", "test"))
    held = {text for split in absent for text in both(examples(pairs[split]))}
    found = sentences(tables["train"], config, f"data {config.path!r}, train")
    dropped = Counter(dropped_empty=sum(pairs[split].dropped for split in ("validation", "test") if split in tables))
    seen: set[str] = set()
    train, unlabelled = (new(texts, held, seen, dropped) for texts in (found, unlabelled_sentences(config)))
    if not train:
        raise InputError(f"data {config.path!r}, train: expected sentences that aren't held out, found none")
    notes |= {name: dropped[name] for name in ("dropped_empty", "dropped_duplicates", "dropped_held_out")}
    notes["test_texts_also_in_train"] = overlap(Examples(both(test), None), Examples(train, None))
    return Splits((), Examples(train, None), validation, test, Examples(unlabelled, None), notes)


def load_bare_sentences(config: DataConfig) -> Examples:
    """Every training sentence, held out later or not, and the unlabelled ones, each once."""
    texts = sentences(read_parts(config)["train"], config, f"data {config.path!r}, train")
    return Examples(new([*texts, *unlabelled_sentences(config)], set(), set(), Counter()), None)


def read_parts(config: DataConfig) -> dict[str, pa.Table]:
    """A table a split, as `read_splits`; a folder's train may be a txt file of lines."""
    folder = Path(config.path).expanduser()
    if not (folder / LINES).is_file():
        return read_splits(config.path, config.subset)
    files = part_files(folder)
    tables = {split: read_table(file) for split, file in files.items() if format_of(file) in READERS}
    return {"train": pa.table({"text": lines_of(files["train"])})} | tables


def part_files(folder: Path) -> dict[str, Path]:
    """The file of each split in a folder with `train.txt`.

    Raises:
        InputError: Two files of one split.
    """
    found: dict[str, list[Path]] = {"train": [folder / LINES]}
    for file in sorted(folder.iterdir()):
        split = split_of(file)
        if split and format_of(file) in READERS:
            found.setdefault(split, []).append(file)
    for split, files in found.items():
        check_single(split, files)
    return {split: files[0] for split, files in found.items()}


def lines_of(file: Path) -> list[str]:
    return read_utf8(file).split("\n")


def pairs_of(table: pa.Table, config: DataConfig, split: str, absent: Sequence[str]) -> Named:
    """The rows of a split as pairs with numbers; `absent` splits are to be held out of it where it is train."""
    where = f"data {config.path!r}, {split}"
    pair = config.text_pair or first_of(table, PAIR)
    number = config.label or first_of(table, NUMBER)
    if pair is None or number is None:
        what = f"no {' and no '.join(absent)} split, and none " if split == "train" else "none "
        raise InputError(
            f"{where}: expected pairs of texts with a number each, found {what}among the columns "
            f"{', '.join(table.column_names)}: no student could be measured; add them, or name the columns with "
            "--data.text_pair and --data.label"
        )
    return clean(table, replace(config, text_pair=pair, label=number), split, a_number)


def examples(part: Named) -> Examples:
    return Examples(part.texts, part.pairs, [float(number) for number in part.labels])


def both(part: Examples) -> list[str]:
    """The texts of all pairs, the two of each one after the other."""
    return [text for pair in zip(part.texts, part.pairs or [], strict=True) for text in pair]


def sentences(table: pa.Table, config: DataConfig, where: str) -> list[str]:
    """Every text of a table, row by row, empty ones too."""
    pair = config.text_pair if config.text_pair in table.column_names else None
    columns = find_columns(table, replace(config, text_pair=pair), where, labelled=False)
    firsts = strings(table, columns.text)
    rows = zip(firsts, strings(table, columns.text_pair), strict=True) if columns.text_pair else zip(firsts)
    return [text for row in rows for text in row]


def unlabelled_sentences(config: DataConfig) -> list[str]:
    if config.unlabelled is None:
        return []
    file = Path(config.unlabelled).expanduser()
    table = pa.table({"text": lines_of(file)}) if format_of(file) == ".txt" else read_table(file)
    return sentences(table, config, f"unlabelled text {config.unlabelled!r}")


def new(texts: Sequence[str], held: AbstractSet[str], seen: set[str], dropped: Counter[str]) -> list[str]:
    """Texts that are neither held out nor among those `seen`, to which they are added; the others are counted."""
    kept = []
    for text in texts:
        if not text:
            dropped["dropped_empty"] += 1
        elif text in held:
            dropped["dropped_held_out"] += 1
        elif text in seen:
            dropped["dropped_duplicates"] += 1
        else:
            kept.append(text)
            seen.add(text)
    return kept


def encode_sentences(tokenizer: PreTrainedTokenizerBase, part: Examples, max_length: int) -> Encoded:
    """A row a text: of pairs two rows, one after the other.

    A pair is put together again by its label alone, so its rows may come in any batch and on any process: `labels`
    [rows, 2] are the number of a row's pair and what the data says of it, IGNORED for both where a text stands alone.
    """
    if part.pairs is None:
        return encode(tokenizer, Examples(part.texts, None, [[IGNORED, IGNORED]] * len(part)), max_length)
    labels = [[i, number] for i, number in enumerate(part.labels) for _ in range(2)]
    return encode(tokenizer, Examples(both(part), None, labels), max_length)
