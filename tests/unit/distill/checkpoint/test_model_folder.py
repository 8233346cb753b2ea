"""Tests that saved pruned models load in a fresh process without this package and that no other code runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertTokenizerFast, PreTrainedModel

from compress.export.onnx.graph import OnnxModel, export_onnx
from distill.checkpoint.custom_models import is_pruned, load_model_folder, modeling_pruned, save_model_folder
from distill.errors import InputError
from distill.slicing import Shape, factorize_embeddings, find_axes, mask_model, prune
from support.tiny_families import FAMILIES, auto_class, axes_of, last, logits, model_of, padded_batch, random_shape

ALL = (0, 1, 2)
# roberta, electra, llama and qwen2 each share their code with a family in this list.
SHIPPED = [family for family in FAMILIES if family not in ("roberta", "electra", "llama", "qwen2")]
FACTORIZED = ("bert", "distilbert", "electra-projected", "modernbert", "llama")  # the others share code with these
STOCK = {
    "bert": {"hidden": 16, "heads": 2},
    "electra-projected": {"hidden": 16, "heads": 2},
    "distilbert": {"ffn": 9},
    "modernbert": {"ffn": 9},
    "gpt2": {"hidden": 24, "heads": 3},
    "qwen3": {"hidden": 20, "heads": 1},
}

FRESH = """
import json, sys
from pathlib import Path
import torch, transformers

root = Path(sys.argv[1])
for folder in sorted(path for path in root.iterdir() if (path / "batch.pt").exists()):
    about = json.loads((folder / "about.json").read_text())
    loader = getattr(transformers, about["auto_class"])
    if about["ours"]:
        try:
            loader.from_pretrained(folder, trust_remote_code=False)
        except ValueError as error:
            assert "trust_remote_code" in str(error), error
        else:
            raise AssertionError(f"{folder.name}: loaded without its code")
    model, report = loader.from_pretrained(folder, trust_remote_code=about["ours"], output_loading_info=True)
    assert not any(report.values()), (folder.name, report)
    assert about["ours"] == ("modeling_pruned" in type(model).__module__)
    with torch.no_grad():
        torch.save(model.eval()(**torch.load(folder / "batch.pt")).logits, folder / "logits.pt")
    model.save_pretrained(folder / "again")
assert not {"compress", "distill", "pipelines"} & {name.split(".")[0] for name in sys.modules}
"""


def shipped(family: str, seed: int = 2) -> PreTrainedModel:
    """Returns a model that only the shipped class can express: sizes pruned per layer, and the first layer removed."""
    axes = axes_of(family)
    return prune(model_of(family), axes, random_shape(axes, seed, ("heads", "ffn", "hidden"), (1, 2), largest=0.8))


def stock(family: str) -> PreTrainedModel:
    return prune(model_of(family), axes_of(family), last(axes_of(family), (0, 2), **STOCK[family]), uniform=True)


def assert_same(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Asserts equality up to the order of summation, which depends on the memory alignment of the weights."""
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=lambda text: f"{name}: {text}")


@pytest.mark.slow
def test_a_fresh_process_without_this_package_computes_the_same_logits(tmp_path: Path):
    models = {f"shipped-{family}": shipped(family) for family in SHIPPED}
    models |= {f"stock-{family}": stock(family) for family in STOCK}
    models |= {f"factorized-{family}": factorize_embeddings(model_of(family), 6) for family in FACTORIZED}
    axes = find_axes(models["factorized-bert"])
    shape = random_shape(axes, 3, ("heads", "ffn"), (0, 2), largest=0.7)
    models["factorized-shipped"] = prune(models["factorized-bert"], axes, shape)
    for name, model in models.items():
        save_model_folder(model, tmp_path / name)
        torch.save(padded_batch(model), tmp_path / name / "batch.pt")
        description = {"auto_class": auto_class(model), "ours": is_pruned(model)}
        (tmp_path / name / "about.json").write_text(json.dumps(description))
    run = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for name, model in models.items():
        batch = padded_batch(model)
        with torch.no_grad():
            expected = model(**batch).logits
        assert_same(torch.load(tmp_path / name / "logits.pt"), expected, name)
        for folder in (tmp_path / name, tmp_path / name / "again"):  # saved here, and saved by the fresh process
            again = load_model_folder(folder, auto_class(model))
            assert_same(logits(again, batch), logits(model, batch), str(folder))
    assert is_pruned(models["shipped-bert"])
    assert not any(is_pruned(models[f"stock-{family}"]) for family in STOCK)


