"""File of quantization schemes, scales and grids, stored beside a model's checkpoint."""

import json
from pathlib import Path

from compress.errors import CompressError
from compress.quantize.prepare import LayerQuantization, Rounding
from compress.quantize.schemes import Scheme

FILE = "quantization.safetensors"
VERSION = "1"


def save_rounding(rounding: Rounding, folder: Path) -> None:
    """Writes the scales, with schemes and input grids in the file's header."""
    from safetensors.torch import save_file

    layers = {
        name: {"scheme": vars(r.scheme) if r.scheme is not None else None, "grid": r.grid}
        for name, r in rounding.items()
    }
    scales = {name: rounded.scales.clone() for name, rounded in rounding.items()}  # tied weights share one tensor
    save_file(scales, str(folder / FILE), metadata={"version": VERSION, "layers": json.dumps(layers)})


def load_rounding(folder: Path) -> dict[str, LayerQuantization]:
    """Loads the schemes, scales and grids by layer name.

    Raises:
        CompressError: There is no such file, or it has another version.
    """
    from safetensors import safe_open

    if not (folder / FILE).is_file():
        raise CompressError(f"{folder}: expected a quantized checkpoint with {FILE}, found none")
    with safe_open(folder / FILE, framework="pt") as file:
        header = file.metadata() or {}
        if header.get("version") != VERSION:
            raise CompressError(f"{folder / FILE}: expected version {VERSION}, found {header.get('version')}")
        layers = json.loads(header["layers"])
        return {
            name: LayerQuantization(
                Scheme(**about["scheme"]) if about["scheme"] is not None else None,
                file.get_tensor(name),
                tuple(about["grid"]) if about["grid"] is not None else None,
            )
            for name, about in layers.items()
        }


def is_rounded(folder: Path) -> bool:
    return (folder / FILE).is_file()
