"""Static students in the folders of model2vec and Sentence Transformers, loaded by these libraries."""

import numpy as np
import pytest
import torch

from compress.errors import ExportError
from compress.export.common.source import Source
from compress.export.common.targets import EXTRAS, find_target
from compress.export.runtimes import open_export
from compress.export.static_vectors.table import build_static_table, compute_text_vectors
from compress.export.verify import verify_export
from compress.export.write import write_targets
from distill.models.sentence_encoder import PooledModel
from distill.student.build import build_student
from support.tiny_models import FILLERS, build_model, saved

FORMATS_OF_LIBRARIES = ("model2vec", "static-embedding")
TEXTS = ["baka", "bale bami bale", f"{' '.join(FILLERS)} {' '.join(FILLERS)}", "Baka, Ω bami!", "Ω"]


def train_weights(student):
    """Gives all rows of the table and all weights but those of 0 other values, as training does."""
    weights = student.base_model.importance.weight
    with torch.no_grad():
        student.base_model.words.weight.normal_(generator=torch.Generator().manual_seed(0))
        weights.copy_(torch.where(weights > -1e3, weights + torch.linspace(-1, 1, len(weights))[:, None], weights))
    return student


@pytest.mark.parametrize("form", FORMATS_OF_LIBRARIES)
@pytest.mark.parametrize("head", ["classifier", "encoder"])
def test_the_library_computes_the_students_vectors_of_texts(form, head, tokenizer, tmp_path):
    pytest.importorskip(EXTRAS[form])
    teacher = build_model("bert")
    if head == "encoder":
        teacher = PooledModel.from_pretrained(saved(build_model("bert", "Model"), tokenizer, tmp_path / "teacher"))
    student = train_weights(build_student(teacher, "static,embeddings=8", tokenizer=tokenizer).eval())
    write_targets(Source(student, tokenizer), [find_target(form)], tmp_path)
    vectors = open_export(form, tmp_path / form, 1)(TEXTS)
    double = compute_text_vectors(student.double(), tokenizer, TEXTS)
    np.testing.assert_allclose(vectors, double, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 1, 1, 0], atol=1e-6)  # the last one is unknown


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS_OF_LIBRARIES)
def test_a_folder_is_verified_in_a_fresh_process(form, tokenizer, tmp_path):
    pytest.importorskip(EXTRAS[form])
    student = train_weights(build_student(build_model("bert"), "static,embeddings=8", tokenizer=tokenizer).eval())
    write_targets(Source(student, tokenizer), [find_target(form)], tmp_path)
    expected = compute_text_vectors(student, tokenizer, TEXTS)
    verify_export(form, tmp_path / form, TEXTS, None, 32, expected)
    with pytest.raises(ExportError, match=f"{form}: .* has other logits than the trained model"):
        verify_export(form, tmp_path / form, TEXTS, None, 32, expected[::-1])


def test_a_text_is_the_mean_of_its_tokens_vectors(tokenizer):
    student = train_weights(build_student(build_model("bert"), "static,embeddings=8", tokenizer=tokenizer).eval())
    table = build_static_table(student, tokenizer, "model2vec")
    mean = table[tokenizer("bale bami bale", add_special_tokens=False)["input_ids"]].mean(0)
    vector = compute_text_vectors(student, tokenizer, ["bale bami bale"])[0]
    np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)


@pytest.mark.parametrize(("spec", "settings", "message"), [
    ("static,ngrams=64", {}, "expected pooling=weighted without ngrams, of one text, found .*, ngrams=64"),
    ("static,pooling=mean", {}, "found pooling=mean"),
    ("static,pooling=weighted+max", {}, r"found pooling=weighted\+max"),
    ("static", {"pair": True}, "found pooling=weighted, of two texts"),
    ("cnn", {}, "expected a static student, found a cnn"),
])  # fmt: skip
def test_what_is_no_mean_of_tokens_vectors_is_rejected(spec, settings, message, tokenizer):
    student = build_student(build_model("bert"), spec, tokenizer=tokenizer, **settings)
    with pytest.raises(ExportError, match=message):
        build_static_table(student, tokenizer, "model2vec")


def test_weights_of_special_tokens_and_models_with_attention_are_rejected(tokenizer):
    student = build_student(build_model("bert"), "static", tokenizer=tokenizer)
    with torch.no_grad():
        student.vectors.importance.weight.zero_()
    with pytest.raises(ExportError, match="weights of 0 for special tokens"):
        build_static_table(student, tokenizer, "model2vec")
    with pytest.raises(ExportError, match="expected a static student, found a BertForSequenceClassification"):
        build_static_table(build_model("bert"), tokenizer, "model2vec")
