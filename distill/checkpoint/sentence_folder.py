"""The folder format of sentence encoders, that of Sentence Transformers: reading and writing of its files."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from distill.checkpoint.sentence_form import POOLINGS, DenseProjection, SentenceForm
from distill.errors import InputError

MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
BODY_SETTINGS = "sentence_bert_config.json"
_WEIGHTS = "model.safetensors"
POOLING_SETTINGS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
ACTIVATION_CLASSES = {
    "Identity": "torch.nn.modules.linear.Identity",
    "Tanh": "torch.nn.modules.activation.Tanh",
    "ReLU": "torch.nn.modules.activation.ReLU",
    "GELU": "torch.nn.modules.activation.GELU",
}
ORDER = "Transformer, Pooling, any number of Dense, Normalize or none"
ModuleWeights = list[dict[str, Tensor]]  # weight and bias of each projection


def is_sentence_folder(folder: Path) -> bool:
    """Returns whether the folder is in the format of Sentence Transformers."""
    return (folder / MODULES).is_file()


def describe_vectors(folder: Path) -> str:
    """Describes in one line how the checkpoint in `folder` computes its vectors, and the source of this information."""
    form = read_form(folder)
    return f"{form} ({MODULES})" if form else f"{SentenceForm()} (assumed: {folder.name} has no {MODULES})"


def read_form(folder: Path) -> SentenceForm | None:
    """Reads the form from the folder's modules.json and the files named there; None if there is no modules.json.

    Raises:
        InputError: The modules or their order are unsupported, a setting is unsupported, or a file is damaged.
    """
    if not is_sentence_folder(folder):
        return None
    _check_settings(folder)
    modules = _read_modules(folder)
    kinds = [kind for kind, _ in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Dense", "Normalize")]
    dense = kinds.count("Dense")
    if unknown or kinds not in (plain := ["Transformer", "Pooling", *["Dense"] * dense], [*plain, "Normalize"]):
        raise InputError(
            f"model {str(folder)!r}: expected modules {ORDER}, found {', '.join(kinds) or 'none'} in {MODULES}"
            + (f": {', '.join(unknown)} isn't supported" if unknown else ": another order gives other vectors")
        )
    if modules[0][1]:
        raise InputError(
            f"model {str(folder)!r}: expected the Transformer's files in the folder itself, found them in "
            f"{modules[0][1]!r}; save it again with a newer sentence-transformers"
        )
    return SentenceForm(
        _read_pooling(folder / modules[1][1] / "config.json"),
        tuple(_read_projection(folder / path / "config.json") for kind, path in modules if kind == "Dense"),
        kinds[-1] == "Normalize",
        _read_max_length(folder),
    )


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Returns (kind, folder) of each of the folder's modules, in order; an empty list without a modules.json."""
    entries = _read_json(folder / MODULES) if is_sentence_folder(folder) else []
    try:
        modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in entries]
    except (KeyError, TypeError) as error:
        raise InputError(
            f"model {str(folder)!r}: expected a list of modules with type and path in {MODULES}, found other content: "
            "the computation of its vectors is unknown"
        ) from error
    for _, path in modules:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise InputError(
                f"model {str(folder)!r}: expected folders of modules beside {MODULES}, found {path!r}: a checkpoint's "
                "files must be in its own folder"
            )
    return modules


