"""Tests two tokenizers on one text: aligned spans, shared vocabularies, and the rows built from them."""

import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from distill.data.alignment.encoded import AlignedRows, encode_aligned, select_teacher_inputs
from distill.data.alignment.tokens import align_spans, find_spellings, shared_vocabulary
from distill.data.batches.batches import TrainBatches
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.masking.config import MaskConfig
from distill.data.masking.twice_masked import MaskedAlignedRows
from distill.errors import InputError
from distill.losses.cross_tokenizer import find_labelled_spans
from distill.losses.logits import IGNORED
from support.two_tokenizers import SENTENCES, byte_level, sentencepiece, wordpiece

PAIRS = {
    "wordpiece and trimmed bytes": (wordpiece, byte_level),
    "wordpiece and whole bytes": (wordpiece, lambda: byte_level(trim=False)),
    "two byte-level": (lambda: byte_level(300, trim=False), byte_level),
    "wordpiece and sentencepiece": (wordpiece, sentencepiece),
    "sentencepiece and bytes": (sentencepiece, lambda: byte_level(trim=False)),
}


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Returns texts of common and rare words, runs of blanks, line breaks, and characters of several bytes."""
    rng = random.Random(seed)
    words = " ".join(SENTENCES).split()
    parts = ["ü", "中文", "😀", "é", "'", "--", "3.14", "Mädchen", "unbelievable", "THE"]
    blanks = [" ", " ", " ", "  ", "\n", " \n\n", "", ""]
    return [
        "".join(rng.choice(words + parts * 2) + rng.choice(blanks) for _ in range(rng.randint(1, 25)))
        for _ in range(count)
    ]


def offsets_of(tokenizer, text: str) -> np.ndarray:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return np.array(encoding["offset_mapping"], np.int64).reshape(-1, 2)


def rejection(call, *args, **settings) -> str:
    with pytest.raises(InputError) as caught:
        call(*args, **settings)
    return str(caught.value)


def split_offsets(offsets: np.ndarray, length: int) -> list[set[int]]:
    """Returns, for each boundary between two tokens with characters, the offsets at which the text can be split."""
    with_text = offsets[offsets[:, 1] > offsets[:, 0]].tolist()
    return [
        {
            c
            for c in range(length + 1)
            if all(e <= c for _, e in with_text[:k]) and all(s >= c for s, _ in with_text[k:])
        }
        for k in range(1, len(with_text))
    ]


def longest_chain(a: list[set[int]], b: list[set[int]]) -> int:
    """Returns the largest number of boundaries that can coincide, by dynamic programming over all pairs."""
    best = np.zeros((len(a) + 1, len(b) + 1), int)
    for i in range(len(a)):
        for j in range(len(b)):
            best[i + 1, j + 1] = max(best[i, j + 1], best[i + 1, j], best[i, j] + bool(a[i] & b[j]))
    return int(best[-1, -1])


# --- spans


@pytest.mark.parametrize("pair", PAIRS)
def test_spans_cover_every_token_hold_the_same_text_and_are_minimal(pair):
    a, b = (make() for make in PAIRS[pair])
    several = 0
    for text in random_texts(30):
        offsets = offsets_of(a, text), offsets_of(b, text)
        spans = align_spans(*offsets)
        for side, places in ((spans[:, :2], offsets[0]), (spans[:, 2:], offsets[1])):
            inside = [k for first, end in side for k in range(first, end)]
            assert inside == sorted(set(inside))
            assert {k for k, (start, end) in enumerate(places) if end > start} <= set(inside)
        for first, end, teacher_first, teacher_end in spans:
            covered = [
                (places[f:e, 0].min(), places[f:e, 1].max())
                for places, f, e in ((offsets[0], first, end), (offsets[1], teacher_first, teacher_end))
            ]
            assert len({text[start:stop].strip() for start, stop in covered}) == 1
            several += end - first > 1 and teacher_end - teacher_first > 1
        assert len(spans) == longest_chain(*(split_offsets(each, len(text)) for each in offsets)) + 1
    assert several, "no span of several tokens was met"


def test_spans_equal_examples_computed_by_hand():
    words = [(0, 0), (0, 5), (6, 8), (8, 11), (0, 0)]  # [CLS] hello wo ##rld [SEP]
    whole, trimmed = [(0, 3), (3, 5), (5, 11)], [(0, 3), (3, 5), (6, 11)]  # hel lo Ġworld
    for letters in (whole, trimmed):
        assert align_spans(np.array(words), np.array(letters)).tolist() == [[1, 2, 0, 2], [2, 4, 2, 3]]
    alone = [(0, 5), (5, 6), (6, 11)]  # hello Ġ world
    assert align_spans(np.array(words), np.array(alone)).tolist() == [[1, 2, 0, 1], [2, 4, 1, 3]]
    # The second token holds the last byte of character 0 and the first of character 1.
    shared_letter = [(0, 1), (0, 2), (1, 2), (2, 3)]
    assert align_spans(np.array([(0, 1), (1, 2), (2, 3)]), np.array(shared_letter)).tolist() == [
        [0, 2, 0, 3],
        [2, 3, 3, 4],
    ]
    for empty in ([], [(0, 0), (0, 0)]):
        assert align_spans(np.array(empty).reshape(-1, 2), np.array(whole)).shape == (0, 4)


# --- vocabularies


@pytest.mark.parametrize("make", [wordpiece, byte_level, sentencepiece])
def test_a_vocabulary_shares_every_token_with_itself(make):
    ids = np.arange(len(make()))
    assert shared_vocabulary(make(), make()).tolist() == np.stack([ids, ids], 1).tolist()


TOKENS = {
    "bytes": {("the", "Ġthe"), ("##ing", "ing"), (",", ","), ("[SEP]", "<eos>")},
    "pieces": {("Ġthe", "▁the"), ("Ġ", "▁"), ("\u0102", "<0x02>"), ("<eos>", "</s>")},
}


@pytest.mark.parametrize(("a", "b", "kind"), [(wordpiece, byte_level, "bytes"), (byte_level, sentencepiece, "pieces")])
def test_shared_tokens_spell_the_same_text(a, b, kind):
    a, b = a(), b()
    pairs = shared_vocabulary(a, b)
    names = [(a.convert_ids_to_tokens(int(i)), b.convert_ids_to_tokens(int(j))) for i, j in pairs]
    assert TOKENS[kind] <= set(names)
    assert len(set(pairs[:, 0])) == len(set(pairs[:, 1])) == len(pairs)
    for (i, j), (name, _) in zip(pairs, names, strict=True):
        if i in a.all_special_ids:
            continue
        texts = [each.decode([each.convert_tokens_to_ids("t"), int(number)]) for each, number in ((a, i), (b, j))]
        plain = {text.replace(" ", "") for text in texts}
        assert len(plain) == 1
        assert len(set(texts)) == 1 or not name.removeprefix("##").isalnum(), "one of the two begins a word"


def test_spellings_of_the_tokens_of_a_text_join_to_its_bytes():
    tokenizer = byte_level()
    spelled = {number: text for (kind, text), number in find_spellings(tokenizer).items() if kind == "text"}
    for text in random_texts(40, seed=1):
        assert b"".join(spelled[i] for i in tokenizer(text)["input_ids"]) == text.encode()


# --- rows


@pytest.mark.parametrize(("length", "teacher_length"), [(12, 40), (64, 12), (24, 24), (400, 400)])
def test_rows_hold_all_text_once_within_both_length_limits(length, teacher_length):
    student, teacher = wordpiece(), byte_level()
    texts = random_texts(40, seed=2)
    rows = encode_aligned(student, teacher, texts, length, teacher_length)
    assert rows.unaligned == 0
    assert rows.lengths.max() <= length
    assert max(map(len, rows.teacher_input_ids)) <= teacher_length
    student_ids = [i for row in rows.input_ids for i in row[1:-1]]
    wanted = [
        i for text in texts for i in [*student(text, add_special_tokens=False)["input_ids"], student.sep_token_id]
    ]
    assert len(wanted) - len(student_ids) == rows.single
    if not rows.single:
        assert student_ids == wanted
        teacher_ids = np.concatenate(rows.teacher_input_ids).tolist()
        assert teacher.decode(teacher_ids) == "".join(f"{text}<eos>" for text in texts)


def test_spans_of_a_row_hold_the_same_text_on_both_sides():
    student, teacher = wordpiece(), byte_level()
    rows = encode_aligned(student, teacher, SENTENCES, 20, 30)
    for ids, teacher_ids, spans in zip(rows.input_ids, rows.teacher_input_ids, rows.spans, strict=True):
        assert spans[0].tolist()[0] == 1
        assert (spans[1:, [0, 2]] == spans[:-1, [1, 3]]).all(), "a token is in no span"
        for first, end, teacher_first, teacher_end in spans:
            message = [
                each.decode(part, skip_special_tokens=True)
                for each, part in ((student, ids[first:end]), (teacher, teacher_ids[teacher_first:teacher_end]))
            ]
            plain = student.backend_tokenizer.normalizer.normalize_str(message[1]).replace(" ", "")
            assert message[0].replace(" ", "").replace("##", "") == plain


def test_texts_and_tokens_that_cannot_be_compared_are_counted():
    student, teacher = wordpiece(), byte_level()
    long = "ж" * 9  # one unknown token for the student, 18 bytes for the teacher
    rows = encode_aligned(student, teacher, ["a mill", long, "\u200b"], 12, 12)
    assert (len(rows), rows.unaligned, rows.single) == (1, 2, 1), "after the long word only the text's end is left"
    assert len(encode_aligned(student, teacher, [], 12, 12)) == 0
    unknown = encode_aligned(student, teacher, ["the ж mill"], 12, 12)
    assert unknown.unknown == 1
    assert student.unk_token_id in unknown.input_ids[0]
    index = unknown.input_ids[0].tolist().index(student.unk_token_id)
    assert index not in unknown.spans[0][:, 0]
    assert encode_aligned(teacher, teacher, ["a b"] * 3, 2, 2).single > 0


def test_spans_of_a_batch_point_to_next_token_labels():
    student, teacher = wordpiece(), byte_level()
    rows = encode_aligned(student, teacher, SENTENCES, 20, 30)
    order = [3, 0, 5]
    batch = rows.collate(order, student.pad_token_id)
    alone = LanguageBlocks(rows.input_ids).collate(order, student.pad_token_id)
    assert all(torch.equal(batch[name], alone[name]) for name in alone)
    teacher_ids = LanguageBlocks(rows.teacher_input_ids).collate(order, teacher.pad_token_id)
    assert torch.equal(batch["teacher_labels"], teacher_ids["labels"])
    assert torch.equal(select_teacher_inputs(batch)["attention_mask"], teacher_ids["attention_mask"])
    assert torch.equal(select_teacher_inputs(batch)["input_ids"], teacher_ids["input_ids"])
    for k, i in enumerate(order):
        inner_spans = [each for each in rows.spans[i].tolist() if each[0] > 0 and each[2] > 0]
        assert len(inner_spans) == len(rows.spans[i]) - 1, "byte-level rows have nothing before their first token"
        batch_spans = batch["spans"][k][: len(inner_spans)]
        for (first, end, teacher_first, teacher_end), (a, b, c, d) in zip(
            inner_spans, batch_spans.tolist(), strict=True
        ):
            assert batch["labels"][k, a:b].tolist() == rows.input_ids[i][first:end].tolist()
            assert (
                batch["teacher_labels"][k, c:d].tolist()
                == rows.teacher_input_ids[i][teacher_first:teacher_end].tolist()
            )
        assert not batch["spans"][k, len(inner_spans) :].any()
    labelled = find_labelled_spans(batch["spans"], batch["labels"], batch["teacher_labels"])
    assert labelled.sum(1).tolist() == [len(rows.spans[i]) - 1 for i in order]
    shuffled = TrainBatches(rows, 2, 0, seed=0)
    assert {"spans", "teacher_input_ids"} <= set(next(iter(shuffled)))


@pytest.fixture(scope="module")
def masked_rows() -> tuple[AlignedRows, MaskedAlignedRows]:
    rows = encode_aligned(wordpiece(), byte_level(masked=True), SENTENCES * 3, 24, 40)
    return rows, MaskedAlignedRows.build(
        rows, MaskConfig(rate=0.3, random=0.2, replaced=0.7), wordpiece(), byte_level(masked=True)
    )


def test_masked_spans_are_hidden_from_both_models(masked_rows):
    rows, data = masked_rows
    batch = data.collate(range(len(rows)), 0)
    total = chosen = 0
    for i in range(len(rows)):
        spans = [tuple(each) for each in batch["spans"][i].tolist() if each[1] > each[0]]
        assert set(spans) <= {tuple(each) for each in rows.spans[i].tolist()}
        for side, ids, name in ((0, rows.input_ids[i], ""), (2, rows.teacher_input_ids[i], "teacher_")):
            requested = {k for each in spans for k in range(each[side], each[side + 1])}
            labels = batch[f"{name}labels"][i].tolist()
            assert {k for k, label in enumerate(labels) if label != IGNORED} == requested
            assert batch[f"{name}positions"][i].nonzero()[:, 0].tolist() == sorted(requested)
            assert all(labels[k] == ids[k] for k in requested)
            assert all(batch[f"{name}input_ids"][i, k] == ids[k] for k in range(len(ids)) if k not in requested)
        for first, end, teacher_first, teacher_end in spans:
            student_tokens, teacher_tokens = (
                batch["input_ids"][i, first:end],
                batch["teacher_input_ids"][i, teacher_first:teacher_end],
            )
            hidden = (student_tokens == wordpiece().mask_token_id).tolist() + (
                teacher_tokens == byte_level(masked=True).mask_token_id
            ).tolist()
            assert len(set(hidden)) == 1
        chosen, total = chosen + len(spans), total + len(rows.spans[i])
    assert 0.2 < chosen / total < 0.4
    assert find_labelled_spans(batch["spans"], batch["labels"], batch["teacher_labels"]).sum() == chosen


def test_masks_on_two_tokenizers_depend_on_the_epoch_but_not_on_the_batch(masked_rows):
    rows, data = masked_rows
    alone, batched = data.collate([4], 0, epoch=2), data.collate([0, 4], 0, epoch=2)
    for name in ("input_ids", "teacher_input_ids", "spans"):
        assert torch.equal(alone[name][0], batched[name][1, : alone[name].shape[1]])
    first, again, later = (
        data.collate(range(len(rows)), 0, epoch)["labels"] for epoch in (1, 1 + data.config.passes, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert data.lengths.tolist() == rows.lengths.tolist()
    assert data.notes == rows.notes
    # The count depends on the tokenizer's training, whose ties may be broken either way.
    assert set(data.notes) <= {"single"}


def test_unsuitable_tokenizers_and_lengths_are_rejected():
    slow = ByT5Tokenizer()
    assert "expected a fast one" in rejection(shared_vocabulary, slow, wordpiece())
    assert "expected a fast one" in rejection(encode_aligned, wordpiece(), slow, ["a"], 9, 9)
    endless = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    assert "expected an eos or a sep token" in rejection(encode_aligned, wordpiece(), endless, ["a"], 9, 9)
    assert "teacher_length: expected at least 2" in rejection(encode_aligned, wordpiece(), byte_level(), ["a"], 9, 1)
    assert "length: expected at least 4 tokens a row, found 3" in rejection(
        encode_aligned, wordpiece(), byte_level(), ["a"], 3, 9
    )
    rows = encode_aligned(wordpiece(), byte_level(), SENTENCES, 20, 20)
    assert "expected a mask token" in rejection(MaskedAlignedRows.build, rows, MaskConfig(), wordpiece(), byte_level())
