"""Fingerprints of a loaded teacher and its tokenizer, and a check that two tokenizers are the same."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.tokenizer import check_fast
from distill.errors import InputError
from distill.parallel.apply import full_tensor
from distill.parallel.load import no_memory_for_parameters, weights_to_read


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a hash of everything that turns text into ids, except padding and truncation, which the caller sets.

    Raises:
        InputError: The tokenizer is a slow one, whose rules are Python code.
    """
    check_fast(tokenizer, "tokenizer", "its rules can't be told from another's")
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["padding"] = rules["truncation"] = None
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def check_same_tokenizer(
    teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase, name: str, role: str = "student"
) -> None:
    """Raises InputError unless both tokenizers turn every text into the same ids."""
    if tokenizer_fingerprint(teacher) == tokenizer_fingerprint(student):
        return
    ours, theirs = teacher.get_vocab(), student.get_vocab()
    moved = [word for word, i in ours.items() if theirs.get(word) != i]
    what = (
        f"{len(moved)} of {len(ours)} words have another id or none, such as {moved[0]!r}"
        if moved or len(ours) != len(theirs)
        else "the same words, but other rules of normalisation or splitting"
    )
    raise InputError(
        f"{role} {name!r}: its tokenizer differs from the teacher's ({len(theirs)} words, not {len(ours)}; {what}): "
        "the teacher's signals would belong to other tokens"
    )


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model in eval mode, with gradients disabled."""
    return model.requires_grad_(False).eval()


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Returns a hash of every tensor's name, type, shape and bytes, the label order and a sentence encoder's pooling.

    A model that is sharded across processes has the same fingerprint, if all of them call this function: tensors are
    gathered one by one.
    """
    return fingerprint(model, ((name, full_tensor(tensor)) for name, tensor in sorted(model.state_dict().items())))


def stored_fingerprint(folder: Path, auto_class: Any) -> str:
    """Returns the checkpoint's `weights_fingerprint` when loaded in float32, with one tensor in memory at a time."""
    with no_memory_for_parameters():
        model = auto_class.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    tensors = model.state_dict(keep_vars=True)
    stored = {tensors[name]: place for place, name in weights_to_read(model, folder).items()}
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(file, framework="pt")) for file in sorted(folder.glob("*.safetensors"))]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118

        def read(tensor: Tensor) -> Tensor:
            return places[stored[tensor]].get_tensor(stored[tensor]).float() if tensor in stored else tensor

        return fingerprint(model, ((name, read(tensor)) for name, tensor in sorted(tensors.items())))


def fingerprint(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> str:
    total = hashlib.sha256(json.dumps(model.config.id2label, sort_keys=True).encode())
    if getattr(model.config, "sentence", None):  # the same weights may be pooled in different ways
        total.update(json.dumps(model.config.sentence, sort_keys=True).encode())
    for name, tensor in tensors:
        total.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        total.update(tensor_bytes(tensor))
    return total.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
