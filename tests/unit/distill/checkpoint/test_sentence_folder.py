"""Tests pooling, and reading and writing Sentence Transformers folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerBase

from distill.checkpoint.sentence_folder import describe_vectors, read_form
from distill.checkpoint.sentence_form import DenseProjection, SentenceForm, set_form, vector_width
from distill.errors import InputError
from distill.models.sentence_encoder import PooledModel, pool_states
from distill.student.build import build_student
from distill.tasks.sentence_embedding import SentenceEmbedding
from distill.teacher.fingerprint import stored_fingerprint, weights_fingerprint
from support.tiny_models import build_model, make_rows, saved

TEXTS = [text for text, _ in make_rows(9, 3)]
FORMS = [
    ("bert", SentenceForm("mean", normalize=True)),
    ("roberta", SentenceForm("cls", (DenseProjection(8), DenseProjection(12, bias=False, activation="Identity")))),
    ("distilbert", SentenceForm("max", (DenseProjection(8, activation="GELU"),), normalize=True)),
    ("electra-projected", SentenceForm("lasttoken", max_length=12)),
]


def build(family: str, form: SentenceForm) -> PooledModel:
    body = build_model(family, "Model")
    set_form(body.config, form)
    torch.manual_seed(7)  # initializes the projections
    model = PooledModel.from_config(body.config)
    model.load_state_dict(body.state_dict(), strict=False)
    return model


def vectors(model: PooledModel, tokenizer: PreTrainedTokenizerBase, texts: list[str] = TEXTS) -> Tensor:
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=model.form.max_length, return_tensors="pt")
    if model.config.model_type == "distilbert":
        del inputs["token_type_ids"]
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken"])
def test_pooling_uses_the_right_tokens_and_ignores_padding(pooling, side, token_batch):
    mask = token_batch["attention_mask"]
    states = torch.randn(*mask.shape, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 3
    if side == "left":
        states, mask = states.flip(1), mask.flip(1)
    book = {
        "mean": lambda rows: sum(rows) / len(rows),
        "cls": lambda rows: rows[0],
        "max": lambda rows: torch.stack([max(each) for each in rows.T]),
        "lasttoken": lambda rows: rows[-1],
    }
    wanted = torch.stack([book[pooling](row[row_mask.bool()]) for row, row_mask in zip(states, mask, strict=True)])
    torch.testing.assert_close(pool_states(states, mask, pooling), wanted)


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_the_vector_of_a_text_is_independent_of_its_batch(family, form, tokenizer):
    model = build(family, form)
    together = vectors(model, tokenizer)
    assert together.shape == (9, vector_width(model.config))
    alone = torch.cat([vectors(model, tokenizer, [text]) for text in TEXTS])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_sentence_transformers_computes_the_same_vectors_and_saves_a_loadable_folder(family, form, tokenizer, tmp_path):
    loads = pytest.importorskip("sentence_transformers").SentenceTransformer
    model = build(family, form)
    folder = saved(model, tokenizer, tmp_path / "model")
    if family == "distilbert":  # which has no token types
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        names = {"model_input_names": ["input_ids", "attention_mask"]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | names))
    theirs = loads(str(folder), device="cpu")
    encoded = torch.from_numpy(theirs.encode(TEXTS, batch_size=len(TEXTS)))
    torch.testing.assert_close(encoded, vectors(model, tokenizer), rtol=0, atol=1e-6)
    # The reverse direction: Sentence Transformers saves the folder in its newest layout.
    theirs.save(str(tmp_path / "theirs"))
    again = PooledModel.from_pretrained(tmp_path / "theirs")
    assert (again.form.pooling, again.form.projections) == (form.pooling, form.projections)
    assert again.form.normalize == form.normalize
    again.form = form  # max_length is in the tokenizer's files there
    assert torch.equal(vectors(again, tokenizer), vectors(model, tokenizer))


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_saving_and_loading_preserve_the_weights_and_the_form(family, form, tokenizer, tmp_path):
    model = build(family, form)
    folder = saved(model, tokenizer, tmp_path / "model")
    again, expected = PooledModel.from_pretrained(folder, output_loading_info=True)
    assert not any(expected.values())
    assert again.form == form
    assert not again.training
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    # model.safetensors has exactly the weight names of the stock body.
    stock, expected = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(expected.values())
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(stock).__name__]
    assert set(load_file(folder / "model.safetensors")) == set(stock.state_dict())
    # Without modules.json, as when each process wrote its shard of the weights, the form is read from the config.
    (folder / "modules.json").unlink()
    if form.projections:
        with pytest.raises(InputError, match="expected weights of Dense modules as in its config, found others"):
            PooledModel.from_pretrained(folder)
    else:
        assert PooledModel.from_pretrained(folder).form == form
        assert stored_fingerprint(folder, PooledModel) == weights_fingerprint(model)


def test_a_plain_checkpoint_is_mean_pooled_as_described(body_folder, tokenizer, tmp_path):
    model = SentenceEmbedding(()).load(str(body_folder), 0)
    assert model.form == SentenceForm("mean")
    assert read_form(body_folder) is None
    assert describe_vectors(body_folder) == "mean of the tokens (assumed: body has no modules.json)"
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(body_folder)(**inputs).last_hidden_state
    wanted = torch.stack(
        [row[row_mask.bool()].mean(0) for row, row_mask in zip(states, inputs["attention_mask"], strict=True)]
    )
    torch.testing.assert_close(vectors(model, tokenizer), wanted)
    form = SentenceForm("cls", (DenseProjection(8),), normalize=True)
    written = saved(build("bert", form), tokenizer, tmp_path / "written")
    assert describe_vectors(written) == "first token, projected to 8, normalized (modules.json)"


def test_classifiers_and_encoder_decoders_are_rejected_but_masked_lms_are_loaded(headed_folder, tokenizer, tmp_path):
    with pytest.raises(InputError, match="found BertForSequenceClassification: it was trained for another task"):
        SentenceEmbedding(()).load(str(headed_folder), 0)
    masked = saved(build_model("bert", "ForMaskedLM"), tokenizer, tmp_path / "masked")
    assert SentenceEmbedding(()).load(str(masked), 0).form == SentenceForm()
    with pytest.raises(InputError, match="'t5': expected a stock model with one vector per token, found an encoder-d"):
        PooledModel.from_config(AutoConfig.for_model("t5"))


@pytest.fixture
def folder(tokenizer, tmp_path) -> Path:
    form = SentenceForm("mean", (DenseProjection(8),), normalize=True)
    return saved(build("bert", form), tokenizer, tmp_path / "model")


def change_json(file: Path, **values: object) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | values if isinstance(content, dict) else values["modules"]))


def modules(*kinds: str) -> list[dict[str, object]]:
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("file", "values", "error"),
    [
        (
            "modules.json",
            {"modules": modules("CLIPModel")},
            "CLIPModel in modules.json: CLIPModel isn't supported",
        ),
        ("modules.json", {"modules": modules("Transformer", "LSTM", "Pooling")}, "LSTM isn't supported"),
        ("modules.json", {"modules": modules("Transformer", "Pooling", "Normalize", "Dense")}, "another order gives"),
        ("modules.json", {"modules": modules("Transformer")}, "found Transformer in modules.json: another order"),
        ("modules.json", {"modules": []}, "found none in modules.json"),
        ("modules.json", {"modules": {"0": "Transformer"}}, "expected a list of modules with type and path"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "found pooling_mode_mean_tokens, pooling_mode_m"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "found weightedmean"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "found mean, cls"),
        ("2_Dense/config.json", {"use_residual": True}, "found one with a residual"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "on another vector or without a width"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.SELU"}, "found 'SELU'"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "outputs states of tokens, found 'fill-mask'"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "found a SparseEncoder"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
            "expected no default prompt, found 'query: '",
        ),
    ],
)
def test_a_folder_whose_vectors_cannot_be_reproduced_is_rejected(folder, file, values, error):
    change_json(folder / file, **values)
    with pytest.raises(InputError, match=error):
        PooledModel.from_pretrained(folder)
    with pytest.raises(InputError, match=error):
        SentenceEmbedding.check(AutoConfig.from_pretrained(folder), str(folder))


def test_do_lower_case_requires_a_tokenizer_that_lowercases(folder):
    change_json(folder / "sentence_bert_config.json", do_lower_case=True)
    assert read_form(folder) is not None  # the tokenizer lowercases anyway
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(InputError, match="expected a tokenizer that lowercases"):
        read_form(folder)


def test_a_damaged_folder_is_rejected(folder):
    shutil.copytree(folder, folder.with_name("whole"))
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(InputError, match="expected the weights of a Dense in 2_Dense/model.safetensors"):
        PooledModel.from_pretrained(folder)
    change_json(folder.with_name("whole") / "2_Dense" / "config.json", out_features=9)
    with pytest.raises(InputError, match="expected weights of Dense modules as in its config, found others"):
        PooledModel.from_pretrained(folder.with_name("whole"))
    (folder / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"1_Pooling/config.json': no such file, or it isn't JSON"):
        PooledModel.from_pretrained(folder)
    with pytest.raises(InputError, match="expected a pooling among mean, cls, max, lasttoken, found 'sum'"):
        SentenceForm("sum")


def test_a_student_keeps_its_teachers_pooling_and_normalization(tokenizer, tmp_path):
    teacher = build("bert", SentenceForm("cls", normalize=True, max_length=20))
    assert torch.equal(vectors(build_student(teacher, "teacher"), tokenizer), vectors(teacher, tokenizer))
    student = build_student(teacher, "layers=2,hidden=16")
    assert (student.form, vector_width(student.config)) == (teacher.form, 16)
    reloaded = vectors(PooledModel.from_pretrained(saved(student, tokenizer, tmp_path / "student")), tokenizer)
    assert torch.equal(reloaded, vectors(student, tokenizer))
    torch.testing.assert_close(reloaded.norm(dim=-1), torch.ones(9))


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_every_trainable_weight_gets_a_gradient_and_only_the_pooler_is_frozen(family, form, tokenizer):
    model = build(family, form)
    model.requires_grad_(False).requires_grad_(True)  # as a caller may do after loading
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    if family == "distilbert":
        del inputs["token_type_ids"]
    model(**inputs).logits.square().sum().backward()
    waiting = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    assert not waiting
    still = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert all(name.startswith("pooler.") for name in still)


@pytest.mark.parametrize(("family", "form"), FORMS[1::2])
def test_an_exported_graph_accepts_batches_and_texts_of_other_lengths(family, form, tokenizer):
    model = build(family, form)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=64)}
    example = {name: torch.ones(2, 8, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    graph = torch.export.export(model, (), example, dynamic_shapes=dict.fromkeys(example, axes))
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        torch.testing.assert_close(graph.module()(**inputs).logits, model(**inputs).logits, rtol=1e-5, atol=1e-6)
