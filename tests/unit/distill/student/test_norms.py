"""Tests of students whose normalizations are of another kind than their teacher's."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import BertConfig, MobileBertForSequenceClassification

from distill.checkpoint.custom_models import (
    has_custom_norms,
    load_model_folder,
    register_custom_classes,
    save_model_folder,
)
from distill.checkpoint.norm_kinds import NORM_KINDS
from distill.errors import InputError
from distill.slicing import find_axes, prune
from distill.slicing.factorize import factorize_embeddings
from distill.slicing.shape import Shape
from distill.student.build import build_student, student_config
from distill.student.fitted_norms import fit_norms, list_norms
from distill.student.spec import check_spec, parse_spec
from support.tiny_families import logits, model_of, padded_batch

ENCODERS = ("bert", "roberta", "xlm-roberta", "electra", "electra-projected", "distilbert")
OTHER_KINDS = ("rmsnorm", "nonorm", "batchnorm")

FRESH = """
import json, sys
import torch, transformers
folder, loader = sys.argv[1:]
model, report = getattr(transformers, loader).from_pretrained(
    folder, trust_remote_code=True, output_loading_info=True
)
assert not any(report.values()), report
with torch.no_grad():
    torch.save(model.eval()(**torch.load(f"{folder}/batch.pt")).logits, f"{folder}/logits.pt")
