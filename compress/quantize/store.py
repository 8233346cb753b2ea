"""File of quantization schemes, scales and grids, stored beside a model's checkpoint."""

import json
from pathlib import Path

from compress.errors import CompressError
from compress.quantize.prepare import LayerQuantization, ModelQuantization
from compress.quantize.schemes import Scheme
from compress.safetensors_file import sort_metadata

QUANTIZATION_FILE = "quantization.safetensors"
FORMAT_VERSION = "1"


def save_quantization(quantization: ModelQuantization, folder: Path) -> None:
    """Writes the scales, with schemes and input grids in the file's header."""
    from safetensors.torch import save_file

    layers = {
        name: {"scheme": vars(each.scheme) if each.scheme is not None else None, "grid": each.grid}
        for name, each in quantization.items()
    }
    scales = {name: each.scales.clone() for name, each in quantization.items()}  # tied weights share one tensor
    header = {"version": FORMAT_VERSION, "layers": json.dumps(layers)}
    save_file(scales, str(folder / QUANTIZATION_FILE), metadata=header)
    sort_metadata(folder / QUANTIZATION_FILE)


def load_quantization(folder: Path) -> dict[str, LayerQuantization]:
    """Returns the schemes, scales and grids by layer name.

    Raises:
        CompressError: There is no such file, or it has another version.
    """
    from safetensors import safe_open

    path = folder / QUANTIZATION_FILE
    if not path.is_file():
        raise CompressError(f"{folder}: expected a quantized checkpoint with {QUANTIZATION_FILE}, found none")
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        if header.get("version") != FORMAT_VERSION:
            raise CompressError(
                f"{path}: expected version {FORMAT_VERSION}, found {header.get('version')}: its scales can't be read"
            )
        layers = json.loads(header["layers"])
        return {
            name: LayerQuantization(
                Scheme(**settings["scheme"]) if settings["scheme"] is not None else None,
                file.get_tensor(name),
                tuple(settings["grid"]) if settings["grid"] is not None else None,
            )
            for name, settings in layers.items()
        }


def is_quantized(folder: Path) -> bool:
    """Returns whether the checkpoint in the folder is quantized: its scales are stored beside it."""
    return (folder / QUANTIZATION_FILE).is_file()
