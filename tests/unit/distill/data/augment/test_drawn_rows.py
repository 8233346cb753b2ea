"""Rows drawn from templates, from word sequences, and from a masked model's proposals."""

from functools import partial
from random import Random

import pytest
import torch

from distill.data.augment.masked import propose_words, replace_by_proposals
from distill.data.augment.ngrams import count_ngrams
from distill.data.augment.templates import (
    FoundTemplates,
    check_template_labels,
    fill_template,
    read_slot_templates,
)
from distill.data.augment.words import join_words, split_words
from distill.errors import InputError
from pipelines.stages.prepare.augment import compute_rows
from support.tiny_models import build_model, make_rows

FILE = """
slots:
  city: [Paris, Rome]
  day: [today]
templates:
  weather: ["is it raining in {city} {day}", "weather {day}"]
"""


def test_templates_are_filled_from_lists(tmp_path):
    (tmp_path / "templates.yaml").write_text(FILE)
    file = read_slot_templates(tmp_path / "templates.yaml")
    texts = {join_words(fill_template(file.templates["weather"][0], file.slots, Random(seed))) for seed in range(20)}
    assert texts == {"is it raining in Paris today", "is it raining in Rome today"}
    with pytest.raises(InputError, match="expected labels of the data, such as 'rain', found 'weather'"):
        check_template_labels(file, ["rain"], "templates.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("templates: ['in {town}']\nslots: {city: [Rome]}", "'in {town}': expected fillers of the slot 'town'"),
        ("slots: [a, b]", "slots: expected a list of fillers for each name, found list"),
        ("templates: ['in {town}']", "expected fillers of the slot 'town', found no slots"),
        ("slots: {city: []}", r"slot city: expected a list of texts, found \[\]"),
        ("cities: [Rome]", "expected slots and templates, found cities"),
        ("- Rome", "expected slots and templates, found list"),
        ("slots: [", "expected YAML, found"),
    ],
)
def test_a_template_file_that_cannot_be_filled_is_rejected(tmp_path, content, message):
    (tmp_path / "templates.yaml").write_text(content)
    with pytest.raises(InputError, match=message):
        read_slot_templates(tmp_path / "templates.yaml")


def test_slots_are_found_where_rows_of_a_class_differ_in_a_word():
    rows = [("weather in Rome", 0), ("weather in Paris", 0), ("flights to Rome", 1), ("flights to Paris", 1)]
    rows += [("flights to Oslo", 1), ("bye", 1)]
    templates = FoundTemplates.find([(split_words(text), label) for text, label in rows])
    assert {join_words(templates.fill(0, Random(seed))) for seed in range(20)} == {"weather in oslo"}
    assert templates.fill(1, Random(0)) is None, "the data has all of its fillers"


def test_drawn_sequences_recombine_the_rows_of_their_class():
    rows = [("where is my new card", 0), ("when is my card here", 0), ("how much is it", 1)]
    models = count_ngrams([(split_words(text), label) for text, label in rows])
    texts = {join_words(words) for seed in range(300) if (words := models[0].draw(Random(seed)))}
    assert "when is my new card" in texts
    assert all("much" not in text for text in texts)
    assert {join_words(words) for seed in range(50) if (words := models[1].draw(Random(seed)))} == {"how much is it"}


def test_proposals_are_the_models_most_probable_words(tokenizer):
    model = build_model("bert", "ForMaskedLM")
    rows = [split_words(text) for text, _ in make_rows(70, 1)] + [split_words("xyz, bada.")]
    proposals = propose_words(model, tokenizer, rows, 64, partial(compute_rows, model))
    row = 3
    ids = tokenizer(join_words(rows[row]))["input_ids"]
    for position, word in enumerate(rows[row]):
        masked = list(ids)
        masked[position + 1] = tokenizer.mask_token_id
        logits = model(input_ids=torch.tensor([masked])).logits[0, position + 1]
        best = [tokenizer.decode([each]) for each in logits.argsort(descending=True)[:45].tolist()]
        expected = [each for each in best if each.isalpha() and each != word.text][:16]
        assert proposals[row][position] == expected[:15]
    assert len(proposals[-1][0]) == 15, "a word of several tokens gets similar words of the data"
    assert proposals[-1][1] == proposals[-1][3] == [], "marks get none"


def test_words_are_replaced_by_their_proposals():
    words, proposals = split_words("Pay now."), [["send", "give"], [], []]
    texts = {join_words(replace_by_proposals(words, 1.0, Random(seed), proposals)) for seed in range(20)}
    assert texts == {"Send now.", "Give now."}
    assert replace_by_proposals(words, 1.0, Random(0), [[], [], []]) is None
