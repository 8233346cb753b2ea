"""Tests of names of persons in texts, with a tiny tagger trained on some words."""

import pickle

import pytest
import torch
from transformers import BertConfig, BertForTokenClassification

from distill.data.clean.config import CleanConfig, is_person, parse_steps
from distill.data.clean.person_names import NameFinder
from distill.data.clean.text_steps import clean_column
from distill.errors import InputError
from support.tiny_models import FILLERS, saved

PERSONS, OTHERS = FILLERS[:8], FILLERS[8:24]


@pytest.fixture(scope="module")
def tagger(tokenizer, tmp_path_factory) -> str:
    """The folder of a tagger of 64 positions that knows PERSONS."""
    torch.manual_seed(0)
    names = {0: "O", 1: "B-PER"}
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, id2label=names, label2id={name: number for number, name in names.items()},
    )  # fmt: skip
    model = BertForTokenClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor(tokenizer.convert_tokens_to_ids([*PERSONS, *OTHERS]))
    for _ in range(60):
        rows = ids[torch.randint(len(ids), (16, 12))]
        loss = model(input_ids=rows, labels=(rows[..., None] == ids[: len(PERSONS)]).any(-1).long()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.05
    return str(saved(model, tokenizer, tmp_path_factory.mktemp("tagger")))


def test_names_are_masked_and_other_words_stay(tagger):
    text = f"{OTHERS[0]} {PERSONS[0]}, {OTHERS[1]} {PERSONS[1]}."
    assert NameFinder(tagger).replace(text) == f"{OTHERS[0]} <name>, {OTHERS[1]} <name>."
    assert NameFinder(tagger, "").replace(text) == f"{OTHERS[0]} , {OTHERS[1]} ."
    assert NameFinder(tagger).replace(" ".join(OTHERS)) == " ".join(OTHERS)


def test_a_text_longer_than_the_tagger_reads_is_masked_to_its_end(tagger):
    text = " ".join([*OTHERS * 10, PERSONS[0], *OTHERS * 3, PERSONS[1]])
    assert NameFinder(tagger).replace(text) == text.replace(PERSONS[0], "<name>").replace(PERSONS[1], "<name>")


def test_a_process_that_cleans_gets_the_folder_and_not_the_model(tagger):
    finder = NameFinder(tagger)
    texts = [f"{PERSONS[0]} {OTHERS[3]}", OTHERS[4]]
    ((expected, _),) = clean_column(texts, parse_steps("names"), {"names": finder.replace})
    sent = pickle.dumps(finder.replace)
    assert len(sent) < 1000
    ((array, changes),) = clean_column(texts, parse_steps("names"), {"names": pickle.loads(sent)})
    assert array == expected
    assert (array.to_pylist(), changes.steps) == ([f"<name> {OTHERS[3]}", OTHERS[4]], {0: ["names"]})


@pytest.mark.parametrize("label", ["B-PER", "I-person", "PER"])
def test_labels_of_persons_are_recognized(label):
    assert is_person(label)
    assert not is_person("B-LOC")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": "names"}, "the step alone: nothing would find names"),
        ({"steps": "html", "tagger": "my_tagger"}, "the tagger 'my_tagger' alone"),
        ({"steps": "names", "tagger": "my_tagger", "deploy": "names"}, "every text would wait for the tagger"),
    ],
)
def test_names_and_their_tagger_are_set_together(settings, message):
    with pytest.raises(InputError) as error:
        CleanConfig(**settings)
    assert message in str(error.value)
