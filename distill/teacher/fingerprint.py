"""Fingerprints of a loaded teacher and its tokenizer, and a check that two tokenizers are the same."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.auto_class import AutoClass
from distill.checkpoint.tokenizer import check_fast
from distill.errors import InputError
from distill.parallel.apply import gather_tensor
from distill.parallel.load import match_weights, parameters_on_meta


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a hash of everything that turns text into ids, except padding and the maximum length, which callers set.

    Raises:
        InputError: The tokenizer is a slow one, whose rules are Python code.
    """
    check_fast(tokenizer, "tokenizer", "its rules can't be compared with another tokenizer's")
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["padding"] = rules["truncation"] = None
    if tokenizer.truncation_side != "right":
        rules["truncation"] = {"direction": tokenizer.truncation_side}
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def check_same_tokenizer(
    teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase, name: str, role: str = "student"
) -> None:
    """Checks that two tokenizers turn every text into the same ids.

    Args:
        teacher: The teacher's tokenizer.
        student: The tokenizer to compare with it.
        name: Name of the second model in the error.
        role: Role of the second model in the error.

    Raises:
        InputError: The tokenizers differ in their tokens, ids or rules, or one of them is slow.
    """
    if tokenizer_fingerprint(teacher) == tokenizer_fingerprint(student):
        return
    expected, found = teacher.get_vocab(), student.get_vocab()
    changed = [token for token, i in expected.items() if found.get(token) != i]
    difference = "the same tokens with other rules of normalization or splitting"
    if changed:
        difference = f"{len(changed)} of {len(expected)} tokens have another id or none, such as {changed[0]!r}"
    elif len(found) != len(expected):
        difference = f"{len(found) - len(expected)} additional tokens"
    raise InputError(
        f"{role} {name!r}: expected the teacher's tokenizer of {len(expected)} tokens, found another of {len(found)} "
        f"({difference}): the teacher's signals would belong to other tokens"
    )


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model in eval mode, with gradients disabled."""
    model.requires_grad_(False).eval()
    return model


def weights_fingerprint(model: PreTrainedModel, *, keep: bool = True) -> str:
    """Returns a hash of every tensor's name, type, shape and bytes, the label order and a sentence encoder's pooling.

    A model that is sharded across processes has the same fingerprint, if all of them call this function: tensors are
    gathered one by one.

    Args:
        model: The model, on this process or sharded.
        keep: Whether this process needs the fingerprint; otherwise it only takes part in collectives, hashes nothing
            and gets an empty string.
    """
    tensors = ((name, gather_tensor(tensor)) for name, tensor in sorted(model.state_dict().items()))
    if keep:
        return _hash_model(model, tensors)
    for _ in tensors:
        pass
    return ""


def stored_fingerprint(folder: Path, auto_class: AutoClass) -> str:
    """Returns the checkpoint's `weights_fingerprint` when loaded in float32, with one tensor in memory at a time."""
    with parameters_on_meta():
        model = auto_class.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    tensors = model.state_dict(keep_vars=True)
    stored = {tensors[name]: stored_name for stored_name, name in match_weights(model, folder).items()}
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(file, framework="pt")) for file in sorted(folder.glob("*.safetensors"))]
        file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118, safe_open is not iterable

        def read(tensor: Tensor) -> Tensor:
            return file_of[stored[tensor]].get_tensor(stored[tensor]).float() if tensor in stored else tensor

        return _hash_model(model, ((name, read(tensor)) for name, tensor in sorted(tensors.items())))


def _hash_model(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256(json.dumps(model.config.id2label, sort_keys=True).encode())
    if getattr(model.config, "sentence", None):  # the same weights may be pooled in different ways
        digest.update(json.dumps(model.config.sentence, sort_keys=True).encode())
    for name, tensor in tensors:
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(_view_bytes(tensor).data)
    return digest.hexdigest()


def _view_bytes(tensor: Tensor) -> np.ndarray:
    """Returns the bytes of a tensor, uint8 [bytes], without a copy if it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