def _check_settings(folder: Path) -> None:
    """Checks the general settings of the folder.

    Raises:
        InputError: The model is not a SentenceTransformer, or it has a default prompt, which precedes every text.
    """
    settings = _read_json_object(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else {}
    kind = settings.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise InputError(
            f"model {str(folder)!r}: expected a SentenceTransformer, found a {kind}: it gives other vectors"
        )
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise InputError(f"model {str(folder)!r}: expected prompts by name in {_SETTINGS}, found {prompts!r}")
    name = settings.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(name, str) else None
    if prompt:
        raise InputError(
            f"model {str(folder)!r}: expected no default prompt, found {prompt!r} in {_SETTINGS}: texts would be "
            "embedded without it; prepend it to the texts in your data and set default_prompt_name to null"
        )


def _read_pooling(file: Path) -> str:
    settings = _read_json_object(file)
    modes = settings.get("pooling_mode")
    if modes is None:
        enabled = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
        modes = enabled or [POOLING_SETTINGS["mean"]]
    modes = list(map(str, modes)) if isinstance(modes, list) else [str(modes)]
    names = {key: mode for mode, key in POOLING_SETTINGS.items()} | {mode: mode for mode in POOLINGS}
    if len(modes) != 1 or modes[0] not in names:
        raise InputError(
            f"model {str(file)!r}: expected one pooling among {', '.join(POOLINGS)}, found {', '.join(modes)}: the "
            "vectors would differ from the model's"
        )
    return names[modes[0]]


def _read_projection(file: Path) -> DenseProjection:
    settings = _read_json_object(file)
    vectors = [settings.get(f"module_{end}_name", "sentence_embedding") for end in ("input", "output")]
    is_known = all(vector in ("sentence_embedding", None) for vector in vectors)
    width: Any = settings.get("out_features")
    if settings.get("use_residual") or not is_known or not _is_size(width):
        raise InputError(
            f"model {str(file)!r}: expected a Dense with out_features on the pooled vector, found one with a residual, "
            "on another vector or without a width: it isn't supported"
        )
    name = str(settings.get("activation_function", ACTIVATION_CLASSES["Tanh"])).rpartition(".")[2]
    return DenseProjection(int(width), bool(settings.get("bias", True)), name)


def _read_max_length(folder: Path) -> int | None:
    """Checks the Transformer's settings and returns its maximum text length in tokens, None if not set."""
    settings = _read_json_object(folder / BODY_SETTINGS) if (folder / BODY_SETTINGS).is_file() else {}
    states = settings.get("module_output_name", "token_embeddings")
    if settings.get("transformer_task", "feature-extraction") != "feature-extraction" or states != "token_embeddings":
        raise InputError(
            f"model {str(folder)!r}: expected a Transformer that outputs states of tokens, found "
            f"{settings.get('transformer_task')!r} with {states!r} in {BODY_SETTINGS}"
        )
    if settings.get("do_lower_case") and not _lowercases(folder):
        raise InputError(
            f"model {str(folder)!r}: expected a tokenizer that lowercases, as do_lower_case in {BODY_SETTINGS} "
            "requires, found one that doesn't: texts would be split into other tokens"
        )
    longest = settings.get("max_seq_length")
    if longest and not _is_size(longest):
        raise InputError(
            f"model {str(folder)!r}: expected a whole number of at least 1 for max_seq_length in {BODY_SETTINGS}, "
            f"found {longest!r}"
        )
    return longest or None


def _lowercases(folder: Path) -> bool:
    """Returns whether the folder's tokenizer lowercases its input."""
    file = folder / "tokenizer.json"
    rules = json.dumps(_read_json_object(file).get("normalizer")) if file.is_file() else ""
    return '"lowercase": true' in rules or '"Lowercase"' in rules


def read_projections(folder: Path) -> ModuleWeights:
    """Returns the weights of the folder's Dense modules.

    Raises:
        InputError: The weights don't exist as safetensors, or are damaged.
    """
    projections: ModuleWeights = []
    for path in (path for kind, path in _read_modules(folder) if kind == "Dense"):
        try:
            weights = load_file(folder / path / _WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"model {str(folder)!r}: expected the weights of a Dense in {path}/{_WEIGHTS}: {error}; pickles aren't "
                "read, since they can run any code"
            ) from error
        projections.append({name.removeprefix("linear."): tensor for name, tensor in weights.items()})
    return projections


def write_form(form: SentenceForm, width: int, projections: ModuleWeights, folder: Path) -> None:
    """Writes all but the Transformer's own files, so that `SentenceTransformer(folder)` computes the model's vectors.

    Module and setting names are those of the library's first releases, which all later releases can read.

    Args:
        form: The modules to write.
        width: Width of the Transformer's hidden states.
        projections: Weights of the Dense modules.
        folder: Folder of the Transformer's files, which may be written before or after.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kinds = ["Transformer", "Pooling", *["Dense"] * len(form.projections), *["Normalize"] * form.normalize]
    paths = [f"{i}_{kind}" if i else "" for i, kind in enumerate(kinds)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    for path in paths:
        (folder / path).mkdir(exist_ok=True)
    _write_json(folder / MODULES, modules)
    general: dict[str, object] = {"model_type": "SentenceTransformer", "prompts": {}, "default_prompt_name": None}
    _write_json(folder / _SETTINGS, general | {"similarity_fn_name": "cosine"})
    _write_json(folder / BODY_SETTINGS, {"max_seq_length": form.max_length, "do_lower_case": False})
    # Without the entry, mean would be enabled too.
    mode = {POOLING_SETTINGS["mean"]: False} | {POOLING_SETTINGS[form.pooling]: True}
    _write_json(folder / paths[1] / "config.json", {"word_embedding_dimension": width} | mode)
    for path, each, weights in zip(paths[2:], form.projections, projections, strict=False):
        settings: dict[str, object] = {"in_features": width, "out_features": each.width, "bias": each.bias}
        settings |= {"activation_function": ACTIVATION_CLASSES[each.activation]}
        _write_json(folder / path / "config.json", settings)
        save_file({f"linear.{name}": tensor.contiguous() for name, tensor in weights.items()}, folder / path / _WEIGHTS)
        width = each.width


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"model {str(file)!r}: no such file, or it isn't JSON: {error}") from error


def _read_json_object(file: Path) -> dict[str, Any]:
    content = _read_json(file)
    if not isinstance(content, dict):
        raise InputError(f"model {str(file)!r}: expected a JSON object, found a {type(content).__name__}")
    return content


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
