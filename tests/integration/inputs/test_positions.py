"""Rows longer than a model are refused before a teacher, a cache or a student meets them."""

import pytest
import torch
from transformers import BertTokenizerFast, BloomConfig, DebertaV2Config, GPT2Config, GPT2LMHeadModel, LlamaConfig

import pipelines.cache
from distill.errors import InputError
from distill.tasks.choose import TASKS
from distill.tasks.positions import check_length, positions_of
from pipelines import distill
from support.commands import refused, small_run
from support.task_data import books_data
from support.tiny_models import MAX_LENGTH, VOCABULARY, build_model, saved


@pytest.fixture
def boundless() -> BertTokenizerFast:
    """A tokenizer that knows no limit, as many on the hub."""
    return BertTokenizerFast(vocab={word: i for i, word in enumerate(VOCABULARY)}, eos_token="[SEP]")


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra"])
def test_a_row_is_allowed_that_the_model_cannot_read_or_refused_though_it_can(family):
    model = build_model(family)
    most = positions_of(model.config)
    assert most is not None
    ids = torch.full((1, most), 9)
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 9), attention_mask=torch.ones(1, most + 1))


def test_a_model_without_a_table_of_positions_is_limited():
    assert positions_of(LlamaConfig(max_position_embeddings=64)) == 64
    stretched = LlamaConfig(max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    assert positions_of(stretched) is None
    assert positions_of(GPT2Config(n_positions=32)) == 32
    assert positions_of(BloomConfig()) is None
    assert positions_of(DebertaV2Config(position_biased_input=False)) is None


def test_a_classifiers_tokenizer_cuts_in_vain(tokenizer, boundless):
    own, task, words = build_model("bert").config, TASKS["text-classification"](()), TASKS["masked-lm"](())
    check_length(task, own, tokenizer, 512, "teacher")  # this one's own limit is the model's
    check_length(task, own, boundless, MAX_LENGTH, "teacher")
    check_length(words, own, tokenizer, MAX_LENGTH, "teacher")
    for kind, cutting in ((task, boundless), (words, tokenizer)):
        with pytest.raises(InputError, match=r"data.max_length: expected at most 64 tokens, .* teacher, found 512"):
            check_length(kind, own, cutting, 512, "teacher")


@pytest.mark.parametrize("head", ["masked", "causal", "classes"])
def test_a_teacher_is_asked_about_longer_rows_than_it_can_read(
    head, boundless, data_folder, tmp_path, monkeypatch, capsys
):
    data = data_folder if head == "classes" else books_data(tmp_path / "books")
    if head == "causal":
        sizes = {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": MAX_LENGTH, "eos_token_id": 3}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(VOCABULARY), **sizes))
    else:
        model = build_model("bert", "ForMaskedLM" if head == "masked" else "ForSequenceClassification")
    folder = saved(model, boundless, tmp_path / "model")
    long = ("--data.max_length", "100")
    wanted = "data.max_length: expected at most 64 tokens, the positions of the teacher, found 100"
    assert wanted in refused(distill, small_run(folder, data, tmp_path / "run", *long), monkeypatch, capsys)
    words = ["write", "--teacher", str(folder), "--data", str(data), "--cache", str(tmp_path / "cache"), *long]
    assert wanted in refused(pipelines.cache, words, monkeypatch, capsys)


def test_a_student_or_plain_text_may_be_shorter_or_longer(
    body_folder, boundless, data_folder, tmp_path, monkeypatch, capsys
):
    short = saved(build_model("bert", "Model", max_position_embeddings=16), boundless, tmp_path / "short")
    words = small_run(body_folder, data_folder, tmp_path / "run")
    said = refused(distill, [*words, "--student", str(short)], monkeypatch, capsys)
    assert "data.max_length: expected at most 16 tokens, the positions of the student, found 32" in said
    plain = ("--general.data", str(data_folder / "train.csv"), "--general.length", "65")
    said = refused(distill, [*words, *plain], monkeypatch, capsys)
    assert "general.length: expected at most 64 tokens, the positions of the teacher, found 65" in said
