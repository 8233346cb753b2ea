"""Sentence embedding settings of a checkpoint, and their folder format, that of Sentence Transformers."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from distill.errors import InputError

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
BODY_SETTINGS = "sentence_bert_config.json"
WEIGHTS = "model.safetensors"
POOLINGS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
ACTIVATIONS = {
    "Identity": "torch.nn.modules.linear.Identity",
    "Tanh": "torch.nn.modules.activation.Tanh",
    "ReLU": "torch.nn.modules.activation.ReLU",
    "GELU": "torch.nn.modules.activation.GELU",
}
ORDER = "Transformer, Pooling, any number of Dense, Normalize or none"
Weights = list[dict[str, Tensor]]  # weight and bias of each projection


@dataclass(frozen=True)
class Projection:
    """A linear map of the pooled vector, followed by an element-wise activation, one of ACTIVATIONS."""

    width: int
    bias: bool = True
    activation: str = "Tanh"


@dataclass(frozen=True)
class SentenceForm:
    """The computation of a text's vector from the last hidden states of its tokens.

    Args:
        pooling: `mean` of the tokens, `cls` (the first token), `max` of each coordinate, or `lasttoken`.
        projections: Projections applied after pooling.
        normalize: Whether vectors are finally divided by their Euclidean norm.
        max_length: Maximum text length in tokens that the model is meant for; None if not given.
    """

    pooling: str = "mean"
    projections: tuple[Projection, ...] = ()
    normalize: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        for found, known, what in (
            (self.pooling, POOLINGS, "pooling"),
            *((each.activation, ACTIVATIONS, "activation of a Dense") for each in self.projections),
        ):
            if found not in known:
                raise InputError(
                    f"sentence embedding: expected a {what} among {', '.join(known)}, found {found!r}: the vectors "
                    "would be others than the model's"
                )

    def __str__(self) -> str:
        maps = [f"projected to {each.width}" for each in self.projections]
        named = {"mean": "mean of the tokens", "cls": "first token", "max": "maximum of the tokens"}
        return ", ".join([named.get(self.pooling, "last token"), *maps, *["normalised"] * self.normalize])


def form_of(config: PretrainedConfig) -> SentenceForm | None:
    """Returns the form that a model's config contains under `sentence`; None if there is none."""
    kept = getattr(config, "sentence", None)
    if kept is None:
        return None
    return SentenceForm(**kept | {"projections": tuple(Projection(**each) for each in kept["projections"])})


def set_form(config: PretrainedConfig, form: SentenceForm) -> None:
    config.sentence = asdict(form)


def vector_width(config: PretrainedConfig) -> int:
    """Returns the width of a text's vector."""
    form = form_of(config)
    return form.projections[-1].width if form and form.projections else int(config.hidden_size)


def is_sentence_folder(folder: Path) -> bool:
    return (folder / MODULES).is_file()


def described(folder: Path) -> str:
    """Describes in one line how the checkpoint in `folder` computes its vectors, and the source of this information."""
    found = read_form(folder)
    return f"{found} ({MODULES})" if found else f"{SentenceForm()} (assumed: {folder.name} has no {MODULES})"


def read_form(folder: Path) -> SentenceForm | None:
    """Reads the form from the folder's modules.json and the files named there; None if there is no modules.json.

    Raises:
        InputError: The modules or their order are unsupported, a setting is unsupported, or a file is damaged.
    """
    if not is_sentence_folder(folder):
        return None
    check_settings(folder)
    modules = read_modules(folder)
    kinds = [kind for kind, _ in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Dense", "Normalize")]
    dense = kinds.count("Dense")
    if unknown or kinds not in (plain := ["Transformer", "Pooling", *["Dense"] * dense], [*plain, "Normalize"]):
        raise InputError(
            f"model {str(folder)!r}: expected modules {ORDER}, found {', '.join(kinds) or 'none'} in {MODULES}"
            + (f": {', '.join(unknown)} can't be computed here" if unknown else ": another order gives other vectors")
        )
    if modules[0][1]:
        raise InputError(
            f"model {str(folder)!r}: expected the Transformer's files in the folder itself, found them in "
            f"{modules[0][1]!r}; save it again with a newer sentence-transformers"
        )
    return SentenceForm(
        read_pooling(folder / modules[1][1] / "config.json"),
        tuple(read_projection(folder / path / "config.json") for kind, path in modules if kind == "Dense"),
        kinds[-1] == "Normalize",
        read_body_settings(folder),
    )


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Returns (kind, folder) of each of the folder's modules, in order; an empty list without a modules.json."""
    found = read_json(folder / MODULES) if is_sentence_folder(folder) else []
    try:
        modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in found]
    except (KeyError, TypeError) as error:
        raise InputError(
            f"model {str(folder)!r}: expected a list of modules with type and path in {MODULES}, found other content: "
            "it can't be told how vectors are made"
        ) from error
    for _, path in modules:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise InputError(
                f"model {str(folder)!r}: expected folders of modules beside {MODULES}, found {path!r}: a checkpoint's "
                "files lie in its own folder"
            )
    return modules


