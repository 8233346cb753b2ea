"""Broken checkpoints: inconsistent or damaged weights, configs, tokenizers and files."""

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.broken_inputs.case import ACCEPTED, Case, Flags, Workspace

TENSORS = {
    "word embeddings": "bert.embeddings.word_embeddings.weight",
    "position embeddings": "bert.embeddings.position_embeddings.weight",
    "a query": "bert.encoder.layer.0.attention.self.query.weight",
    "the last bias": "bert.encoder.layer.3.output.dense.bias",
    "a norm": "bert.encoder.layer.2.attention.output.LayerNorm.weight",
    "the pooler": "bert.pooler.dense.weight",
    "the head": "classifier.weight",
    "the head's bias": "classifier.bias",
}
UNREADABLE_TOKENIZER = "no tokenizer can be loaded from the folder"
DAMAGED = r"model\.safetensors is damaged or not a safetensors file"
Weights = dict[str, Tensor]


def spoilt(value: float, at: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        flat = tensor.clone().flatten()
        flat[at] = value
        return flat.view_as(tensor)

    return change


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "of another shape": lambda t: torch.cat([t, t[:1]]),
    "of integers": lambda t: t.to(torch.int64),
    "not a number": spoilt(float("nan"), 3),
    "infinite": spoilt(float("-inf"), -1),
    "empty": lambda t: t[:0],
}


def with_weights(change: Callable[[Weights], Weights], role: str = "teacher") -> Callable[[Workspace], Flags]:
    def damage(workspace: Workspace) -> Flags:
        file = workspace.root / role / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})
        return {} if role == "teacher" else {"--student": str(workspace.student)}

    return damage


def with_config(role: str = "teacher", **changes: Any) -> Callable[[Workspace], Flags]:
    """Changes entries of config.json; None removes an entry."""

    def damage(workspace: Workspace) -> Flags:
        file = workspace.root / role / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
        return {} if role == "teacher" else {"--student": str(workspace.student)}

    return damage


def with_file(name: str, content: str | bytes | None, role: str = "teacher") -> Callable[[Workspace], Flags]:
    """Replaces a file of the checkpoint; None removes it."""

    def damage(workspace: Workspace) -> Flags:
        file = workspace.root / role / name
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return {} if role == "teacher" else {"--student": str(workspace.student)}

    return damage


def with_tokenizer(change: Callable[[dict[str, Any]], Any], role: str = "teacher") -> Callable[[Workspace], Flags]:
    def damage(workspace: Workspace) -> Flags:
        file = workspace.root / role / "tokenizer.json"
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
        return {} if role == "teacher" else {"--student": str(workspace.student)}

    return damage


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: value for key, value in weights.items() if key != name}


def renamed(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key + "_old" if key == name else key: value for key, value in weights.items()}


def changed(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: how(weights[name]).contiguous()}


def cut_off(workspace: Workspace, role: str, keep: float) -> None:
    file = workspace.root / role / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def weight_cases() -> Iterator[Case]:
    for what, name in TENSORS.items():
        named = name.replace(".", r"\.")
        if not name.startswith("classifier"):
            yield Case(f"{what} missing", with_weights(without(name)), named)
            yield Case(f"{what} renamed", with_weights(renamed(name)), named)
        for how, change in CHANGES.items():
            yield Case(f"{what} {how}", with_weights(changed(name, change)), named)
    fitted = "(?i)fine-tuned first|new head|no head"
    yield Case(
        "no head in the file",
        with_weights(lambda w: {k: v for k, v in w.items() if "classifier" not in k}),
        fitted,
        ACCEPTED,
    )
    yield Case("a head without its bias", with_weights(without("classifier.bias")), r"classifier\.bias|no head")
    yield Case(
        "a layer too few in the file",
        with_weights(lambda w: {k: v for k, v in w.items() if ".layer.3." not in k}),
        r"layer\.3",
    )
    yield Case(
        "a layer too many in the file",
        with_weights(
            lambda w: w | {k.replace(".layer.3.", ".layer.4."): v.clone() for k, v in w.items() if ".layer.3." in k}
        ),
        r"layer\.4",
    )
    yield Case(
        "all weights renamed",
        with_weights(lambda w: {f"model.{k}": v for k, v in w.items()}),
        "weights of a BertForSequenceClassification .* found 71 missing",
    )
    yield Case(
        "no weights at all",
        with_weights(lambda w: {"x": torch.zeros(1)}),
        "weights of a BertForSequenceClassification .* found 69 missing",
    )
    yield Case("weights in half precision", with_weights(lambda w: {k: v.half() for k, v in w.items()}), "", ACCEPTED)
    yield Case("weights in bfloat16", with_weights(lambda w: {k: v.bfloat16() for k, v in w.items()}), "", ACCEPTED)
    yield Case("a student's weights missing", with_weights(without(TENSORS["a query"]), "student"), "query")
    yield Case(
        "a student's weights not finite",
        with_weights(changed(TENSORS["a query"], CHANGES["not a number"]), "student"),
        "query",
    )
    yield Case(
        "a student's weights of another shape",
        with_weights(changed(TENSORS["a query"], CHANGES["of another shape"]), "student"),
        "query",
    )