assert not {"compress", "distill", "pipelines"} & {name.split(".")[0] for name in sys.modules}
"""


@pytest.mark.parametrize("spec", ["layers=2", "fresh,layers=2,hidden=16,heads=2"])
@pytest.mark.parametrize("family", ENCODERS)
def test_norm_layernorm_builds_the_same_stock_student_as_no_norm(family, spec):
    teacher = model_of(family)
    plain, named = build_student(teacher, spec, seed=1), build_student(teacher, f"{spec},norm=layernorm", seed=1)
    assert type(plain) is type(named) is type(teacher)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), named.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("family", ENCODERS)
def test_a_saved_student_loads_with_the_same_logits(family, kind, tmp_path):
    teacher = model_of(family)
    student = build_student(teacher, f"layers=2,norm={kind}")
    save_model_folder(student, tmp_path)
    again = load_model_folder(tmp_path)
    batch = padded_batch(teacher)
    assert torch.equal(logits(again, batch), logits(student, batch))
    assert set(again.config.norms.values()) == {kind}
    assert list_norms(teacher)[:1] == list(again.config.norms)[:1]


@pytest.mark.slow
def test_transformers_alone_loads_a_saved_student(tmp_path):
    teacher = model_of("bert")
    student = build_student(teacher, "layers=2,norm=batchnorm")
    batch = padded_batch(teacher)
    save_model_folder(student, tmp_path)
    torch.save(batch, tmp_path / "batch.pt")
    command = [sys.executable, "-c", FRESH, str(tmp_path), "AutoModelForSequenceClassification"]
    cache = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, cwd=tmp_path, env=os.environ | cache, timeout=120)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), logits(student, batch), atol=1e-6, rtol=1e-6)


def test_changed_code_beside_a_student_is_rejected(tmp_path):
    save_model_folder(build_student(model_of("bert"), "layers=2,norm=rmsnorm"), tmp_path)
    code = tmp_path / "modeling_custom_norms.py"
    code.write_text(code.read_text() + "\n")
    with pytest.raises(InputError, match="expected the code that this package ships"):
        load_model_folder(tmp_path)


def test_a_custom_norms_body_gets_the_head_of_another_task(tmp_path):
    """As after distillation on plain text: the body was trained without a head or with that of a masked LM."""
    import transformers

    save_model_folder(build_student(model_of("bert-words"), "layers=2,norm=nonorm"), tmp_path)
    register_custom_classes(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, config=config)
    assert type(model).__name__ == "CustomNormsBertForSequenceClassification"
    assert set(model.config.norms.values()) == {"nonorm"}


@pytest.mark.parametrize("family", ENCODERS)
def test_rmsnorm_moves_every_shift_but_the_last_into_the_following_biases(family):
    """The students equal one that is computed with the teacher's LayerNorms replaced by a plain formula."""
    teacher = model_of(family)
    student = build_student(teacher, "layers=0,1,2,norm=rmsnorm")
    expected = copy.deepcopy(teacher)
    norms = list_norms(expected)
    for name in norms:
        norm = expected.base_model.get_submodule(name)
        last = name == norms[-1]

        def compute(x, weight=norm.weight, bias=norm.bias, eps=norm.eps, last=last):
            scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
            return scaled if last else scaled + bias

        norm.forward = compute
    # The reference norms a sum that contains the shift of the norm before; so does the student's.
    batch = padded_batch(teacher)
    torch.testing.assert_close(logits(student, batch), logits(expected, batch), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_batchnorm_starts_in_eval_mode_as_nonorm_does(family):
    teacher = model_of(family)
    batch = padded_batch(teacher)
    fitted = [logits(build_student(teacher, f"layers=2,norm={kind}"), batch) for kind in ("nonorm", "batchnorm")]
    torch.testing.assert_close(*fitted, atol=1e-4, rtol=1e-4)


def test_a_fit_reproduces_a_norm_that_is_linear():
    """MobileBERT's NoNorm is a scale and a shift, so its fit by a batch norm is exact, the statistics included."""
    teacher = build_student(model_of("bert"), "mobilebert")
    student = build_student(teacher, "layers=3,norm=batchnorm")
    batch = padded_batch(teacher)
    torch.testing.assert_close(logits(student, batch), logits(teacher, batch), atol=1e-4, rtol=1e-4)


def test_fitted_norms_are_the_same_for_the_same_seed_only():
    teacher = model_of("bert")
    first, again, other = (fit_norms(teacher, "batchnorm", seed) for seed in (1, 1, 2))
    name = list_norms(teacher)[0]
    assert torch.equal(first[name]["running_mean"], again[name]["running_mean"])
    assert not torch.equal(first[name]["running_mean"], other[name]["running_mean"])


@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize("preset", ["mobilebert", "mobilebert-tiny", "inverted-bottleneck"])
def test_bottleneck_students_have_the_requested_norms(preset, kind):
    student = build_student(model_of("bert"), f"{preset},norm={kind}")
    if kind in ("layernorm", "nonorm"):
        assert type(student) is MobileBertForSequenceClassification
        assert student.config.normalization_type == {"layernorm": "layer_norm", "nonorm": "no_norm"}[kind]
    else:
        assert set(student.config.norms.values()) == {kind}
    assert logits(student, padded_batch(student)).isfinite().all()


@pytest.mark.parametrize(("preset", "kind"), [("mobilebert", "nonorm"), ("inverted-bottleneck", "layernorm")])
def test_naming_the_norm_that_a_preset_already_has_changes_nothing(preset, kind):
    teacher = model_of("bert")
    plain, named = build_student(teacher, preset, seed=1), build_student(teacher, f"{preset},norm={kind}", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), named.state_dict().values(), strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_decoders_keep_rmsnorm_or_get_layernorm_with_its_scale(family, tmp_path):
    teacher = model_of(family)
    batch = padded_batch(teacher)
    plain, named = build_student(teacher, "layers=2"), build_student(teacher, "layers=2,norm=rmsnorm")
    assert not has_custom_norms(named)
    assert torch.equal(logits(plain, batch), logits(named, batch))
    student = build_student(teacher, "layers=2,norm=layernorm")
    assert not any("q_norm" in name for name in student.config.norms)
    old, new = (model.model.layers[1].input_layernorm for model in (plain, student))
    assert isinstance(new, torch.nn.LayerNorm)
    assert torch.equal(new.weight, old.weight)
    assert not new.bias.any()
    save_model_folder(student, tmp_path)
    assert torch.equal(logits(load_model_folder(tmp_path), batch), logits(student, batch))
    for kind in ("nonorm", "batchnorm"):
        with pytest.raises(InputError, match=f"norm={kind}: expected layernorm or rmsnorm"):
            build_student(teacher, f"layers=2,norm={kind}")


@pytest.mark.parametrize("family", ["gpt2", "gemma", "modernbert"])
def test_other_families_are_rejected(family):
    with pytest.raises(InputError, match="can't be exchanged"):
        student_config(model_of(family).config, "layers=2,norm=rmsnorm")


def test_a_student_cannot_be_built_from_a_custom_norms_teacher():
    student = build_student(model_of("bert"), "layers=2,norm=rmsnorm")
    with pytest.raises(InputError, match="its norms aren't those of a stock class"):
        build_student(student, "layers=1")


def test_pruning_a_custom_norms_student_is_rejected():
    student = build_student(model_of("bert"), "layers=2,norm=nonorm")
    with pytest.raises(InputError, match="it can't be pruned"):
        prune(student, find_axes(student), Shape((0,)))
    with pytest.raises(InputError, match="it can't be pruned"):
        factorize_embeddings(student, 4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("layers=2,norm=rmsnrom", "did you mean 'rmsnorm'"),
        ("norm=batch-norm", "did you mean 'batchnorm'"),
        ("layers=2,norm=", "expected norm=layernorm or"),
        ("norm=rmsnorm,norm=nonorm", "norm is given twice"),
        ("some/checkpoint,norm=rmsnorm", "a trained checkpoint keeps its normalization"),
        ("bert-base-uncased,norm=rmsnorm", "a trained checkpoint keeps its normalization"),
    ],
)
def test_specs_that_are_rejected(spec, message):
    with pytest.raises(InputError, match=message):
        check_spec(spec)


def test_a_norm_does_not_change_the_sizes_of_a_spec():
    assert parse_spec("half,norm=nonorm").requested == {}
    teacher = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=4, intermediate_size=64)
    plain, named = (student_config(teacher, spec).to_dict() for spec in ("half", "half,norm=nonorm"))
    assert json.dumps(plain) == json.dumps(named)
