"""Finds a checkpoint, checks that it is safe and whole, and loads teacher and tokenizer."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from distill.errors import InputError
from distill.sharding.apply import whole
from distill.sharding.load import no_memory_for_parameters, weights_to_read

PACKAGE = "package:"
NEEDED = ["*.safetensors", "*.json", "*.txt", "*.model"]


def checkpoint_folder(model: str, role: str = "teacher") -> Path:
    """Folder of a local checkpoint, of a hub id once downloaded (safetensors only, never pickles), or of a checkpoint
    that an installed package carries (`package:NAME/FOLDER`).

    Raises:
        InputError: No such folder or hub model; no config; weights only as a pickle; damaged safetensors.
    """
    if not model:
        raise InputError(f"{role}: none given; name a hub id or a local folder with --{role}")
    folder = in_package(model, role) if model.startswith(PACKAGE) else Path(model).expanduser()
    if not folder.exists():
        folder = download(model, role)
    if not folder.is_dir():
        raise InputError(f"{role} {model!r}: expected a folder with config.json and safetensors, found a file")
    if not (folder / "config.json").is_file():
        raise InputError(f"{role} {model!r}: no config.json in the folder: it can't be told what model this is")
    check_weights(folder, role)
    return folder


def in_package(model: str, role: str) -> Path:
    name, _, inside = model.removeprefix(PACKAGE).partition("/")
    found = find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise InputError(f"{role} {model!r}: no package {name!r} is installed here; install it, or name a folder")
    return Path(next(iter(found.submodule_search_locations))) / inside


def download(model: str, role: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=NEEDED))
    except Exception as error:  # the hub client raises some twenty kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{role} {model!r}: no such folder here, and the hub gave no such model: {reason}") from error


def check_weights(folder: Path, role: str) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
        found = f"a pickle ({', '.join(pickles)}), which can run any code when it is loaded" if pickles else "none"
        raise InputError(f"{role} {str(folder)!r}: expected weights in safetensors, found {found}; convert it first")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{role} {str(folder)!r}: {file.name} is damaged or no safetensors file: {error}"
            ) from error


def load_tokenizer(folder: Path, role: str = "teacher") -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a checkpoint; one without a padding token pads with the config's, else with its eos.

    Raises:
        InputError: The folder holds none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{role} {str(folder)!r}: no tokenizer can be loaded from the folder: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = word_of(tokenizer, configured_padding(folder)) or tokenizer.eos_token
    return tokenizer


def configured_padding(folder: Path) -> int | None:
    file = folder / "config.json"
    return json.loads(file.read_text(encoding="utf-8")).get("pad_token_id") if file.is_file() else None


def word_of(tokenizer: PreTrainedTokenizerBase, number: int | None) -> str | None:
    """The token with this id; None where there is none, as for the -1 of the first Llamas."""
    if number is None or not 0 <= number < len(tokenizer):
        return None
    return str(tokenizer.convert_ids_to_tokens(number))


def agree_on_padding(config: PretrainedConfig, folder: Path) -> None:
    """Has a decoder's config name the padding of the tokenizer in its folder; encoders leave padding out by the mask.

    A decoder's stock classifier reads the last token that isn't the config's padding: it refuses batches where there is
    none, and reads some padding where rows are filled up with another one.

    Raises:
        InputError: The tokenizer has neither a padding nor an eos token.
    """
    kind = config.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return
    tokenizer = load_tokenizer(folder, "model")
    if tokenizer.pad_token_id is None:
        raise InputError(
            f"model {str(folder)!r}: expected a tokenizer with a padding or an eos token, found neither: a "
            "classifier couldn't tell where a text ends"
        )
    config.pad_token_id = tokenizer.pad_token_id


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that turns text into ids; padding and truncation are set by the caller and left out."""
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
