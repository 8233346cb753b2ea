"""Command lines from frozen dataclasses: flags, YAML files, short names and error messages."""

import dataclasses
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from jsonargparse import SUPPRESS, ArgumentParser, DefaultHelpFormatter, Namespace

from compress.errors import CompressError, ExportError, TimingError, VerificationError
from distill.errors import InputError
from pipelines.runs import stops
from pipelines.runs.console import print_error
from pipelines.settings.command_line import CONFIG_OPTION, split_arguments
from pipelines.settings.values import expand_home, settle_value
from pipelines.settings.yaml_file import read_yaml

_Config = TypeVar("_Config")
# Logger -> harmless warning that it logs on import, such as on machines without a GPU; other records pass.
KNOWN_WARNINGS = {
    "DeepSpeed": "Setting accelerator to CPU",
    "torchao": "Failed to load",
    "torchao.kernel.intmm": "Detected no triton",
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
}


def parse(
    config_class: type[_Config],
    argv: Sequence[str],
    *,
    prog: str,
    about: str,
    examples: str,
    short: Mapping[str, str],
    command: str = "",
) -> _Config:
    """Returns an instance of `config_class` with the values of the YAML files and flags.

    Every `--config FILE.yaml` is read in order, then the flags; later values override earlier ones.

    Args:
        config_class: A frozen dataclass; fields of nested dataclasses become `--group.field`.
        argv: Command-line arguments.
        prog: Name of the program, shown by `--help`.
        about: What the program does, shown by `--help`.
        examples: Example command lines, shown by `--help`.
        short: Short name -> full name, such as `teacher` -> `teacher.model`; also valid in YAML.
        command: What follows the options, shown by `--help`.

    Raises:
        InputError: A config file is missing or malformed; a key or flag is unknown, occurs twice or has no value; or
            a value isn't allowed for its setting.
        SystemExit: A value has the wrong type (exit code 2), or the arguments contain `--help` (exit code 0).
    """
    fields = list_settings(config_class)
    arguments, files = split_arguments(argv, fields, short, prog)
    from_files = _merge_files(files, fields, short)
    build = build_parser.__wrapped__ if from_files else build_parser  # the help of one with files shows their values
    parser = build(
        cast(type, config_class), prog=prog, about=about, examples=examples, short=tuple(short.items()), command=command
    )
    # Without defaults: the classes have them, and the parser would check each of hundreds.
    checked = parser.parse_object(from_files, defaults=False) if from_files else None
    if checked is not None:
        parser.set_defaults({name: checked[name] for name in from_files})
    config: _Config = build_config(config_class, parser.parse_args(arguments, checked, defaults=False))
    return config


def read_files(config_class: type, argv: Sequence[str], *, prog: str, short: Mapping[str, str]) -> dict[str, object]:
    """Returns dotted name -> value of every setting in the YAML files that the arguments name.

    Raises:
        InputError: As in `parse`.
    """
    fields = list_settings(config_class)
    _, files = split_arguments(argv, fields, short, prog)
    return _merge_files(files, fields, short)


def _merge_files(files: Sequence[str], fields: Mapping[str, object], short: Mapping[str, str]) -> dict[str, object]:
    """Returns the settings in YAML files; later files override earlier ones."""
    values: dict[str, object] = {}
    for file in files:
        values |= read_yaml(expand_home(f"--{CONFIG_OPTION}", file), fields, short)
    return values


@cache
def build_parser(
    config_class: type, *, prog: str, about: str, examples: str, short: tuple[tuple[str, str], ...], command: str = ""
) -> "Parser":
    """Returns a parser that knows the types of all settings and formats the help; built once for each command."""
    short_names = ", ".join(f"--{name} for --{full}" for name, full in short)
    notes = [f"short names: {short_names}"] if short else []
    notes += ["Hyphens and underscores are interchangeable; a boolean flag alone means true.", f"examples:\n{examples}"]
    parser = Parser(
        prog=prog,
        usage=f"python -m {prog} [--{CONFIG_OPTION} FILE.yaml] [options] {command}".rstrip(),
        description=about,
        epilog="\n\n".join(notes),
        formatter_class=HelpFormatter,
    )
    config_help = "YAML file, or recipe:NAME; later files override earlier ones, and flags override files"
    parser.add_argument(f"--{CONFIG_OPTION}", type=str, default=None, help=config_help)
    parser.add_class_arguments(config_class, as_group=False)
    groups = {name.rpartition(".")[0] for name in list_settings(config_class)}
    for action in parser._actions:
        if action.dest in groups:  # `--loss FILE.yaml` of jsonargparse: here files are read by --config alone
            action.help = SUPPRESS
    return parser