def check_settings(folder: Path) -> None:
    """Checks the general settings of the folder.

    Raises:
        InputError: The model is not a SentenceTransformer, or it has a default prompt, which precedes every text.
    """
    about = read_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    kind = about.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise InputError(
            f"model {str(folder)!r}: expected a SentenceTransformer, found a {kind}: it gives other vectors"
        )
    prompts = about.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise InputError(f"model {str(folder)!r}: expected prompts by name in {SETTINGS}, found {prompts!r}")
    name = about.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(name, str) else None
    if prompt:
        raise InputError(
            f"model {str(folder)!r}: expected no default prompt, found {prompt!r} in {SETTINGS}: texts would be "
            "embedded without it; put it before the texts yourself and set default_prompt_name to null"
        )


def read_pooling(file: Path) -> str:
    found = read_object(file)
    modes = found.get("pooling_mode")
    if modes is None:
        modes = [key for key, asked in found.items() if key.startswith("pooling_mode_") and asked] or [POOLINGS["mean"]]
    modes = list(map(str, modes)) if isinstance(modes, list) else [str(modes)]
    names = {key: mode for mode, key in POOLINGS.items()} | {mode: mode for mode in POOLINGS}
    if len(modes) != 1 or modes[0] not in names:
        raise InputError(
            f"model {str(file)!r}: expected one pooling among {', '.join(POOLINGS)}, found {', '.join(modes)}: the "
            "vectors would be others than the model's"
        )
    return names[modes[0]]


def read_projection(file: Path) -> Projection:
    found = read_object(file)
    places = [found.get(f"module_{end}_name", "sentence_embedding") for end in ("input", "output")]
    known = all(place in ("sentence_embedding", None) for place in places)
    if found.get("use_residual") or not known or not is_size(found.get("out_features")):
        raise InputError(
            f"model {str(file)!r}: expected a Dense of a given width on the pooled vector, found one with a residual, "
            "on something else or of no width: it can't be computed here"
        )
    name = str(found.get("activation_function", ACTIVATIONS["Tanh"])).rpartition(".")[2]
    return Projection(found["out_features"], bool(found.get("bias", True)), name)


def read_body_settings(folder: Path) -> int | None:
    """Checks the Transformer's settings and returns its maximum text length in tokens, None if not given."""
    found = read_object(folder / BODY_SETTINGS) if (folder / BODY_SETTINGS).is_file() else {}
    states = found.get("module_output_name", "token_embeddings")
    if found.get("transformer_task", "feature-extraction") != "feature-extraction" or states != "token_embeddings":
        raise InputError(
            f"model {str(folder)!r}: expected a Transformer that gives states of tokens, found "
            f"{found.get('transformer_task')!r} with {states!r} in {BODY_SETTINGS}"
        )
    if found.get("do_lower_case") and not lowers(folder):
        raise InputError(
            f"model {str(folder)!r}: expected a tokenizer that writes small letters, as do_lower_case in "
            f"{BODY_SETTINGS} says, found one that doesn't: it would read other words"
        )
    longest = found.get("max_seq_length")
    if longest and not is_size(longest):
        raise InputError(
            f"model {str(folder)!r}: expected a whole number of at least 1 for max_seq_length in {BODY_SETTINGS}, "
            f"found {longest!r}"
        )
    return longest or None


def lowers(folder: Path) -> bool:
    """Returns whether the folder's tokenizer lowercases its input."""
    about = folder / "tokenizer.json"
    rules = json.dumps(read_object(about).get("normalizer")) if about.is_file() else ""
    return '"lowercase": true' in rules or '"Lowercase"' in rules


def read_projections(folder: Path) -> Weights:
    """Returns the weights of the folder's Dense modules.

    Raises:
        InputError: The weights don't exist as safetensors, or are damaged.
    """
    found: Weights = []
    for path in (path for kind, path in read_modules(folder) if kind == "Dense"):
        try:
            weights = load_file(folder / path / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"model {str(folder)!r}: expected the weights of a Dense in {path}/{WEIGHTS}: {error}; a pickle isn't "
                "read, for it can run any code"
            ) from error
        found.append({name.removeprefix("linear."): tensor for name, tensor in weights.items()})
    return found


def write_form(form: SentenceForm, width: int, projections: Weights, folder: Path) -> None:
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
    write_json(folder / MODULES, modules)
    about: dict[str, Any] = {"model_type": "SentenceTransformer", "prompts": {}, "default_prompt_name": None}
    write_json(folder / SETTINGS, about | {"similarity_fn_name": "cosine"})
    write_json(folder / BODY_SETTINGS, {"max_seq_length": form.max_length, "do_lower_case": False})
    mode = {POOLINGS["mean"]: False} | {POOLINGS[form.pooling]: True}  # without the entry, mean would be enabled too
    write_json(folder / paths[1] / "config.json", {"word_embedding_dimension": width} | mode)
    for path, each, weights in zip(paths[2:], form.projections, projections, strict=False):
        settings = {"in_features": width, "out_features": each.width, "bias": each.bias}
        write_json(folder / path / "config.json", settings | {"activation_function": ACTIVATIONS[each.activation]})
        save_file({f"linear.{name}": tensor.contiguous() for name, tensor in weights.items()}, folder / path / WEIGHTS)
        width = each.width


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"model {str(file)!r}: no such file, or no JSON: {error}") from error


def read_object(file: Path) -> dict[str, Any]:
    found = read_json(file)
    if not isinstance(found, dict):
        raise InputError(f"model {str(file)!r}: expected a JSON object, found a {type(found).__name__}")
    return found


def is_size(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found > 0


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
