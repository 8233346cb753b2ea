"""Command lines from frozen dataclasses: flags, YAML, short names, and errors that a person can act on."""

import dataclasses
import difflib
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from compress.errors import ArtefactError, CompressError
from distill.errors import InputError
from pipelines.console import fail

Config = TypeVar("Config")


def parse(
    config_class: type[Config], argv: Sequence[str], *, prog: str, about: str, examples: str, short: Mapping[str, str]
) -> Config:
    """Reads `--config FILE.yaml` and flags into `config_class`; flags win.

    Args:
        config_class: A frozen dataclass, nested ones become `--group.field`.
        argv: Words of the command line.
        prog, about, examples: For `--help`.
        short: Short name -> full name, such as `teacher` -> `teacher.model`; valid in YAML too.

    Raises:
        InputError: A config file that is missing or broken, or a key that isn't known.
        SystemExit: With 2 on a bad flag or a value of another type, with 0 after `--help`.
    """
    listed = ", ".join(f"--{name} for --{full}" for name, full in short.items())
    parser = Parser(
        prog=prog,
        usage=f"python -m {prog} [--config FILE.yaml] [options]",
        description=about,
        epilog=f"short names: {listed}\n\nexamples:\n{examples}",
        formatter_class=PlainHelp,
    )
    parser.add_argument("--config", type=str, default=None, help="YAML file with any of these settings")
    parser.add_class_arguments(config_class, as_group=False)
    fields = leaves(config_class)
    words, file = split_config(switched([full_flag(word, short) for word in argv], fields))
    if file is not None:
        given = read_yaml(file, list(fields), short)
        checked = parser.parse_object(given)  # a default is taken as it is, whatever its type
        parser.set_defaults({name: checked[name] for name in given})
    return made(config_class, parser.parse_args(words))


def made(config_class: type[Config], values: Any, group: str = "") -> Config:
    """The settings of a group, and of the groups in it; an error names the group in full, as the command line does."""
    fields = {
        field.name: made(field.type, values[field.name], f"{group}{field.name}.")  # type: ignore[arg-type]
        if dataclasses.is_dataclass(field.type)
        else values[field.name]
        for field in dataclasses.fields(config_class)  # type: ignore[arg-type]
    }
    try:
        return config_class(**fields)
    except InputError as error:
        owner = str(error).partition(".")[0]  # `train`, of `teacher_train` and `general.train` too
        raise InputError(f"{group[: -len(owner) - 1]}{error}" if group.endswith(f"{owner}.") else str(error)) from None


class PlainHelp(DefaultHelpFormatter):
    """Keeps the line breaks of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in text.splitlines())


class Parser(ArgumentParser):
    """Answers a bad flag with one line and the nearest flag there is."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(unknown.group(1), known, 1, cutoff=0)
            message = f"unknown flag {unknown.group(1)}; the nearest is {near[0]}"
        fail(f"{message} (see python -m {self.prog} --help)")
        sys.exit(2)


def full_flag(word: str, short: Mapping[str, str]) -> str:
    """`--batch-size=8` -> `--train.batch_size=8`."""
    if not word.startswith("--") or word == "--":
        return word
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_")
    return f"--{short.get(name, name)}{equals}{value}"


def switched(words: Sequence[str], fields: Mapping[str, Any]) -> list[str]:
    """What is yes or no needs no value: `--dry_run --output x` -> `--dry_run=true --output x`."""
    return [
        f"{word}=true" if is_switch(fields.get(word.removeprefix("--"))) and after.startswith("--") else word
        for word, after in zip_longest(words, words[1:], fillvalue="--")
    ]


def is_switch(kind: Any) -> bool:
    """Whether a setting's type is yes or no, or one of these and something else."""
    return kind is bool or bool in get_args(kind)


def split_config(words: list[str]) -> tuple[list[str], str | None]:
    """Takes `--config FILE` out of the words."""
    rest: list[str] = []
    file, i = None, 0
    while i < len(words):
        if words[i] == "--config" and i + 1 < len(words):
            file, i = words[i + 1], i + 2
        elif words[i].startswith("--config="):
            file, i = words[i].partition("=")[2], i + 1
        else:
            rest, i = [*rest, words[i]], i + 1
    return rest, file


def leaves(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of every field that holds a value."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(field.type):
            found |= leaves(field.type, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            found[prefix + field.name] = field.type
    return found


def read_yaml(file: str, known: list[str], short: Mapping[str, str]) -> dict[str, Any]:
    """Dotted name -> value of every setting in a YAML file."""
    try:
        content = yaml.safe_load(Path(file).read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"config {file!r}: expected UTF-8, found other bytes: {error}") from error
    except OSError as error:
        raise InputError(f"config {file!r}: can't be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise InputError(f"config {file!r}: not well-formed YAML: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"config {file!r}: expected settings as `name: value`, found {type(content).__name__}")
    flat = flatten(content, short, known)
    for name in flat:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *short], 1, cutoff=0)
            raise InputError(f"config {file!r}: unknown key {name!r}; the nearest is {near[0]!r}")
    return flat


def flatten(
    content: Mapping[str, Any], short: Mapping[str, str], known: Collection[str], prefix: str = ""
) -> dict[str, Any]:
    """Groups within groups as dotted names; a mapping that is itself a setting stays one."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in known:
            flat |= flatten(value, short, known, f"{name}.")
        else:
            flat[short.get(name, name)] = value
    return flat


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Runs a command; bad input ends with exit code 2 and one message instead of a traceback."""
    # stated here and not in the library: a notebook's own settings stay as they are
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Or a product's last bits depend on where in memory its weights lie, and differ between layouts.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    # it is imported wherever it is installed, and warns of every machine without a GPU
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)  # their imports warn about GPU libraries and each other
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        fail("stopped; the same command goes on from here")
        sys.exit(130)
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        fail(message)
        sys.exit(2)


def explain(error: BaseException) -> str | None:
    """The message for an error that a person can mend; None for one that is ours."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, InputError | ArtefactError | CompressError):
            return str(seen)
        where = getattr(seen, "filename", None) or "output"
        if number(seen) in (errno.ENOSPC, errno.EDQUOT):
            return f"{where}: the disk is full; what was complete is kept: make room and run the same command again"
        if number(seen) in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"{where}: no permission to write there; nothing was changed"
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return None


def number(error: BaseException) -> int | None:
    """The system's error number; safetensors and arrow tell it in words alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    told = re.search(r"(?:os error|errno) (\d+)", str(error))
    return int(told.group(1)) if told else None
