"""Importance scores of a model's units and the file format that stores them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.errors import CompressError
from compress.prune.importance.gates import LAYERS


@dataclass(frozen=True)
class Scores:
    """Importance scores of the units and layers of a model.

    Args:
        method: How the scores were measured: magnitude, taylor, absolute, fisher or activation.
        values: Axis name -> score of each unit, float64 [units].
        layers: Score of each layer, float64 [layers].
        samples, tokens: Number of samples and tokens they were measured on, without padding; 0 if only weights were
            used.
        fingerprint: `compute_fingerprint` of the model.
    """

    method: str
    values: Mapping[str, Tensor]
    layers: Tensor
    samples: int
    tokens: int
    fingerprint: str

    def save(self, path: Path) -> None:
        """Writes a safetensors file; method, counts and fingerprint are stored as JSON in its metadata."""
        metadata = {name: getattr(self, name) for name in ("method", "samples", "tokens", "fingerprint")}
        tensors = {f"values.{name}": value.contiguous() for name, value in self.values.items()}
        save_file(tensors | {LAYERS: self.layers.contiguous()}, path, {"scores": json.dumps(metadata, sort_keys=True)})

    @classmethod
    def load(cls, path: Path, model: nn.Module) -> "Scores":
        """Loads scores that `save` wrote for this exact model.

        Raises:
            CompressError: The file contains no scores, or scores of a model with other weights.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads((file.metadata() or {})["scores"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise CompressError(f"scores {str(path)!r} can't be read: {error}") from error
        fingerprint = compute_fingerprint(model)
        if metadata["fingerprint"] != fingerprint:
            raise CompressError(
                f"scores {str(path)!r}: expected a model with fingerprint {fingerprint[:12]}, found "
                f"{metadata['fingerprint'][:12]}: units would be ranked by another model's importance"
            )
        layers = tensors.pop(LAYERS)
        return cls(
            values={name.removeprefix("values."): value for name, value in tensors.items()}, layers=layers, **metadata
        )


def compute_fingerprint(model: nn.Module) -> str:
    """Returns the SHA-256 of every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
