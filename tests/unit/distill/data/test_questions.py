"""Tests question answering: answers mapped to tokens of every window and back, and scored as in SQuAD."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from distill.data.config import DataConfig
from distill.data.rows.questions import Questions, load_questions
from distill.data.rows.windows import encode_questions
from distill.data.sources.answer_cells import Answer, locate_answer, parse_answers
from distill.errors import InputError
from distill.losses.logits import IGNORED
from distill.tasks.logit_rows import SpanRows
from distill.tasks.question_answering import AnswerScorer, QuestionAnswering, find_best_span
from support.tiny_models import VOCABULARY

WORDS = [word for word in VOCABULARY if len(word) == 4 and word.isalpha()]
CONTEXT = " ".join(WORDS[:20])


def answer(*numbers: int) -> Answer:
    text = " ".join(WORDS[i] for i in numbers)
    return Answer(text, CONTEXT.index(text))


def write_rows(folder, rows, split="train") -> None:
    folder.mkdir(exist_ok=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def squad_row(question, context, *answers) -> dict:
    fields = {"text": [each.text for each in answers], "answer_start": [each.start for each in answers]}
    return {"question": question, "context": context, "answers": fields}


def test_answers_are_read_alike_from_every_format_and_malformed_ones_are_rejected():
    wanted = [Answer("a b", 3), Answer("b", 5)]
    lists = {"text": ["a b", "b"], "answer_start": [3, 5]}
    singles = [{"text": "a b", "answer_start": 3}, {"text": "b", "answer_start": 5}]
    for cell in (lists, singles, json.dumps(lists), str(lists)):
        assert parse_answers(cell, "here") == wanted
    assert parse_answers("a b", "here") == [Answer("a b", -1)]
    assert parse_answers(None, "here") == parse_answers({"text": [], "answer_start": []}, "here") == []
    for cell in ({"start": [1]}, {"text": ["a"], "answer_start": [1, 2]}, "{broken"):
        with pytest.raises(InputError, match="here: "):
            parse_answers(cell, "here")


def test_an_answer_is_placed_where_its_text_occurs():
    assert locate_answer("to be or to be", Answer("to", 9)) == Answer("to", 9)
    assert locate_answer("to be or to be", Answer("or", 0)) == Answer("or", 6)
    assert locate_answer("to be", Answer("not", 0)) is None


def test_questions_without_their_answer_are_counted_and_dropped_from_train(tmp_path):
    rows = [squad_row(f"q{i}", f"{CONTEXT} {i}", answer(2, 3)) for i in range(4)]
    rows += [squad_row("lost", CONTEXT, Answer("nowhere", 3)), squad_row("none", CONTEXT), squad_row("", CONTEXT)]
    for split in ("train", "validation", "test"):
        write_rows(tmp_path / "data", rows, split)
    splits = load_questions(DataConfig(path=str(tmp_path / "data")))
    lost = {split: splits.notes[f"{split}_answers_not_in_context"] for split in ("train", "validation", "test")}
    assert lost == {"train": 1, "validation": 1, "test": 1}
    assert splits.notes["dropped_empty"] == 3
    assert splits.train.texts == ["q0", "q1", "q2", "q3", "none"]
    assert splits.train.labels[-1] == []
    assert splits.test.texts == ["q0", "q1", "q2", "q3", "lost", "none"]
    write_rows(tmp_path / "bad", [rows[4]])
    with pytest.raises(InputError, match="expected answers in their contexts, found none"):
        load_questions(DataConfig(path=str(tmp_path / "bad")))


def test_an_empty_prediction_is_wrong_if_the_answer_is_not_in_its_context(tokenizer, tmp_path):
    rows = [squad_row("q", CONTEXT, answer(2)), squad_row("q", "ba ka", Answer("deka", 0)), squad_row("q", "ba ka")]
    for split in ("train", "validation", "test"):
        write_rows(tmp_path, rows, split)
    part = Questions.from_table(load_questions(DataConfig(path=str(tmp_path))).test.table())
    task = QuestionAnswering(())
    encoded = task.encode(tokenizer, part, 64)
    assert [encoded.starts[row] for row in (1, 2)] == [IGNORED, 0], "silence would be trained on or measured as right"
    assert encoded.notes == {"whose answer isn't in its context": 1}
    scorer = task.scorer(encoded)
    logits = torch.zeros(3, int(encoded.lengths.max()), 2)
    logits[:, 0] = 5
    scorer.record(np.arange(3), {}, logits)
    assert scorer.texts() == ["", "", ""]
    assert scorer.scores() == {"F1": pytest.approx(1 / 3), "exact match": pytest.approx(1 / 3)}


def test_held_out_contexts_are_not_trained_on(tmp_path):
    rows = [squad_row(f"q{i}", f"{CONTEXT} {i % 5}", answer(0)) for i in range(20)]
    write_rows(tmp_path / "data", rows)
    splits = load_questions(DataConfig(path=str(tmp_path / "data"), test_fraction=0.2, validation_fraction=0.25), 1)
    apart = [set(part.pairs) for part in (splits.train, splits.validation, splits.test)]
    assert [len(each) for each in apart] == [3, 1, 1]
    assert not apart[0] & apart[1] | apart[0] & apart[2] | apart[1] & apart[2]


def test_answers_are_mapped_to_their_tokens_in_every_window(tokenizer):
    part = Questions([WORDS[30], WORDS[31]], [CONTEXT, CONTEXT], [[answer(14, 15)], []])
    rows = encode_questions(tokenizer, part, 14)
    assert rows.truncated == 2
    assert rows.owners.tolist() == sorted(rows.owners.tolist())
    answered = 0
    for row in range(len(rows)):
        first, last = rows.starts[row], rows.ends[row]
        assert rows.allowed[row][0]
        assert rows.allowed[row].sum() > 1
        if rows.owners[row] == 1:
            assert (first, last) == (0, 0)
        elif first:
            answered += 1
            assert tokenizer.decode(rows.input_ids[row][first : last + 1]) == answer(14, 15).text
            assert rows.allowed[row][first : last + 1].all()
    assert answered >= 1
    covered = {
        tuple(offset) for row in range(len(rows)) for offset in rows.offsets[row][rows.allowed[row]][1:].tolist()
    }
    assert len(covered) == 20, "a word of the context is in no window"
    bare = encode_questions(tokenizer, Questions(part.texts, part.pairs), 14)
    assert (bare.starts == IGNORED).all()
    both = rows.join(bare)
    assert both.owners.max() == 3
    assert len(both.part.labels) == 4
    batch = both.collate([0, len(rows)], 0)
    assert batch["labels"].tolist() == [rows.starts[0], IGNORED]
    with pytest.raises(InputError, match="found a question of 9 tokens"):
        encode_questions(tokenizer, Questions([" ".join(WORDS[:9])], [CONTEXT]), 14)


def test_the_best_span_is_ordered_and_within_the_length_limit():
    rng = np.random.default_rng(0)
    starts, ends = rng.normal(size=50), rng.normal(size=50)
    inside = np.ones(50, bool)
    inside[[0, 7, 8]] = False
    wanted = max(
        (starts[i] + ends[j], i, j)
        for i in np.flatnonzero(inside)
        for j in np.flatnonzero(inside)
        if i <= j and inside[: j + 1].sum() - inside[: i + 1].sum() < 30
    )
    assert find_best_span(starts, ends, inside) == pytest.approx(wanted)


def test_predictions_of_all_windows_are_combined_into_one_answer_and_scored(tokenizer):
    task = QuestionAnswering(())
    part = Questions([WORDS[30], WORDS[31], WORDS[32]], [CONTEXT] * 3, [[answer(14, 15)], [answer(3)], []])
    rows = task.encode(tokenizer, part, 14)
    scorer = task.scorer(rows)
    assert isinstance(scorer, AnswerScorer)
    logits = torch.zeros(len(rows), int(rows.lengths.max()), 2)
    for row, owner in enumerate(rows.owners):
        if rows.starts[row] and owner == 0:
            logits[row, rows.starts[row], 0] = logits[row, rows.ends[row], 1] = 5
        if owner == 1:  # a wrong word with a small logit in every window
            logits[row, rows.allowed[row].nonzero()[0][2]] = 1
        if owner == 2:
            logits[row, 0] = 3
    order = np.random.default_rng(0).permutation(len(rows))
    for half in (order[:3], order[3:]):
        scorer.record(half, {}, logits[half])
    texts = scorer.texts()
    assert texts[0] == answer(14, 15).text
    assert texts[1] in WORDS[:20]
    assert texts[1] != answer(3).text
    assert texts[2] == ""
    assert scorer.scores() == {"F1": pytest.approx(2 / 3), "exact match": pytest.approx(2 / 3)}
    metric = task.scorer()
    metric.update(torch.tensor([[0.0, 1], [1, 0], [3, 0]]), torch.tensor([1, 1, IGNORED]))
    assert metric.compute() == 0.5


def test_cached_start_and_end_logits_are_mapped_to_their_tokens(tokenizer):
    span_rows = SpanRows()
    rows = encode_questions(tokenizer, Questions([WORDS[0], WORDS[1]], [CONTEXT, " ".join(WORDS[:7])]), 64)
    batch = rows.collate([0, 1], 0)
    values = torch.randn(*batch["input_ids"].shape, 2)
    torch.testing.assert_close(span_rows.logits(batch, values[batch["positions"]]), span_rows.logits(batch, values))


def test_missing_answers_are_skipped_and_invalid_starts_are_rejected():
    assert parse_answers({"text": None, "answer_start": None}, "here") == []
    assert parse_answers({"text": [None, "a"], "answer_start": [-1, None]}, "here") == [Answer("a", -1)]
    with pytest.raises(InputError, match="here: expected a whole number for an answer's start, found 'x'"):
        parse_answers({"text": ["a"], "answer_start": ["x"]}, "here")
    with pytest.raises(InputError, match="expected a whole number for an answer's start, found 'inf'"):
        parse_answers('{"text": ["a"], "answer_start": [Infinity]}', "here")


def test_answers_keep_their_place_in_a_context_that_begins_with_an_empty_line(tmp_path):
    context = f"\n{WORDS[0]} {WORDS[1]} and {WORDS[1]}"
    answer = Answer(WORDS[1], context.rindex(WORDS[1]))
    for split in ("train", "validation", "test"):
        write_rows(tmp_path / "data", [squad_row("q", context, answer)] * 2, split)
    assert load_questions(DataConfig(path=str(tmp_path / "data"))).train.labels[0] == [answer]
