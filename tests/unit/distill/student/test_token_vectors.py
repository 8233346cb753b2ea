"""Tests of students without attention: what they compute, what they take from the teacher, and their checkpoints."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from compress.export.common.huggingface import input_names
from distill.checkpoint.custom_models import load_model_folder, register_custom_classes, save_model_folder
from distill.checkpoint.custom_models.modeling_token_vectors import hash_pairs
from distill.data.batches.encode import split_special_tokens
from distill.errors import InputError
from distill.models.sentence_encoder import PooledModel
from distill.student.build import build_student, student_config
from distill.student.token_vectors import compute_token_vectors, reduce_width, weigh_by_frequency
from support.tiny_models import build_model, saved

SPECS = (
    "static",
    "static,pooling=mean+max,ngrams=64",
    "static,pooling=mean+order,positions=4",
    "cnn,layers=2",
    "gru,hidden=16,layers=2",
)


def make_student(spec: str, tokenizer, head: str = "ForSequenceClassification", seed: int = 0, **settings):
    """Builds a student; its pairs of tokens, which start at 0, get vectors as after training."""
    student = build_student(build_model("bert", head), f"{spec},embeddings=8", seed, tokenizer=tokenizer, **settings)
    if getattr(student.vectors, "ngrams", None) is not None:
        nn.init.normal_(student.vectors.ngrams.weight)
    return student


@torch.no_grad()
def compute_logits(student, rows: list[list[int]], padding: int = 0, types: list[list[int]] | None = None):
    longest = max(map(len, rows)) + padding
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    more = {"token_type_ids": torch.tensor(types)} if types else {}
    return student(input_ids=ids, attention_mask=mask, **more).logits


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("spec", SPECS)
def test_padding_and_other_rows_of_a_batch_change_nothing(spec, head, tokenizer):
    if head == "ForTokenClassification" and spec.startswith("static"):
        pytest.skip("a static student tags no tokens")
    student = make_student(spec, tokenizer, head)
    rows = [[5, 6, 7, 8, 9], [7, 5], [9]]
    together = compute_logits(student, rows, padding=3)
    for row, logits in zip(rows, together, strict=True):
        alone = compute_logits(student, [row])[0]
        if head == "ForTokenClassification":
            logits = logits[: len(row)]
        torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)


def test_a_static_student_is_its_head_on_the_weighted_mean_of_the_table(tokenizer):
    student = make_student("static", tokenizer)
    row = [5, 6, 7, 5]
    table, shares = student.vectors.words.weight[row], student.vectors.importance.weight[row].exp()
    mean = (table * shares).sum(0) / shares.sum()
    expected = student.classifier(torch.relu(student.dense(mean)))
    torch.testing.assert_close(compute_logits(student, [row])[0], expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("spec", "is_sensitive"), [
    ("static", False), ("static,ngrams=64", True), ("static,pooling=order", True), ("cnn", True), ("gru", True),
])  # fmt: skip
def test_which_students_notice_the_order_of_words(spec, is_sensitive, tokenizer):
    student = make_student(spec, tokenizer)
    one, other = compute_logits(student, [[5, 6, 7, 8], [8, 7, 6, 5]])
    assert torch.allclose(one, other, atol=1e-6) != is_sensitive


def test_a_gru_in_both_directions_equals_torchs(tokenizer):
    student = make_student("gru,hidden=16", tokenizer, "ForTokenClassification")
    gru = student.vectors.layers
    torchs = nn.GRU(8, 8, batch_first=True, bidirectional=True)
    for suffix, layers in (("", gru.forwards), ("_reverse", gru.backwards)):
        for name, weight in layers[0].named_parameters():
            getattr(torchs, f"{name}{suffix}").data.copy_(weight.data)
    row = [5, 6, 7, 8, 9]
    expected = student.classifier(torchs(student.vectors.words(torch.tensor([row])))[0])
    torch.testing.assert_close(compute_logits(student, [row], padding=2)[:, :5], expected.detach())


def test_each_pair_of_neighbors_has_a_bucket_of_its_own():
    ids = torch.arange(100).repeat_interleave(2)
    assert hash_pairs(ids[None], 7).max() < 7
    buckets = hash_pairs(torch.tensor([[3, 4], [4, 3], [3, 4]]), 1 << 20)
    assert buckets[0] == buckets[2] != buckets[1]


def test_pairs_of_texts_are_compared(tokenizer):
    student = make_student("static", tokenizer, pair=True)
    row, types = [5, 6, 7, 8], [[0, 0, 1, 1]]
    same = student.vectors(torch.tensor([[5, 6, 5, 6]]), token_type_ids=torch.tensor(types)).pooler_output
    width = same.shape[1] // 4
    torch.testing.assert_close(same[:, :width], same[:, width : 2 * width])
    assert same[:, 2 * width : 3 * width].abs().max() < 1e-6
    torch.testing.assert_close(same[:, 3 * width :], same[:, :width].square())
    assert not torch.equal(compute_logits(student, [row], types=types), compute_logits(student, [row], types=[[0] * 4]))


def test_positions_are_rejected_with_pairs_of_tokens(tokenizer):
    with pytest.raises(InputError, match="expected ngrams or pooling=order, found both"):
        make_student("static,ngrams=64,pooling=mean+order", tokenizer)


def test_a_pairs_student_reads_token_types_and_needs_a_tokenizer_that_has_them(tokenizer):
    assert input_names(make_student("static", tokenizer, pair=True).config)[-1] == "token_type_ids"
    assert "token_type_ids" not in input_names(make_student("static", tokenizer).config)
    untyped = copy.deepcopy(tokenizer)
    untyped.model_input_names = ["input_ids", "attention_mask"]
    with pytest.raises(InputError, match="expected a tokenizer with token_type_ids for pairs of texts"):
        make_student("static", untyped, pair=True)


def test_the_table_has_the_principal_components_of_what_the_teacher_makes_of_each_token(tokenizer):
    teacher = build_model("bert").eval()
    vectors = compute_token_vectors(teacher, tokenizer)
    before, after = split_special_tokens(tokenizer)
    ids = torch.tensor([[*before, 7, *after]])
    with torch.no_grad():
        expected = teacher.base_model(input_ids=ids).last_hidden_state.mean(1)[0]
    torch.testing.assert_close(vectors[7], expected, rtol=1e-4, atol=1e-5)
    distances, reduced = (torch.cdist(each, each) for each in (vectors, reduce_width(vectors, vectors.shape[1])))
    torch.testing.assert_close(reduced / reduced.mean(), distances / distances.mean(), rtol=1e-2, atol=1e-2)
    two = reduce_width(vectors, 2)
    variances = two.square().sum(0)
    assert variances[0] >= variances[1] > 0
    student = build_student(teacher, "static,embeddings=4", tokenizer=tokenizer)
    torch.testing.assert_close(student.vectors.words.weight, reduce_width(vectors, 4))


def test_frequent_tokens_have_small_weights(tokenizer):
    weights = weigh_by_frequency(1000)
    assert torch.all(weights.diff() > 0)
    assert 0 < weights[0] < 0.01
    student = make_student("static", tokenizer)
    expected = weigh_by_frequency(student.config.vocab_size)
    expected[tokenizer.all_special_ids] = 0
    torch.testing.assert_close(student.vectors.importance.weight[:, 0].exp(), expected, rtol=1e-4, atol=0)
    other = make_student("static,pooling=mean", tokenizer)
    lengths = other.vectors.words.weight.norm(dim=1) / student.vectors.words.weight.norm(dim=1)
    torch.testing.assert_close(lengths, weigh_by_frequency(len(lengths)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["static", "fresh,static,ngrams=64"])
def test_a_static_students_weights_of_special_tokens_are_0_and_stay_0(spec, tokenizer):
    student = make_student(spec, tokenizer).train()
    special, weights = tokenizer.all_special_ids, student.vectors.importance.weight
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
    for _ in range(3):
        logits = student(**tokenizer(["baka bale", "bami"], padding=True, return_tensors="pt")).logits
        logits.square().sum().backward()
        assert not weights.grad[special].any()
        assert weights.grad.any()
        optimizer.step()
        optimizer.zero_grad()
    assert not weights[special].exp().any()
    cls, first, sep = tokenizer("baka")["input_ids"]
    vector = student.eval().vectors(torch.tensor([[cls, first, sep]])).pooler_output[0]
    if "ngrams" not in spec:
        torch.testing.assert_close(vector, student.vectors.words.weight[first])


@pytest.fixture(scope="module")
def encoder(tokenizer, tmp_path_factory):
    return PooledModel.from_pretrained(saved(build_model("bert", "Model"), tokenizer, tmp_path_factory.mktemp("body")))


@pytest.mark.parametrize("spec", SPECS)
def test_a_sentence_encoders_student_gives_vectors_of_length_1(spec, encoder, tokenizer, tmp_path):
    student = build_student(encoder, f"{spec},embeddings=8", tokenizer=tokenizer).eval()
    rows = [[5, 6, 7, 8], [9, 5]]
    vectors = compute_logits(student, rows)
    assert vectors.shape == (2, student.config.pooled_features)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    pooled = student.vectors(torch.tensor([rows[0]])).pooler_output
    torch.testing.assert_close(vectors[:1], nn.functional.normalize(pooled))
    save_model_folder(student, tmp_path)
    register_custom_classes(tmp_path)
    for load in (load_model_folder, PooledModel.from_pretrained):
        assert torch.equal(compute_logits(load(tmp_path), rows), vectors)


def test_the_table_of_a_sentence_encoders_student_is_that_of_its_body(encoder, tokenizer):
    student = build_student(encoder, "static,embeddings=8", tokenizer=tokenizer)
    expected = reduce_width(compute_token_vectors(build_model("bert", "Model"), tokenizer), 8)
    torch.testing.assert_close(student.vectors.words.weight, expected)


@pytest.mark.parametrize("spec", SPECS)
def test_a_saved_student_is_loaded_with_the_same_logits(spec, tokenizer, tmp_path):
    student = make_student(spec, tokenizer).eval()
    save_model_folder(student, tmp_path)
    rows = [[5, 6, 7, 8], [9, 5]]
    assert torch.equal(compute_logits(load_model_folder(tmp_path), rows), compute_logits(student, rows))


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_transformers_alone_loads_a_student_with_the_code_beside_it(spec, tokenizer, tmp_path):
    student = make_student(spec, tokenizer).eval()
    save_model_folder(student, tmp_path)
    code = (
        "import torch, transformers\n"
        f"model = transformers.AutoModelForSequenceClassification.from_pretrained({str(tmp_path)!r}, "
        "trust_remote_code=True)\n"
        "ids, mask = torch.tensor([[5, 6, 7, 8], [9, 5, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])\n"
        f"torch.save(model.eval()(input_ids=ids, attention_mask=mask).logits.detach(), {str(tmp_path / 'x.pt')!r})\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path, env=environment)
    logits = torch.load(tmp_path / "x.pt", weights_only=True)
    torch.testing.assert_close(logits, compute_logits(student, [[5, 6, 7, 8], [9, 5]]))


def test_changed_code_beside_a_checkpoint_is_rejected(tokenizer, tmp_path):
    save_model_folder(make_student("cnn", tokenizer), tmp_path)
    with (tmp_path / "modeling_token_vectors.py").open("a") as file:
        file.write("\nprint('hello')\n")
    with pytest.raises(InputError, match=r"modeling_token_vectors\.py: expected the code that this package ships"):
        load_model_folder(tmp_path)


def test_the_seed_determines_the_random_weights(tokenizer):
    one, same, other = (make_student("cnn", tokenizer, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["dense.weight"], other["dense.weight"])
    fresh = make_student("fresh,static", tokenizer).vectors.words.weight
    assert not torch.equal(fresh, make_student("static", tokenizer).vectors.words.weight)


@pytest.mark.parametrize(("spec", "message"), [
    ("static,layers=2", "layers has no meaning for a static student"),
    ("cnn,ngrams=64", "ngrams has no meaning for a cnn student"),
    ("gru,kernel=3", "kernel has no meaning for a gru student"),
    ("gru,hidden=33", "hidden=33: expected an even number"),
    ("static,embeddings=0", "embeddings=0: expected at least 1"),
    ("static,positions=4", "expected pooling=order with positions"),
    ("static,pooling=mean+mean", r"expected pooling=mean or weighted or max or order, or several as mean\+max"),
    ("static,pooling=", "expected pooling=mean or weighted"),
    ("static,norm=rmsnorm", "expected embeddings, hidden, layers, kernel, ngrams, positions, pooling, found 'norm'"),
])  # fmt: skip
def test_sizes_without_a_meaning_are_rejected(spec, message):
    with pytest.raises(InputError, match=message):
        student_config(build_model("bert").config, spec)


def test_a_static_student_tags_no_tokens_and_answers_no_questions(tokenizer):
    with pytest.raises(InputError, match="classifies texts or encodes sentences, found BertForTokenClassification"):
        make_student("static", tokenizer, "ForTokenClassification")
    with pytest.raises(InputError, match="classifies texts, tags tokens or encodes sentences, found BertForQuestion"):
        make_student("cnn", tokenizer, "ForQuestionAnswering")
    with pytest.raises(InputError, match="expected the teacher's tokenizer, found none"):
        make_student("static", None)


def test_a_teacher_in_a_folder_gives_the_same_student(tokenizer, tmp_path):
    teacher = build_model("bert").eval()
    again = load_model_folder(saved(teacher, tokenizer, tmp_path))
    one, two = (build_student(each, "static", tokenizer=tokenizer).state_dict() for each in (teacher, again))
    assert all(torch.equal(one[name], two[name]) for name in one)
