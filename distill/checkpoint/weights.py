"""Checks that a checkpoint's files contain the weights of the model in its config, based on the loader's report."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from distill.checkpoint.config import in_one_line, load_config
from distill.checkpoint.headers import Header, read_headers
from distill.errors import InputError

SHOWN = 4  # maximum number of weight names in an error message
POOLER = "pooler"
COUNTS = ("position_ids", "token_type_ids", "num_batches_tracked")  # buffers in old files
MASKS = ("attn.bias", "attention.bias")  # byte masks in files of the first GPT models
LIBRARY = "transformers.modeling_utils"
# Log messages whose content is in `Report`.
SUPPRESSED_LOGS = ("LOAD REPORT", "The tied weights mapping for this model")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """The loading report of `from_pretrained` for a model's weights, by their names in the model.

    Args:
        model: Name of the model's class.
        head_missing: Missing weights of the head, and of the pooler if the files have none of it.
        head_reshaped: (name, shape in the files, shape in the model) of the head's weights with another shape.
        head_absent: Whether the files have no weight of the head.
        left_over: Unexpected weights in the files, outside the model's body.
        problems: Problems with the weights of the body, as text.
    """

    model: str
    head_missing: tuple[str, ...]
    head_reshaped: tuple[tuple[str, list[int], list[int]], ...]
    head_absent: bool
    left_over: tuple[str, ...]
    problems: tuple[str, ...]

    def check(self, folder: Path | str, role: str, *, new_head: bool = False) -> None:
        """Checks that all weights were loaded.

        Args:
            new_head: Whether the head will be newly initialized: it may be missing or have another shape.

        Raises:
            InputError: Weights are missing or have another shape, or the files have unexpected weights in the body.
        """
        problems = list(self.problems)
        if not new_head:
            problems += missing_text(self.head_missing) + reshaped_text(self.head_reshaped)
        if problems:
            others = f"; {names_text(self.left_over)} in the files belong to nothing" if self.left_over else ""
            raise InputError(
                f"{role} {str(folder)!r}: expected the weights of a {self.model} as config.json describes it, found "
                f"{'; '.join(problems)}{others}: it would compute with random numbers in their place"
            )


def load_model(auto: Any, folder: Path | str, *, role: str = "model", new_head: bool = False, **settings: Any) -> Any:
    """Loads a model with `auto.from_pretrained` and checks the loading report, so that no weight is silently
    initialized at random.

    Args:
        auto: An auto class of transformers, or a class with a compatible `from_pretrained`.
        folder: A local checkpoint in safetensors.
        role: Role of the model in the command, for error messages.
        new_head: Whether the head will be newly initialized, see `Report.check`.
        settings: Arguments for `from_pretrained`.

    Raises:
        InputError: As in `Report.check`, or no model can be built from the config.
    """
    with loading(folder, role):
        loaded: Any = auto.from_pretrained(
            folder, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **settings
        )
    model, info = loaded
    report_of(model, info).check(folder, role, new_head=new_head)
    return model


def read_report(auto: Any, folder: Path, role: str = "model") -> Report | None:
    """Returns the loading report of the checkpoint in `folder`, from the headers of its files; weights are not read.

    None for a quantized checkpoint, whose weights have other names and types until its own loader has converted them.

    Raises:
        InputError: No model can be built from the config, a file is damaged, or weights are integers instead of floats.
    """
    config = load_config(folder, role)
    if getattr(config, "quantization_config", None) is not None:
        return None
    headers = read_headers(folder, role)
    with loading(folder, role), torch.random.fork_rng(devices=[]):
        with torch.device("meta"):
            kind: Any = type(auto.from_config(config))
        load: Any = PreTrainedModel.from_pretrained  # also for sentence encoders, whose own reads other files
        loaded: Any = load.__func__(
            kind,
            None,
            config=config,
            state_dict={name: Unread(header) for name, header in headers.items()},
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, info = loaded
    check_types(headers, model, set(info["unexpected_keys"]), f"{role} {str(folder)!r}")
    return report_of(model, info)


class Unread:
    """A placeholder for a stored weight while transformers loads: it is read as a tensor on the meta device."""

    def __init__(self, header: Header):
        self.shape = header.shape

    def __getitem__(self, index: Any) -> "Unread":
        return self

    def to(self, **settings: Any) -> Tensor:
        return torch.empty(self.shape, device="meta")


@contextmanager
def loading(folder: Path | str, role: str) -> Iterator[None]:
    """Context in which transformers' log of the loading report is suppressed, since the report is evaluated here, and
    exceptions that model classes raise for an inconsistent config become InputError.
    """
    library = logging.getLogger(LIBRARY)

    def is_news(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in SUPPRESSED_LOGS)

    library.addFilter(is_news)
    try:
        yield
    except InputError:
        raise
    # An inconsistent config can fail anywhere in its class: heads that don't divide the width, an unknown activation.
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, IndexError, ZeroDivisionError) as error:
        raise InputError(f"{role} {str(folder)!r}: {reason_of(error)}") from error
    finally:
        library.removeFilter(is_news)


def reason_of(error: Exception) -> str:
    """Returns why no model could be built, without the list of all supported families (about ten thousand characters)
    that an auto class adds for an unsupported one.
    """
    message = in_one_line(error)
    auto = re.search(r"AutoModelFor\w+", message)
    if auto and message.startswith("Unrecognized configuration class"):
        return f"models of its type have no head of the task ({auto.group()} knows none); name another --task"
    return f"no model can be built of its config.json: {message}"


def report_of(model: PreTrainedModel, info: Mapping[str, Any]) -> Report:
    """Builds the loading report of `model`, with the weights of body and head separated."""
    missing, unexpected = in_order(info["missing_keys"]), in_order(info["unexpected_keys"])
    reshaped = sorted((name, list(stored), list(wanted)) for name, stored, wanted in info["mismatched_keys"])
    body, heads = body_prefix(model), head_names(model)
    new = heads | (pooler_names(model) if has_no_pooler(model, missing, unexpected) else set())
    own = [name for name in missing if name not in new]
    strays = [name for name in unexpected if is_of_body(name, model)]
    problems = [
        *missing_text(own, layers_text(own, model)),
        *reshaped_text([each for each in reshaped if each[0].startswith(body)]),
        *([f"{len(strays)} in the files that it has no place for ({names_text(strays)})"] if strays else []),
        *info["error_msgs"],
    ]
    return Report(
        type(model).__name__,
        head_missing=tuple(name for name in missing if name in new),
        head_reshaped=tuple(each for each in reshaped if not each[0].startswith(body)),
        head_absent=bool(heads) and heads <= set(missing),
        left_over=tuple(name for name in unexpected if name not in strays),
        problems=tuple(problems),
    )


def body_prefix(model: PreTrainedModel) -> str:
    """Returns the prefix of the names of the body's weights; empty if the model is a body itself."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def head_names(model: PreTrainedModel) -> set[str]:
    return {name for name in model.state_dict() if not name.startswith(body_prefix(model))}


