"""Tests padding: a decoder's classifier uses the last token that is not padding according to its config."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GPT2Config, GPT2ForSequenceClassification, PreTrainedModel

from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.data_module import TextDataModule
from distill.data.splits.examples import Examples, Splits
from distill.errors import InputError
from distill.tasks.task import Task, output_layer
from distill.tasks.text_classification import MultiLabel, TextClassification
from distill.teacher.head import collect_features, probe_head
from pipelines.stages.cache.job import load_task_model
from support.tiny_families import build
from support.tiny_models import FILLERS, LABELS, SPECIAL, build_model, draw_weights, saved
from unit.distill.data.test_language import decoder_tokenizer

EOS = 1  # of decoder_tokenizer
TEXTS = [" ".join(FILLERS[:2]), " ".join(FILLERS[3:12])]
NAMES = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}


def gpt2(**changes: object) -> PreTrainedModel:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 2 + len(FILLERS)}
    config = GPT2Config(**(sizes | NAMES | {"eos_token_id": EOS} | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = GPT2ForSequenceClassification(config)
        draw_weights(model)
    return model.eval()


def llama(**changes: object) -> PreTrainedModel:
    return build("llama-classifier", vocab_size=2 + len(FILLERS), **(NAMES | {"eos_token_id": EOS} | changes))


def served(folder: Path) -> dict[str, torch.Tensor]:
    """Returns both texts in one batch, as used for training and caches."""
    none, some = Examples([], None), Examples(TEXTS, None, [0, 1])
    texts = TextDataModule(Splits(LABELS, some, some, some, none, {}), load_tokenizer(folder))
    return texts.train.collate([0, 1], texts.pad_id)


@pytest.mark.parametrize("build_one", [gpt2, llama])
@pytest.mark.parametrize("padding", [None, EOS, 7])
def test_a_decoders_logits_for_a_text_are_independent_of_padding(build_one, padding, tmp_path):
    """Stock classes reject such a batch without a padding id in the config, and read padding with another id."""
    folder = saved(build_one(pad_token_id=padding), decoder_tokenizer(eos_token="<eos>"), tmp_path / "model")
    batch, task = served(folder), TextClassification(LABELS)
    config = AutoConfig.from_pretrained(folder)
    loaded = [
        task.load_with_head(str(folder), task.head_rows(config)),
        load_task_model(folder, task.name, "it"),
        TextClassification(()).load_checkpoint(folder),
    ]
    ids = batch["input_ids"]
    for model in loaded:
        together = model.eval()(input_ids=ids, attention_mask=batch["attention_mask"]).logits
        for row, count in enumerate(batch["attention_mask"].sum(1)):
            alone = model(input_ids=ids[row : row + 1, :count]).logits
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)


def test_a_written_config_and_its_tokenizer_have_the_same_padding_token(tmp_path):
    tokenizer = decoder_tokenizer(eos_token="<eos>", pad_token=FILLERS[0])
    folder = saved(gpt2(pad_token_id=EOS), tokenizer, tmp_path / "model")
    task = TextClassification(("other", "names"))
    written = saved(task.load(str(folder), 0), load_tokenizer(folder), tmp_path / "written")
    assert json.loads((written / "config.json").read_text())["pad_token_id"] == tokenizer.pad_token_id
    bare = saved(gpt2(), decoder_tokenizer(eos_token="<eos>"), tmp_path / "bare")
    written = saved(task.load(str(bare), 0), load_tokenizer(bare), tmp_path / "ended")
    assert json.loads((written / "config.json").read_text())["pad_token_id"] == EOS
    assert AutoTokenizer.from_pretrained(written).pad_token_id == EOS


def test_a_decoder_without_a_padding_or_eos_token_is_rejected(tmp_path):
    folder = saved(gpt2(), decoder_tokenizer(), tmp_path / "model")
    with pytest.raises(InputError, match="expected a tokenizer with a padding or an eos token, found neither"):
        TextClassification(LABELS).load(str(folder), 0)


def test_an_encoder_keeps_the_padding_id_of_its_config(tokenizer, tmp_path):
    """RoBERTa's positions are counted from its config's padding id."""
    folder = saved(build_model("roberta", pad_token_id=1), tokenizer, tmp_path / "model")
    assert TextClassification(LABELS).config(str(folder)).pad_token_id == 1 != SPECIAL.index("[PAD]")


@pytest.mark.parametrize("build_one", [gpt2, llama])
@pytest.mark.parametrize("task", [TextClassification(LABELS), MultiLabel(LABELS)])
def test_a_decoders_new_head_is_fitted_to_the_token_that_stock_decoders_classify(build_one, task: Task, tmp_path):
    """Stock decoders apply their head to every token and return the logits of the last, or of the token before it if
    a text ends in an eos that is also the padding.
    """
    tokenizer = decoder_tokenizer(eos_token="<eos>")
    folder = saved(build_one(), tokenizer, tmp_path / "model")
    texts = [*TEXTS, f"{TEXTS[0]} <eos>", FILLERS[5]]
    one = [[float(i == row) for i in range(5)] for row in range(4)]
    rows = task.encode(
        load_tokenizer(folder), Examples(texts, None, one if isinstance(task, MultiLabel) else [0, 1, 2, 3]), 64
    )
    model = task.load(str(folder), 0).eval()
    head, batch = output_layer(model), rows.collate([0, 1, 2, 3], EOS)
    features, labels = collect_features(model, head, [batch], task.output_rows, lambda count: None)
    expected = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(head(features), expected)
    assert torch.equal(labels, task.output_rows.labels(batch))
    probe_head(model, head, [batch], task.output_rows)
    with torch.no_grad():
        message = model(input_ids=batch["input_ids"][:2], attention_mask=batch["attention_mask"][:2]).logits
    assert message.argmax(1).tolist() == [0, 1]