def build_config(defaults: Any, values: Namespace, group: str = "") -> Any:
    """Returns an instance of the dataclass of a group, including nested groups.

    Args:
        defaults: The dataclass, or an instance whose values apply where `values` has none.
        values: Dotted name of a setting -> its value.
        group: Prefix of the group's settings, such as `general.loss.`.

    Raises:
        InputError: A value isn't allowed; the message names the setting in full, as on the command line.
    """
    config_class = defaults if isinstance(defaults, type) else type(defaults)
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        name, default = group + field.name, find_default(defaults, field)
        if dataclasses.is_dataclass(field.type):
            settings[field.name] = build_config(default, values, f"{name}.")
        else:
            settings[field.name] = settle_value(name, values.get(name, default))
    try:
        return config_class(**settings)
    except InputError as error:
        raise InputError(qualify_setting(str(error), group)) from None


def find_default(config: Any, field: dataclasses.Field[Any]) -> Any:
    """Returns the default value of a field of a dataclass, or the value that an instance has."""
    if not isinstance(config, type):
        return getattr(config, field.name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def qualify_setting(message: str, group: str) -> str:
    """Replaces a setting's name in a message: `loss.kl: …` -> `general.loss.kl: …` in the group `general.loss.`."""
    owner = re.match(r"\w*", message)[0]  # type: ignore[index]  # `train`, of `teacher_train` and `general.train` too
    if not owner or not group.endswith(f"{owner}."):
        return message
    return re.sub(rf"(?<![\w.]){owner}(?=[.:])", group[:-1], message)


class HelpFormatter(DefaultHelpFormatter):
    """Help formatter that preserves the line breaks of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in text.splitlines())


class Parser(ArgumentParser):
    """Argument parser that reports a value of the wrong type as a single message."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the message with a hint at the help, and exits with code 2."""
        print_error(f"{message} (see python -m {self.prog} --help)")
        sys.exit(2)


def list_settings(config_class: type, prefix: str = "") -> dict[str, object]:
    """Returns dotted name -> type of every field that isn't a nested dataclass."""
    types: dict[str, object] = {}
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(field.type):
            types |= list_settings(field.type, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            types[prefix + field.name] = field.type
    return types


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Runs a command; invalid input exits with code 2 and a message instead of a traceback."""
    # set here and not in the library, so that a notebook's own settings are unaffected
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # no command forks a process that tokenizes
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # in a file, libraries' bars would end in the middle of a line
    # Otherwise the last bits of a product depend on the memory alignment of its weights, and differ between layouts.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    for name, text in KNOWN_WARNINGS.items():
        logging.getLogger(name).addFilter(_filter_records(text))
    try:
        with exit_on_invalid_input(), stops.watch_signals():
            main(sys.argv[1:])
    except KeyboardInterrupt:
        print_error("stopped; run the same command again to resume")
        sys.exit(130)


@contextmanager
def exit_on_invalid_input() -> Iterator[None]:
    """Prints an error that the user can fix, without a traceback, and exits with code 2."""
    try:
        yield
    except Exception as error:
        message = describe_error(error)
        if message is None:
            raise
        print_error(message)
        sys.exit(2)


def _filter_records(text: str) -> Callable[[logging.LogRecord], bool]:
    """Returns a filter that drops log records that contain this text."""
    return lambda record: text not in record.getMessage()


def describe_error(error: BaseException) -> str | None:
    """Returns the message for an error that the user can fix; None for any other error."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, InputError | ExportError | CompressError | TimingError | VerificationError):
            return str(current)
        message = _describe_system_error(current)
        if message is not None:
            return message
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return None


def _describe_system_error(error: BaseException) -> str | None:
    """Returns the message for a full disk or a missing permission; None for any other error."""
    number, file = _find_error_number(error), getattr(error, "filename", None)
    path = file or "output"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}: the disk is full; finished stages are kept: free some space and run the same command again"
    if number == errno.EROFS:
        return f"{path}: no permission to write there; finished stages are kept"
    if number not in (errno.EACCES, errno.EPERM):
        return None
    if file is None:  # safetensors and arrow describe the failure in words
        return f"no permission: {str(error).splitlines()[0]}; finished stages are kept"
    operation = "read it" if is_unreadable(Path(str(path))) else "write there"
    return f"{path}: no permission to {operation}; finished stages are kept"


def is_unreadable(path: Path) -> bool:
    """Returns whether a path, or its closest visible parent, exists and this user may not read it."""
    for each in (path, *path.parents):
        try:
            each.lstat()
        except OSError:
            continue  # a parent folder decides whether it can be accessed
        effective = os.access in os.supports_effective_ids
        return not os.access(each, os.R_OK | os.X_OK if each.is_dir() else os.R_OK, effective_ids=effective)
    return False


def _find_error_number(error: BaseException) -> int | None:
    """Returns the system's error number; safetensors and arrow give it only in the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"(?:os error|errno) (\d+)", str(error))
    return int(match.group(1)) if match else None