def pooler_names(model: PreTrainedModel) -> set[str]:
    """Returns the weights of an encoder's pooler, the layer on the first token that only heads on whole texts use."""
    return {name for name in model.state_dict() if name.startswith(f"{body_prefix(model)}{POOLER}.")}


def has_no_pooler(model: PreTrainedModel, missing: Iterable[str], unexpected: Iterable[str]) -> bool:
    """Returns whether the files have no weight of a pooler, as for masked language models."""
    return pooler_names(model) <= set(missing) and not any(POOLER in name.split(".") for name in unexpected)


def is_of_body(name: str, model: PreTrainedModel) -> bool:
    """Returns whether a weight that only the files have belongs to a module of the body; the prefix may be missing."""
    body: Any = model.base_model
    modules = {child for child, _ in body.named_children()}
    own = {child for child, _ in model.named_children()} if body is not model else set()
    part = name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0]
    return part in modules and (name.startswith(f"{model.base_model_prefix}.") or part not in own)


def check_types(headers: Mapping[str, Header], model: PreTrainedModel, left_over: set[str], where: str) -> None:
    """Checks that weights are floating-point numbers.

    Raises:
        InputError: A weight is stored as integers, which only buffers may be in a checkpoint that isn't quantized.
    """
    whole = {name: header for name, header in headers.items() if is_whole_number(name, header)}
    wrong = [f"{name} as {header.dtype}" for name, header in sorted(whole.items()) if name not in left_over]
    if wrong:
        raise InputError(
            f"{where}: expected weights of a {type(model).__name__} as floating-point numbers, found "
            f"{names_text(wrong)}: integers need the scales of a quantized checkpoint, and config.json has no "
            "quantization_config"
        )