def config_cases() -> Iterator[Case]:
    for size in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        for what, value in (("a word", "many"), ("zero", 0), ("negative", -4), ("a list", [4]), ("half", 2.5)):
            yield Case(f"config: {size} is {what}", with_config(**{size: value}), size)
    yield Case("config: hidden size not divided by heads", with_config(num_attention_heads=5), "attention heads")
    yield Case(
        "config: wider than the weights", with_config(hidden_size=64), r"of another shape .*\[32\] in the files, \[64\]"
    )
    yield Case("config: more layers than the file", with_config(num_hidden_layers=6), r"layer\.4|num_hidden_layers")
    yield Case("config: fewer layers than the file", with_config(num_hidden_layers=2), r"layer\.2|num_hidden_layers")
    yield Case(
        "config: another vocabulary", with_config(vocab_size=999), r"word_embeddings\.weight: \[189, 32\] in the file"
    )
    yield Case(
        "config: more positions than the file",
        with_config(max_position_embeddings=512),
        r"position_embeddings\.weight: \[64, 32\] in the file",
    )
    yield Case(
        "config: positions below the requested length",
        with_config(max_position_embeddings=8),
        r"data\.max_length: expected at most 8 tokens",
    )
    yield Case("config: an unknown activation", with_config(hidden_act="relux"), "relux|hidden_act")
    yield Case("config: dropout is a word", with_config(hidden_dropout_prob="some"), "hidden_dropout_prob")
    yield Case("config: dropout above one", with_config(hidden_dropout_prob=3.0), "dropout")
    yield Case("config: an unknown model type", with_config(model_type="berd"), "berd")
    yield Case("config: a model type of a number", with_config(model_type=7), "model_type")
    yield Case("config: no model type", with_config(model_type=None), "model_type")
    yield Case("config: labels that aren't numbered", with_config(id2label={"a": "b"}), "id2label")
    yield Case("config: labels as a list", with_config(id2label=["a", "b"]), "id2label")
    yield Case(
        "config: two labels of one name",
        with_config(id2label={str(i): "billing" for i in range(5)}, label2id={"billing": 0}),
        "it has no head for these labels",
        ACCEPTED,
    )
    yield Case(
        "config: another family", with_config(model_type="roberta"), "weights of a RobertaForSequenceClassification"
    )
    yield Case(
        "config: a head for several labels",
        with_config(problem_type="multi_label_classification"),
        "task: multi-label",
        ACCEPTED,
    )
    for what, content in (
        ("empty", ""),
        ("cut off", '{"model_type": "bert", "hidd'),
        ("a list", "[1, 2]"),
        ("an empty object", "{}"),
        ("a word", '"bert"'),
        ("null", "null"),
        ("bytes", b"\xff\xfe\x00\x01"),
        ("deep", "[" * 20000),
        ("not finite", '{"model_type": "bert", "hidden_size": NaN}'),
    ):
        yield Case(f"config.json is {what}", with_file("config.json", content), r"expected .* in config\.json, found")
    yield Case("config.json is gone", with_file("config.json", None), r"no config\.json in the folder")
    yield Case(
        "a student's config.json is cut off",
        with_file("config.json", "{", "student"),
        r"error: student .*expected JSON in config\.json",
    )


