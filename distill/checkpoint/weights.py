"""Loading of models, and checks that a checkpoint's files contain the weights of the model in its config."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from distill.checkpoint.auto_class import AutoClass
from distill.checkpoint.config import in_one_line, load_config
from distill.checkpoint.headers import WeightHeader, read_headers
from distill.checkpoint.load_report import LoadReport, build_load_report, list_names
from distill.errors import InputError

BUFFERS = ("position_ids", "token_type_ids", "num_batches_tracked")  # integers in old files
MASKS = ("attn.bias", "attention.bias")  # byte masks in files of the first GPT models
LIBRARY = "transformers.modeling_utils"
# Log messages whose content is in `LoadReport`.
SUPPRESSED_LOGS = ("LOAD REPORT", "The tied weights mapping for this model")
log = logging.getLogger(__name__)


def load_model(
    auto: AutoClass, folder: Path | str, *, role: str = "model", new_head: bool = False, **settings: Any
) -> Any:
    """Loads a model with `auto.from_pretrained` and checks the loading report.

    Without the check, a missing weight would silently be initialized at random.

    Args:
        auto: An auto class of transformers, or a class with a compatible `from_pretrained`.
        folder: A local checkpoint in safetensors.
        role: Role of the model in the command, for error messages.
        new_head: Whether the head will be newly initialized, see `LoadReport.check`.
        settings: Arguments for `from_pretrained`.

    Returns:
        The model, of the class that `auto` chooses.

    Raises:
        InputError: As in `LoadReport.check`, or no model can be built from the config.
    """
    with _translate_errors(folder, role):
        model, info = auto.from_pretrained(
            folder, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **settings
        )
    build_load_report(model, info).check(folder, role, new_head=new_head)
    return model


def read_report(auto: AutoClass, folder: Path, role: str = "model") -> LoadReport | None:
    """Returns the loading report of the checkpoint in `folder`, from the headers of its files; weights are not read.

    None for a quantized checkpoint, whose weights have other names and types until its own loader has converted them.

    Raises:
        InputError: No model can be built from the config, a file is damaged, or weights are integers instead of floats.
    """
    config = load_config(folder, role)
    if getattr(config, "quantization_config", None) is not None:
        return None
    headers = read_headers(folder, role)
    with _translate_errors(folder, role), torch.random.fork_rng(devices=[]):
        with torch.device("meta"):
            model_class = type(auto.from_config(config))
        load: Any = PreTrainedModel.from_pretrained  # also for sentence encoders, whose own reads other files
        model, info = load.__func__(
            model_class,
            None,
            config=config,
            state_dict={name: _UnreadTensor(header) for name, header in headers.items()},
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_types(headers, model, set(info["unexpected_keys"]), f"{role} {str(folder)!r}")
    return build_load_report(model, info)


def check_weights(auto: AutoClass, folder: Path, role: str, *, new_head: bool = False, finite: bool = True) -> None:
    """Checks the weights of a checkpoint before it is used.

    Args:
        auto: The checkpoint's auto class.
        folder: The checkpoint.
        role: Its role in the command, for error messages.
        new_head: See `LoadReport.check`.
        finite: Whether to read the weights too, and check that they are finite.

    Raises:
        InputError: As in `read_report`, `LoadReport.check` and `check_finite_weights`.
    """
    report = read_report(auto, folder, role)
    if report is not None:
        report.check(folder, role, new_head=new_head)
        if report.left_over and not new_head:
            log.warning(
                "%s %r: a %s has no place for %s: these weights are left out",
                *(role, str(folder), report.model, list_names(report.left_over)),
            )
    if finite:
        check_finite_weights(folder, role)


def check_finite_weights(folder: Path, role: str = "model") -> None:
    """Checks that all floating-point weights are finite; reads them one at a time.

    Raises:
        InputError: A weight contains NaN or infinity.
    """
    headers = read_headers(folder, role)
    wrong = []
    with ExitStack() as stack:
        files = {header.file for header in headers.values()}
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
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
            f"({list_names(wrong)}): all that it computes would be NaN"
        )


def is_integer_weight(name: str, header: WeightHeader) -> bool:
    """Returns whether a header belongs to a weight of integers; counting buffers and masks are not weights."""
    if header.is_float or header.dtype == "BOOL" or (header.dtype == "U8" and name.endswith(MASKS)):
        return False
    return name.rpartition(".")[2] not in BUFFERS


class _UnreadTensor:
    """A placeholder for a stored weight while transformers loads: it is read as a tensor on the meta device."""

    def __init__(self, header: WeightHeader):
        self.shape = header.shape

    def __getitem__(self, index: object) -> "_UnreadTensor":
        return self

    def to(self, **settings: object) -> Tensor:
        return torch.empty(self.shape, device="meta")


@contextmanager
def _translate_errors(folder: Path | str, role: str) -> Iterator[None]:
    """Converts exceptions that model classes raise for an inconsistent config to InputError.

    Within the context transformers' log of the loading report is suppressed, since the report is evaluated here.
    """
    library = logging.getLogger(LIBRARY)

    def is_wanted(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in SUPPRESSED_LOGS)

    library.addFilter(is_wanted)
    try:
        yield
    except InputError:
        raise
    # An inconsistent config can fail anywhere in its class: heads that don't divide the width, an unknown activation.
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, IndexError, ZeroDivisionError) as error:
        raise InputError(f"{role} {str(folder)!r}: {_explain_error(error)}") from error
    finally:
        library.removeFilter(is_wanted)


def _explain_error(error: Exception) -> str:
    """Returns why no model could be built.

    The list of all supported families (about ten thousand characters) that an auto class adds for an unsupported one
    is left out.
    """
    message = in_one_line(error)
    auto = re.search(r"AutoModelFor\w+", message)
    if auto and message.startswith("Unrecognized configuration class"):
        return f"models of its type have no head of the task ({auto.group()} knows none); name another --task"
    return f"no model can be built from its config.json: {message}"


def _check_types(
    headers: Mapping[str, WeightHeader], model: PreTrainedModel, left_over: Iterable[str], where: str
) -> None:
    """Checks that weights are floating-point numbers.

    Raises:
        InputError: A weight is stored as integers, which only buffers may be in a checkpoint that isn't quantized.
    """
    integers = {name: header for name, header in headers.items() if is_integer_weight(name, header)}
    wrong = [f"{name} as {header.dtype}" for name, header in sorted(integers.items()) if name not in left_over]
    if wrong:
        raise InputError(
            f"{where}: expected weights of a {type(model).__name__} as floating-point numbers, found "
            f"{list_names(wrong)}: integers need the scales of a quantized checkpoint, and config.json has no "
            "quantization_config"
        )
