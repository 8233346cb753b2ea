"""Every command that opens a checkpoint rejects a broken one before computing anything."""

import re

import pytest
import torch

import support.broken_checkpoints as broken
from pipelines import cache, distill, evaluate, export, prune, quantize, report
from support.broken_checkpoints import changed, config_text, config_with, files, in_shards, renamed, weights, without
from support.commands import rejection_of, small_run
from support.tiny_models import VOCABULARY

NAN, INFINITY = float("nan"), float("inf")
LAYER = "encoder.layer.1."


CONFIGS = {
    "no-json": (config_text("{model_type: bert"), r"expected JSON in config\.json, found other text"),
    "empty-file": (config_text(""), r"expected JSON in config\.json, found other text"),
    "deep": (config_text("[" * 100_000), r"expected JSON in config\.json"),
    "bytes": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}"), r"expected JSON in config\.json"),
    "empty-object": (config_text("{}"), "expected a model_type such as 'bert' in config.json, found an empty object"),
    "a-list": (config_text("[1, 2]"), "expected a JSON object in config.json, found a list"),
    "a-string": (config_text('"bert"'), "expected a JSON object in config.json, found a string"),
    "null": (config_text("null"), "expected a JSON object in config.json, found null"),
    "no-model-type": (config_text('{"hidden_size": 32}'), r"found other keys \(hidden_size\)"),
    "unknown-type": (config_with(model_type="bertt"), "found 'bertt'; the nearest is 'bert'"),
    "type-is-a-number": (config_with(model_type=7), "expected a model_type in config.json .*found 7"),
    "size-is-a-string": (config_with(hidden_size="32"), "expected a whole number of at least 1 for hidden_size.*'32'"),
    "size-is-a-fraction": (config_with(num_hidden_layers=2.5), "whole number of at least 1 for num_hidden_layers.*2.5"),
    "size-is-true": (config_with(num_attention_heads=True), "for num_attention_heads in config.json, found True"),
    "no-layers": (config_with(num_hidden_layers=0), "at least 1 for num_hidden_layers in config.json, found 0"),
    "negative-size": (config_with(vocab_size=-5), "at least 1 for vocab_size in config.json, found -5"),
    "heads-do-not-divide": (
        config_with(num_attention_heads=5),
        r"no model can be built.*\(32\).*attention heads \(5\)",
    ),
    "unknown-activation": (config_with(hidden_act="no_such"), "no model can be built from its config.json: .*no_such"),
    "auto-map-is-a-string": (config_with(auto_map="x"), "expected names of classes under auto_map.*found 'x'"),
    "foreign-code": (config_with(auto_map={"AutoModel": "evil.Model"}), "could do anything, and is not executed"),
    "labels-are-a-list": (
        config_with(id2label=["a", "b"]),
        "expected a name for the number of each label under id2label",
    ),
    "labels-not-numbered": (config_with(id2label={"a": "b"}), "expected a name for the number of each label"),
    "ffn-below-one": (config_with(intermediate_size=-4), "at least 1 for intermediate_size in config.json, found -4"),
    "a-list-of-widths": (config_with(hidden_size=[32]), "config.json is rejected by its class: .*hidden_size"),
}
WEIGHTS = {
    "some-missing": (without(f"{LAYER}output.dense"), r"2 missing \(bert\.encoder\.layer\.1\.output\.dense\.bias, "),
    "all-missing": (without("bert."), r"missing \(bert\.embeddings\.LayerNorm\.bias, "),
    "renamed": (
        renamed("attention.self.query", "attention.self.kwery"),
        r"8 missing \(bert\.encoder\.layer\.0\.attention\.self\.query\.bias.*8 in the files that it has no place for "
        r"\(.*kwery",
    ),
    "other-prefix": (renamed("bert.", "model.bert."), r"missing \(bert\.embeddings"),
    "fewer-layers-in-file": (
        config_with(num_hidden_layers=6),
        r"32 missing \(bert\.encoder\.layer\.4\..*config\.json has 6 layers in bert\.encoder\.layer, the files have 4",
    ),
    "more-layers-in-file": (
        config_with(num_hidden_layers=2),
        r"32 in the files that it has no place for \(bert\.encoder\.layer\.2\.",
    ),
    "an-adapter": (
        broken.added(f"bert.{LAYER}adapter.down.weight", torch.ones(4, 4)),
        r"1 in the files that it has no place for \(bert\.encoder\.layer\.1\.adapter\.down\.weight\)",
    ),
    "other-shape": (
        changed(f"{LAYER}intermediate.dense.weight", broken.half),
        r"1 of another shape \(bert\.encoder\.layer\.1\.intermediate\.dense\.weight: \[32, 32\] in the files, "
        r"\[64, 32\] in the model\)",
    ),
    "other-width": (config_with(hidden_size=64), r"of another shape \(bert\.embeddings\.LayerNorm\.bias: \[32\]"),
    "half-a-pooler": (without("pooler.dense.bias"), r"1 missing \(bert\.pooler\.dense\.bias\)"),
    "renamed-pooler": (renamed("pooler.dense", "pooler.tense"), r"2 missing \(bert\.pooler\.dense\.bias"),
    "integers": (
        changed(f"{LAYER}output.dense.weight", broken.to_integers),
        r"as floating-point numbers, found bert\.encoder\.layer\.1\.output\.dense\.weight as I8",
    ),
    "nan": (
        changed(f"{LAYER}output.dense.weight", broken.with_number(NAN)),
        r"expected finite weights, found NaN or infinity in 1 \(bert\.encoder\.layer\.1\.output\.dense\.weight "
        r"\(1 of 2,048 numbers\)\)",
    ),
    "infinite": (changed("embeddings.LayerNorm.bias", broken.with_number(-INFINITY)), "expected finite weights"),
    "no-weights-in-file": (weights(lambda tensors: {}), r"missing \(bert\.embeddings"),
    "cut-off": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000]),
        r"model\.safetensors is damaged or not a safetensors file",
    ),
    "other-name": (
        lambda folder: (folder / "model.safetensors").rename(folder / "weights.safetensors"),
        r"expected weights in model\.safetensors or model\.safetensors\.index\.json, found weights\.safetensors",
    ),
    "shard-missing": (
        broken.all_of(in_shards(), lambda folder: (folder / "model-00002-of-00002.safetensors").unlink()),
        r"model-00002-of-00002\.safetensors is missing",
    ),
    "index-leads-out": (
        in_shards(lambda index: index["weight_map"].update({"x": "../../secret.safetensors"})),
        r"expected names of files beside model\.safetensors\.index\.json, found '\.\./\.\./secret\.safetensors'",
    ),
    "index-of-numbers": (
        in_shards(lambda index: index.update(weight_map=dict.fromkeys(index["weight_map"], 1))),
        r"expected names of files beside model\.safetensors\.index\.json, found 1",
    ),
    "index-without-map": (in_shards(lambda index: index.pop("weight_map")), r"index\.json is damaged"),
    "index-map-is-a-list": (
        in_shards(lambda index: index.update(weight_map=["model-00001-of-00002.safetensors"])),
        r"index\.json is damaged",
    ),
}
TOKENIZERS = {
    "no-files": (broken.no_tokenizer, r"no tokenizer can be loaded.*expected tokenizer\.json or vocab\.txt"),
    "settings-alone": (files(tokenizer__json=None), r"expected tokenizer\.json or vocab\.txt, found no vocab\.txt"),
    "garbage": (files(tokenizer__json="{]"), "no tokenizer can be loaded from the folder"),
    "other-object": (files(tokenizer__json="{}"), "no tokenizer can be loaded from the folder"),
    "settings-are-a-list": (files(tokenizer_config__json="[1]"), "no tokenizer can be loaded from the folder"),
    "more-tokens-than-rows": (
        broken.all_of(config_with(vocab_size=150), changed("word_embeddings", lambda table: table[:150].clone())),
        rf"expected a tokenizer with ids below 150, the rows of the model's embeddings, found {len(VOCABULARY) - 150} "
        rf"beyond \('{VOCABULARY[150]}' is 150\)",
    ),
    "slow": (broken.slow_tokenizer, "expected a fast tokenizer .*found the slow BertJapaneseTokenizer"),
}
CASES = {
    f"{what}-{name}": case
    for what, cases in (("config", CONFIGS), ("weights", WEIGHTS), ("tokenizer", TOKENIZERS))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_teacher_is_rejected_before_any_stage(name, checkpoints, changed_copy, tmp_path, monkeypatch, capsys):
    change, message = CASES[name]
    folder = changed_copy("headed", change)
    expected = rejection_of(distill, small_run(folder, checkpoints / "data", tmp_path / "run"), monkeypatch, capsys)
    assert re.search(message, expected), expected
    assert str(folder) in expected
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["weights-renamed", "weights-nan", "config-empty-object", "tokenizer-no-files"])
def test_a_broken_student_checkpoint_is_rejected_before_any_stage(
    name, checkpoints, changed_copy, tmp_path, monkeypatch, capsys
):
    change, message = CASES[name]
    arguments = small_run(
        checkpoints / "headed", checkpoints / "data", tmp_path / "run", "--student", str(changed_copy("headed", change))
    )
    expected = rejection_of(distill, arguments, monkeypatch, capsys)
    assert re.search(message, expected), expected
    assert "student" in expected
    assert not (tmp_path / "run").exists()