def is_whole_number(name: str, header: Header) -> bool:
    """Returns whether a header belongs to a weight of integers; counting buffers and masks are not weights."""
    if header.is_float or header.dtype == "BOOL" or (header.dtype == "U8" and name.endswith(MASKS)):
        return False
    return name.rpartition(".")[2] not in COUNTS


def check_finite(folder: Path, role: str = "model") -> None:
    """Checks that all floating-point weights are finite; reads them one at a time.

    Raises:
        InputError: A weight contains NaN or infinity.
    """
    headers = read_headers(folder, role)
    wrong = []
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files_of(headers.values())}
        for name, header in sorted(headers.items()):
            if header.dtype not in ("F64", "F32", "F16", "BF16"):
                continue
            tensor = opened[header.file].get_tensor(name)
            count = tensor.numel() - int(tensor.isfinite().sum())
            if count:
                wrong.append(f"{name} ({count:,} of {tensor.numel():,} numbers)")
    if wrong:
        raise InputError(
            f"{role} {str(folder)!r}: expected finite weights, found NaN or infinity in {len(wrong)} "
            f"({names_text(wrong)}): all that it computes would be NaN"
        )


def files_of(headers: Iterable[Header]) -> set[Path]:
    return {header.file for header in headers}


def check_weights(auto: Any, folder: Path, role: str, *, new_head: bool = False, finite: bool = True) -> None:
    """Checks the weights of a checkpoint before it is used.

    Args:
        auto: The checkpoint's auto class.
        new_head: See `Report.check`.
        finite: Whether to read the weights too, and check that they are finite.

    Raises:
        InputError: As in `read_report`, `Report.check` and `check_finite`.
    """
    report = read_report(auto, folder, role)
    if report is not None:
        report.check(folder, role, new_head=new_head)
        if report.left_over and not new_head:
            log.warning(
                "%s %r: a %s has no place for %s: these weights are left out",
                *(role, str(folder), report.model, names_text(report.left_over)),
            )
    if finite:
        check_finite(folder, role)


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names, comparing the numbers in them numerically."""
    return sorted(map(str, names), key=lambda name: [part.zfill(8) for part in re.split(r"(\d+)", name)])


def names_text(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def missing_text(names: Iterable[str], why: str = "") -> list[str]:
    found = list(names)
    return [f"{len(found)} missing ({names_text(found)}){why}"] if found else []


def reshaped_text(reshaped: Iterable[tuple[str, list[int], list[int]]]) -> list[str]:
    each = [f"{name}: {stored} in the files, {wanted} in the model" for name, stored, wanted in reshaped]
    return [f"{len(each)} of another shape ({names_text(each)})"] if each else []


def layers_text(missing: Iterable[str], model: PreTrainedModel) -> str:
    """Returns a message with the number of layers in the files if entire layers are missing, else an empty string."""
    lacking = set(missing)
    lists: dict[str, dict[str, bool]] = {}
    for name in model.state_dict():
        found = re.match(r"(.*?)\.(\d+)\.", name)
        if found:
            layers = lists.setdefault(found[1], {})
            layers[found[2]] = layers.get(found[2], False) or name not in lacking
    for name, layers in lists.items():
        if 0 < sum(layers.values()) < len(layers):
            return f": config.json has {len(layers)} layers in {name}, the files have {sum(layers.values())}"
    return ""


def describe_missing_head(report: Report) -> str:
    """Describes a checkpoint whose files have no weights of the head that its config names."""
    others = f", but {names_text(report.left_over)}" if report.left_over else ""
    return f"the files have no weights of its head ({names_text(report.head_missing)}){others}"
