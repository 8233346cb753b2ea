"""What is known of a teacher and its tokenizer once they are loaded: their fingerprints, and that two read the same."""

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
from distill.parallel.apply import whole
from distill.parallel.load import no_memory_for_parameters, weights_to_read


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that turns text into ids; padding and truncation are set by the caller and left out.

    Raises:
        InputError: A slow tokenizer, whose rules are Python code.
    """
    check_fast(tokenizer, "tokenizer", "its rules can't be told from another's")
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["padding"] = rules["truncation"] = None
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def check_same_tokenizer(
    teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase, name: str, role: str = "student"
) -> None:
    """Raises InputError unless both turn every text into the same ids."""
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
    """The model in eval mode, with no gradients."""
    return model.requires_grad_(False).eval()


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hash of every tensor's name, type, shape and bytes, and of the order of the labels.

    Of a model that lies on several processes it is the same, if all of them call it: tensors are put together one by
    one.
    """
    return fingerprint(model, ((name, whole(tensor)) for name, tensor in sorted(model.state_dict().items())))


def stored_fingerprint(folder: Path, auto_class: Any) -> str:
    """`weights_fingerprint` of the checkpoint in `folder` loaded in float32, one tensor in memory at a time."""
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
    if getattr(model.config, "sentence", None):  # the same weights, pooled in another way
        total.update(json.dumps(model.config.sentence, sort_keys=True).encode())
    for name, tensor in tensors:
        total.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        total.update(tensor_bytes(tensor))
    return total.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
