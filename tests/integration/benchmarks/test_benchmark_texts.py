"""Texts that benchmarks derive from others: cloze questions, tagger sentences and extracts of long documents."""

import random
from pathlib import Path

from transformers import AutoConfig

from benchmarks.students.sentences import split_words
from benchmarks.tasks.cloze import PLACEHOLDER, find_answers, make_questions
from benchmarks.tasks.gain import LABELS, add_token_head, build_start, extract_texts
from benchmarks.tasks.tagger_sentences import pick_sentences
from distill.data.sources.text_files import read_texts
from pipelines.runs import cli
from pipelines.settings.command_line import override_flags
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from support.tiny_models import build_model, saved

FILLER = " ".join(["and so it was"] * 12)
BUILT = "The bridge was built in 1871 by the engineer Jane Barlow Smith."
PARAGRAPH = f"{BUILT} {FILLER}. It fell in 1902, and Jane Barlow Smith saw."


def test_a_cloze_answer_occurs_once_in_its_paragraph_at_the_given_position():
    clozes = {answer: (sentence, start) for sentence, answer, start in find_answers(PARAGRAPH)}
    assert set(clozes) == {"1871", "1902"}  # the name occurs twice, so that its position would be ambiguous
    for answer, (sentence, start) in clozes.items():
        assert answer in sentence
        assert PARAGRAPH[start : start + len(answer)] == answer


def test_sentences_too_long_for_a_question_are_skipped():
    long = " ".join(["and so it was"] * 12) + " in 1871."
    assert [answer for _, answer, _ in find_answers(f"{long} {BUILT}".replace("1871 by", "1902 by"))] == [
        "1902",
        "Jane Barlow Smith",
    ]


def test_each_text_gives_one_question_that_hides_its_answer():
    rows = list(
        make_questions(
            [PARAGRAPH + "\n" + PARAGRAPH.replace("18", "17"), "Short: in 1999.", PARAGRAPH], random.Random(0)
        )
    )
    assert len(rows) == 2  # the second text is too short for a paragraph
    for row in rows:
        (answer,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
        assert PLACEHOLDER in row["question"]
        assert answer not in row["question"]
        assert row["context"][start:].startswith(answer)


def test_tagger_sentences_contain_a_name_and_separate_punctuation_tokens():
    texts = ["It was so. The old bridge, by Jane's brother, fell.", "and so it was, and so it was.", "Too short, Jane."]
    assert list(pick_sentences(texts, random.Random(0))) == [
        ["The", "old", "bridge", ",", "by", "Jane's", "brother", ",", "fell", "."]
    ]


def test_an_extract_is_the_middle_of_each_text_within_its_split(tmp_path: Path):
    texts = tmp_path / "texts"
    for split, text in (("train", "aa" + "b" * 6 + "aa"), ("dev", "short")):
        (texts / split).mkdir(parents=True)
        (texts / split / "one.txt").write_text(text)
    folder = extract_texts(str(texts), 6, tmp_path / "extract")
    assert read_texts(folder) == ["bbbbbb"]
    assert read_texts(folder, split="validation") == ["short"]


def test_only_a_checkpoint_without_a_language_modelling_head_gets_one(tokenizer, tmp_path: Path):
    headed = saved(build_model("bert", "ForMaskedLM"), tokenizer, tmp_path / "words")
    assert add_token_head(str(headed), tmp_path / "copy") == str(headed)
    bare = saved(build_model("bert", "Model"), tokenizer, tmp_path / "body")
    copy = add_token_head(str(bare), tmp_path / "copy")
    assert AutoConfig.from_pretrained(copy).architectures == ["BertForMaskedLM"]
    assert build_start("masked-lm", copy, str(headed), tmp_path / "start") == Path(headed)
    start = build_start("masked-lm", copy, "layers=1", tmp_path / "start")
    assert AutoConfig.from_pretrained(start).num_hidden_layers == 1


def test_loss_terms_of_the_caller_do_not_give_a_labels_only_student_a_teacher():
    arguments = ["--teacher", "t", "--student", "layers=1", "--data", "d", "--output", "o"]
    terms = ["--loss.hidden", "1", "--loss.ramps", '{"kl": [1, 0]}']
    once = override_flags(
        [*arguments, *terms], LABELS, SHORT_OPTIONS
    )  # as benchmarks.common.command passes them to a run
    config = cli.parse(DistillConfig, once, prog="test", about="", examples="", short=SHORT_OPTIONS)
    assert not config.loss.needs_teacher
    assert config.loss.ce == 1


def test_sentences_are_split_into_words_and_punctuation_line_by_line():
    text = "I don't know, it's #Bob's http://x.co/a?b=1.\nWON'T 'quoted'"
    assert split_words(text) == "I do n't know , it 's # Bob 's http://x.co/a?b=1.\nWO N'T ' quoted '"
