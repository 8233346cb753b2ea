"""Rows longer than a model's positions are rejected before a teacher, cache or student is run."""

import copy

import pytest
import torch
from transformers import (
    BertTokenizerFast,
    BloomConfig,
    DebertaV2Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    ModernBertConfig,
)

import pipelines.cache
from distill.errors import InputError
from distill.tasks.choose import TASKS
from distill.tasks.positions import check_length, find_max_tokens
from pipelines import distill
from support.commands import rejection_of, small_run
from support.task_data import books_data
from support.tiny_models import MAX_LENGTH, VOCABULARY, build_model, saved


@pytest.fixture
def boundless_tokenizer() -> BertTokenizerFast:
    """A tokenizer without a maximum length, like many on the hub."""
    return BertTokenizerFast(vocab={word: i for i, word in enumerate(VOCABULARY)}, eos_token="[SEP]")


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra"])
def test_find_max_tokens_returns_the_longest_row_that_the_model_accepts(family):
    model = build_model(family)
    max_tokens = find_max_tokens(model.config)
    assert max_tokens is not None
    ids = torch.full((1, max_tokens), 9)
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, max_tokens + 1), 9), attention_mask=torch.ones(1, max_tokens + 1))


def test_a_pruned_model_accepts_as_many_positions_as_its_stock_class():
    model = build_model("roberta")
    pruned_config, stock = copy.deepcopy(model.config), find_max_tokens(model.config)
    pruned_config.model_type = "pruned_roberta"
    assert (
        find_max_tokens(pruned_config) == stock == model.config.max_position_embeddings - model.config.pad_token_id - 1
    )


def test_rotary_settings_of_each_type_of_layer_leave_the_limit():
    config = ModernBertConfig(max_position_embeddings=64)
    assert "rope_type" not in config.rope_parameters
    assert find_max_tokens(config) == 64
    config.rope_parameters["full_attention"]["rope_type"] = "linear"
    assert find_max_tokens(config) is None


def test_find_max_tokens_returns_none_for_models_without_a_limit():
    assert find_max_tokens(LlamaConfig(max_position_embeddings=64)) == 64
    stretched = LlamaConfig(max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    assert find_max_tokens(stretched) is None
    assert find_max_tokens(GPT2Config(n_positions=32)) == 32
    assert find_max_tokens(BloomConfig()) is None
    assert find_max_tokens(DebertaV2Config(position_biased_input=False)) is None


def test_lengths_beyond_the_positions_are_rejected_unless_the_tokenizer_truncates(tokenizer, boundless_tokenizer):
    config, task, language_task = build_model("bert").config, TASKS["text-classification"](()), TASKS["masked-lm"](())
    check_length(task, config, tokenizer, 512, "teacher")  # this tokenizer's own limit equals the model's
    check_length(task, config, boundless_tokenizer, MAX_LENGTH, "teacher")
    check_length(language_task, config, tokenizer, MAX_LENGTH, "teacher")
    for kind, truncating in ((task, boundless_tokenizer), (language_task, tokenizer)):
        with pytest.raises(InputError, match=r"data.max_length: expected at most 64 tokens, .* teacher, found 512"):
            check_length(kind, config, truncating, 512, "teacher")


@pytest.mark.parametrize("head", ["masked", "causal", "classes"])
def test_rows_longer_than_the_teachers_positions_are_rejected(
    head, boundless_tokenizer, data_folder, tmp_path, monkeypatch, capsys
):
    data = data_folder if head == "classes" else books_data(tmp_path / "books")
    if head == "causal":
        sizes = {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": MAX_LENGTH, "eos_token_id": 3}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(VOCABULARY), **sizes))
    else:
        model = build_model("bert", "ForMaskedLM" if head == "masked" else "ForSequenceClassification")
    folder = saved(model, boundless_tokenizer, tmp_path / "model")
    long = ("--data.max_length", "100")
    wanted = "data.max_length: expected at most 64 tokens, the positions of the teacher, found 100"
    assert wanted in rejection_of(distill, small_run(folder, data, tmp_path / "run", *long), monkeypatch, capsys)
    arguments = ["write", "--teacher", str(folder), "--data", str(data), "--cache", str(tmp_path / "cache"), *long]
    assert wanted in rejection_of(pipelines.cache, arguments, monkeypatch, capsys)


def test_a_student_with_too_few_positions_and_too_long_general_texts_are_rejected(
    body_folder, boundless_tokenizer, data_folder, tmp_path, monkeypatch, capsys
):
    short = saved(build_model("bert", "Model", max_position_embeddings=16), boundless_tokenizer, tmp_path / "short")
    arguments = small_run(body_folder, data_folder, tmp_path / "run")
    message = rejection_of(distill, [*arguments, "--student", str(short)], monkeypatch, capsys)
    assert "data.max_length: expected at most 16 tokens, the positions of the student, found 32" in message
    plain = ("--general.data", str(data_folder / "train.csv"), "--general.length", "65")
    message = rejection_of(distill, [*arguments, *plain], monkeypatch, capsys)
    assert "general.length: expected at most 64 tokens, the positions of the teacher, found 65" in message