def test_a_loaded_model_can_be_pruned_again(tmp_path: Path):
    save_model_folder(shipped("qwen3"), tmp_path / "once")
    once = load_model_folder(tmp_path / "once", "AutoModelForCausalLM")
    axes = find_axes(once)
    shape = random_shape(axes, 9, ("ffn", "hidden"), (0, 1), largest=0.7)
    again = prune(once, axes, shape)
    again.save_pretrained(tmp_path / "again")  # save_pretrained also writes the code
    batch = padded_batch(again)
    reloaded_logits = logits(load_model_folder(tmp_path / "again", "AutoModelForCausalLM"), batch)
    assert_same(reloaded_logits, logits(again, batch), "again")
    torch.testing.assert_close(reloaded_logits, logits(mask_model(once, axes, shape), batch), atol=1e-5, rtol=1e-5)


def test_modified_missing_or_other_code_is_rejected_and_never_run(tmp_path: Path):
    save_model_folder(shipped("bert"), tmp_path)
    code = tmp_path / "modeling_pruned.py"
    assert code.read_bytes() == Path(modeling_pruned.__file__).read_bytes()
    proof = tmp_path / "proof"
    code.write_text(code.read_text() + f"\nopen({str(proof)!r}, 'w')\n")
    with pytest.raises(InputError, match="expected the code that this package ships"):
        load_model_folder(tmp_path)
    code.unlink()
    with pytest.raises(InputError, match="no such file"):
        load_model_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"]["AutoModelForSequenceClassification"] = "other.Model"
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_code = Path(modeling_pruned.__file__).read_bytes()
    code.write_bytes(save_code)
    with pytest.raises(InputError, match="expected a model for AutoModelForSequenceClassification"):
        load_model_folder(tmp_path)
    assert not proof.exists()


def test_loading_a_checkpoint_for_another_head_is_rejected(tmp_path: Path):
    save_model_folder(shipped("bert"), tmp_path / "shipped")
    with pytest.raises(InputError, match="expected a model for AutoModelForMaskedLM"):
        load_model_folder(tmp_path / "shipped", "AutoModelForMaskedLM")
    with pytest.raises(InputError, match="AutoModelForGuessing: transformers has no such class"):
        load_model_folder(tmp_path / "shipped", "AutoModelForGuessing")
    stock("bert").save_pretrained(tmp_path / "stock")
    with pytest.raises(InputError, match=r"expected the weights of a BertForMaskedLM.*missing \(cls\.predictions"):
        load_model_folder(tmp_path / "stock", "AutoModelForMaskedLM")


@pytest.mark.slow
def test_onnx_logits_match_the_pruned_class(tmp_path: Path, tokenizer: BertTokenizerFast):
    axes = axes_of("bert")
    model = prune(model_of("bert"), axes, random_shape(axes, 4, ("heads", "ffn", "hidden"), (0, 2), largest=0.6))
    assert is_pruned(model)
    export_onnx(model, tokenizer, tmp_path, ("input_ids", "attention_mask"))
    batch = padded_batch(model)
    exported = OnnxModel(tmp_path, threads=1)({name: tensor.numpy() for name, tensor in batch.items()})
    torch.testing.assert_close(torch.from_numpy(exported), logits(model, batch), atol=1e-5, rtol=1e-4)


def test_a_config_alone_builds_a_model_of_the_pruned_sizes():
    model = prune(model_of("gpt2"), axes_of("gpt2"), Shape(ALL, {"layers.1.heads": torch.tensor([0, 2])}))
    fresh = type(model)(model.config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in fresh.state_dict().items()} == shapes
    assert all(torch.isfinite(parameter).all() for parameter in fresh.parameters())


def test_the_shipped_file_does_not_import_this_package():
    text = Path(modeling_pruned.__file__).read_text()
    assert not any(f"{word} {package}" in text for word in ("import", "from") for package in ("compress", "distill"))
    with pytest.raises(AttributeError):
        modeling_pruned.PrunedNothingAtAll  # noqa: B018