def test_a_dry_run_rejects_a_broken_teacher(checkpoints, changed_copy, tmp_path, monkeypatch, capsys):
    change, message = WEIGHTS["renamed"]
    arguments = small_run(changed_copy("headed", change), checkpoints / "data", tmp_path / "run", "--dry-run", "true")
    assert re.search(message, rejection_of(distill, arguments, monkeypatch, capsys))


def test_a_broken_further_teacher_is_rejected_before_any_stage(
    checkpoints, changed_copy, tmp_path, monkeypatch, capsys
):
    change, message = WEIGHTS["some-missing"]
    arguments = small_run(
        checkpoints / "headed",
        checkpoints / "data",
        tmp_path / "run",
        "--teacher.additional",
        f"[{changed_copy('headed', change)}]",
    )
    assert re.search(message, rejection_of(distill, arguments, monkeypatch, capsys))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["weights-some-missing", "weights-nan", "weights-integers", "config-unknown-type"])
@pytest.mark.parametrize("command", ["cache", "prune", "quantize", "export", "evaluate", "report"])
def test_every_command_rejects_a_broken_checkpoint(
    command, name, checkpoints, changed_copy, tmp_path, monkeypatch, capsys
):
    change, message = CASES[name]
    folder, data, output = changed_copy("headed", change), checkpoints / "data", tmp_path / "run"
    options = ["--data", str(data), "--output", str(output)]
    module, arguments = {
        "cache": (cache, ["write", "--teacher", str(folder), "--data", str(data), "--cache", str(output)]),
        "prune": (prune, ["--model", str(folder), *options, "--speedup", "2"]),
        "quantize": (quantize, ["--model", str(folder), *options]),
        "export": (export, ["--model", str(folder), *options]),
        "evaluate": (evaluate, ["--model", str(folder), *options]),
        "report": (report, ["--teacher", str(checkpoints / "headed"), "--model", str(folder), *options]),
    }[command]
    assert re.search(message, rejection_of(module, arguments, monkeypatch, capsys))
    assert not list(output.rglob("manifest.json"))