def tokenizer_cases() -> Iterator[Case]:
    def removed(workspace: Workspace) -> Flags:
        for file in workspace.teacher.glob("*token*"):
            file.unlink()
        (workspace.teacher / "vocab.txt").unlink(missing_ok=True)
        return {}

    def more_tokens(rules: dict[str, Any]) -> dict[str, Any]:
        vocab = rules["model"]["vocab"]
        vocab |= {f"extra{i}": len(vocab) + i for i in range(50)}
        return rules

    yield Case("no tokenizer files", removed, UNREADABLE_TOKENIZER)
    yield Case(
        "a tokenizer with more tokens than embeddings",
        with_tokenizer(more_tokens),
        "expected a tokenizer with ids below 189",
    )
    for what, content in (
        ("empty", ""),
        ("cut off", '{"version": "1.0", "mod'),
        ("a list", "[]"),
        ("{}", "{}"),
        ("bytes", b"\x80\x81\x82"),
    ):
        yield Case(f"tokenizer.json is {what}", with_file("tokenizer.json", content), UNREADABLE_TOKENIZER)
    for what, content in (("cut off", "{"), ("a list", "[]")):
        yield Case(
            f"tokenizer_config.json is {what}", with_file("tokenizer_config.json", content), UNREADABLE_TOKENIZER
        )
    yield Case("tokenizer.json without a vocabulary", with_tokenizer(lambda r: r | {"model": {}}), UNREADABLE_TOKENIZER)
    yield Case(
        "a student's tokenizer is gone",
        with_file("tokenizer.json", None, "student"),
        f"error: student .*{UNREADABLE_TOKENIZER}",
    )
    yield Case(
        "a student's tokenizer has other words",
        with_tokenizer(
            lambda r: (
                r
                | {
                    "model": r["model"]
                    | {
                        "vocab": {
                            w: i
                            for i, w in enumerate(
                                [*list(r["model"]["vocab"])[:5], *reversed(list(r["model"]["vocab"])[5:])]
                            )
                        }
                    }
                }
            ),
            "student",
        ),
        "184 of 189 tokens have another id",
    )


def file_cases() -> Iterator[Case]:
    def cut(keep: float, role: str = "teacher") -> Callable[[Workspace], Flags]:
        def damage(workspace: Workspace) -> Flags:
            cut_off(workspace, role, keep)
            return {} if role == "teacher" else {"--student": str(workspace.student)}

        return damage

    def pickled(workspace: Workspace) -> Flags:
        weights = load_file(workspace.teacher / "model.safetensors")
        (workspace.teacher / "model.safetensors").unlink()
        torch.save(weights, workspace.teacher / "pytorch_model.bin")
        return {}

    def linked(workspace: Workspace) -> Flags:
        (workspace.teacher / "model.safetensors").unlink()
        (workspace.teacher / "model.safetensors").symlink_to(workspace.root / "gone")
        return {}

    def replaced_by_folder(workspace: Workspace) -> Flags:
        (workspace.teacher / "model.safetensors").unlink()
        (workspace.teacher / "model.safetensors").mkdir()
        return {}

    def index(content: Any) -> Callable[[Workspace], Flags]:
        def damage(workspace: Workspace) -> Flags:
            (workspace.teacher / "model.safetensors").rename(workspace.teacher / "model-00001-of-00002.safetensors")
            (workspace.teacher / "model.safetensors.index.json").write_text(json.dumps(content))
            return {}

        return damage

    for keep in (0.0, 0.0001, 0.01, 0.5, 0.999):
        yield Case(f"weights cut off at {keep}", cut(keep), DAMAGED)
    yield Case("a student's weights cut off", cut(0.7, "student"), f"error: student .*{DAMAGED}")
    yield Case("weights that are text", with_file("model.safetensors", "not weights at all, but long enough"), DAMAGED)
    yield Case("weights as a pickle", pickled, "pickle")
    yield Case("weights as a dangling link", linked, r"expected weights in model\.safetensors")
    yield Case("weights as a folder", replaced_by_folder, r"expected weights in model\.safetensors")
    yield Case(
        "an index that names a missing file",
        index({"metadata": {}, "weight_map": dict.fromkeys(TENSORS.values(), "model-00002-of-00002.safetensors")}),
        "00002|index",
    )
    yield Case(
        "an index that leaves the folder",
        index({"metadata": {}, "weight_map": dict.fromkeys(TENSORS.values(), "../student/model.safetensors")}),
        r"index|\.\.",
    )
    yield Case("an index that is a list", index([]), "index")
    yield Case(
        "a teacher that is a file",
        lambda p: {"--teacher": str(p.teacher / "config.json")},
        "expected a folder .* found a file",
    )
    yield Case("a teacher that isn't there", lambda p: {"--teacher": str(p.root / "nowhere")}, "no such|nowhere")
    yield Case("a teacher in an empty folder", lambda p: empty_teacher(p), r"no config\.json in the folder")
    yield Case(
        "a teacher of a package that isn't there",
        lambda p: {"--teacher": "package:nobody_has_this/x"},
        "nobody_has_this",
    )
    yield Case("a teacher out of its package", lambda p: {"--teacher": "package:json/../../etc"}, r"\.\.|package")
    yield Case("a student that isn't there", lambda p: {"--student": str(p.root / "nowhere")}, "nowhere")


def empty_teacher(workspace: Workspace) -> Flags:
    shutil.rmtree(workspace.teacher)
    workspace.teacher.mkdir()
    return {}


CASES = [*weight_cases(), *config_cases(), *tokenizer_cases(), *file_cases()]
