"""Cleaning that a tokenizer applies itself, so that libraries that don't read preprocessing.json clean texts too."""

import json
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from distill.data.clean.config import CleaningStep
from distill.data.clean.text_steps import INVISIBLE

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
Normalizer = dict[str, Any]  # as in tokenizer.json


def find_expressible_steps(steps: Sequence[CleaningStep]) -> tuple[CleaningStep, ...]:
    """Returns the last of the steps that a tokenizer can apply: those after which no other step follows."""
    first = len(steps)
    while first and _can_express(steps[first - 1]):
        first -= 1
    return tuple(steps[first:])


def _can_express(step: CleaningStep) -> bool:
    return step.name in ("unicode", "case") or step == CleaningStep("whitespace", "all")


def build_normalizers(steps: Sequence[CleaningStep]) -> list[Normalizer]:
    """Returns the normalizers of the `tokenizers` library that do what the steps do, in order.

    Lower case is that of each letter on its own, so a capital sigma at the end of a word becomes σ and not ς.
    """
    normalizers: list[Normalizer] = []
    for step in steps:
        if step.name == "unicode":
            normalizers.append({"type": step.value.upper()})
        elif step.name == "case":
            normalizers.append({"type": "Lowercase"})
        else:
            blank = list_blanks()
            others = blank.replace(r"\x{20}", "", 1)
            normalizers += [
                _replace(f"[{''.join(_escape(code) for code in INVISIBLE)}]", ""),
                _replace(f"[{blank}]{{3,}}|[{others}][{blank}]?|[{blank}][{others}]", " "),
                _replace(f"^[{blank}]+|[{blank}]+$", ""),
            ]
    return normalizers


def add_normalizers(folder: Path, steps: Sequence[CleaningStep]) -> bool:
    """Puts the steps before the normalizer of the folder's tokenizer.json; returns whether there are any and a file.

    Files are replaced and not changed, since they may be links to others. The folder's tokenizer gets the general class
    of fast tokenizers, because classes of single families, such as BERT's, build a normalizer of their own.
    """
    file, expressible = folder / TOKENIZER, find_expressible_steps(steps)
    if not expressible or not file.exists():
        return False
    content = json.loads(file.read_text("utf-8"))
    existing = content.get("normalizer")
    later = existing["normalizers"] if existing and existing["type"] == "Sequence" else [existing] if existing else []
    content["normalizer"] = {"type": "Sequence", "normalizers": [*build_normalizers(expressible), *later]}
    settings = folder / SETTINGS
    if settings.exists():
        names = AutoTokenizer.from_pretrained(folder).model_input_names
        general = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
        _replace_file(settings, json.loads(settings.read_text("utf-8")) | general)
    _replace_file(file, content)
    return True


def _replace_file(file: Path, content: object) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(content, ensure_ascii=False, indent=2), "utf-8")
    fresh.replace(file)


def _replace(pattern: str, content: str) -> Normalizer:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _escape(code: int) -> str:
    return rf"\x{{{code:x}}}"


@cache
def list_blanks() -> str:
    """Returns what Python takes for blanks as the inside of a class of characters; other engines differ in a few."""
    blanks = re.findall(r"\s", "".join(map(chr, range(sys.maxunicode + 1))))
    return "".join(_escape(ord(blank)) for blank in blanks)
