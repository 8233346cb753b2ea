"""Names, shapes and types of a checkpoint's weights from its safetensors headers; this module doesn't import torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from distill.errors import InputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightHeader:
    """The header of a stored weight; `dtype` in the notation of safetensors, such as F32 or I64."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether the weight consists of floating-point numbers."""
        return self.dtype.startswith(("F", "BF"))


def weight_files(folder: Path, role: str = "checkpoint") -> list[Path]:
    """Returns the weight files that transformers reads: a single one, or those listed in the index.

    Raises:
        InputError: There is neither a weight file nor an index, or the index is damaged, empty, or refers to files
            outside the folder.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        others = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))) or "none"
        raise InputError(f"{role} {str(folder)!r}: expected weights in {SINGLE} or {INDEX}, found {others}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise InputError(f"{role} {str(folder)!r}: {index.name} is damaged: {error!r}") from error
    if not names:
        raise InputError(f"{role} {str(folder)!r}: expected names of weight files in {index.name}, found none")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{role} {str(folder)!r}: expected names of files beside {index.name}, found {name!r}: a checkpoint's "
                "weights must be in its own folder"
            )
    return [folder / name for name in names]


def read_headers(folder: Path, role: str = "checkpoint") -> dict[str, WeightHeader]:
    """Returns the header of each weight, by its name in the files.

    Raises:
        InputError: As in `weight_files`, or a file is missing, damaged or can't be read.
    """
    headers: dict[str, WeightHeader] = {}
    for file in weight_files(folder, role):
        try:
            file.open("rb").close()  # safetensors reports every file that it can't open as missing
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118
                    stored = opened.get_slice(name)
                    headers[name] = WeightHeader(file, tuple(stored.get_shape()), stored.get_dtype())
        except SafetensorError as error:
            raise InputError(
                f"{role} {str(folder)!r}: {file.name} is damaged or not a safetensors file: {error}"
            ) from error
        except OSError as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else "can't be read"
            raise InputError(f"{role} {str(folder)!r}: {file.name} {problem}: {error.strerror or error}") from error
    return headers
