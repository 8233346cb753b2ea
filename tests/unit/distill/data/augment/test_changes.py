"""Each way of changing a row: what it changes, what it leaves, and that the seed decides it."""

from random import Random

import pytest

from distill.data.augment import noise, order, rules
from distill.data.augment.lexicon import check_lexicon_language, find_synonyms, read_lexicon
from distill.data.augment.words import join_words, split_answered, split_tagged, split_words
from distill.errors import InputError

TEXT = "My card didn't arrive, and I paid $1,250.50 on 12/03. Why?"


def changes_of(change, text: str = TEXT, rate: float = 0.3, seeds: int = 200) -> set[str]:
    variants = (change(split_words(text), rate, Random(seed)) for seed in range(seeds))
    return {join_words(words) for words in variants if words is not None}


@pytest.mark.parametrize("text", [TEXT, "  two  blanks\there ", "a", "well-known l'été “quoted”", "1.5%", "…"])
def test_words_join_to_the_text_they_were_split_from(text):
    assert join_words(split_words(text)) == text.strip()


@pytest.mark.parametrize(
    "change",
    [
        noise.add_keyboard_typos,
        noise.add_ocr_errors,
        noise.change_case,
        noise.change_punctuation,
        noise.delete_words,
        order.swap_words,
        order.swap_phrases,
        order.shuffle_sentences,
        order.crop,
        rules.change_contractions,
    ],
)
def test_a_change_makes_another_text_and_the_seed_decides_which(change):
    first, again = (change(split_words(TEXT), 0.3, Random(7)) for _ in range(2))
    assert first == again
    assert TEXT not in changes_of(change)
    assert changes_of(change)


def test_typing_errors_are_one_edit_of_words_of_letters():
    variants = changes_of(noise.add_keyboard_typos, "card 4711", 1.0)
    assert {"crad 4711", "cad 4711", "carrd 4711", "vard 4711"} <= variants
    assert all(text.endswith(" 4711") for text in variants)


def test_ocr_confuses_letters_that_look_alike():
    assert {"rnodem", "rnodern", "modern"} & changes_of(noise.add_ocr_errors, "modem", 1.0)


def test_at_least_one_word_stays_and_one_is_left_out():
    assert changes_of(noise.delete_words, "a b", 1.0) == set()
    assert changes_of(noise.delete_words, "a b", 0.01) == {"a", "b"}


def test_phrases_of_other_rows_are_put_between_words():
    rows = [split_words("one two three"), split_words("four!")]
    variants = {
        join_words(words)
        for seed in range(100)
        if (words := noise.insert_phrases(split_words("a b"), 0.5, Random(seed), rows))
    }
    assert variants == {
        "a four b",
        "a one b",
        "a two b",
        "a three b",
        "a one two b",
        "a two three b",
        "a one two three b",
    }


def test_swapped_words_keep_the_blanks_and_marks_in_place():
    assert changes_of(order.swap_words, "one two, three", 0.1) == {"two one, three"}


def test_phrases_end_at_marks_and_before_conjunctions():
    assert changes_of(order.swap_phrases, "wait here, please and go") == {
        "please wait here, and go",
        "and go please wait here,",
        "wait here, and go please",
    }


def test_sentences_change_places():
    assert changes_of(order.shuffle_sentences, "One. Two!") == {"Two! One."}
    assert changes_of(order.shuffle_sentences, "only one sentence.") == set()


def test_a_crop_is_a_part_of_the_text_with_fixed_words_in_it():
    assert changes_of(order.crop, "a b c d", 0.5) == {"a b", "b c", "c d"}
    words = split_answered("a b c d", [(6, 7)])
    variants = {join_words(cropped) for seed in range(50) if (cropped := order.crop(words, 0.5, Random(seed)))}
    assert variants == {"c d"}


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("I do not know", "I don't know"),
        ("I don't know", "I do not know"),
        ("Can not", "Can't"),
        ("It's late", "It is late"),
        ("I'm here", "I am here"),
        ("DON'T", "DO NOT"),
        ("let us go", "let's go"),
        ("It is late", "It's late"),
    ],
)
def test_contractions_are_formed_and_expanded(text, other):
    assert changes_of(rules.change_contractions, text, 1.0) == {other}


@pytest.mark.parametrize(
    "text", ["do you have one", "tell me what it is", "it's been sent", "I'd asked before", "so it is."]
)
def test_words_that_have_no_other_form_stay(text):
    assert changes_of(rules.change_contractions, text, 1.0) == set()


def test_numbers_take_the_place_of_others_of_their_shape():
    numbers = rules.find_numbers([split_words("paid 50 and 75 on 12/03")])
    variants = {
        join_words(rules.swap_numbers(split_words("50 at 1.5"), 1.0, Random(seed), numbers)) for seed in range(50)
    }
    assert {text.split()[0] for text in variants} == {"75"}
    assert all(text.split()[2][1] == "." for text in variants)


def test_fillers_of_a_slot_take_each_others_place():
    slots = {"currency": [("us", "dollars"), ("euros",)], "city": [("paris",)]}
    words = rules.swap_fillers(split_words("Euros in Paris"), 1.0, Random(0), slots)
    assert join_words(words) == "Us dollars in Paris"
    assert rules.swap_fillers(split_words("Yen"), 1.0, Random(0), slots) is None


def test_names_are_exchanged_with_their_tags():
    labels = ("O", "B-PER", "I-PER", "B-LOC")
    inner, types = frozenset({2}), {1: "PER", 2: "PER", 3: "LOC"}
    rows = [
        split_tagged(["Ada", " Byron", " lives"], [1, 2, 0], inner),
        split_tagged(["Bob", " in", " Rome"], [1, 0, 3], inner),
    ]
    names = rules.find_names(rows, types)
    assert {kind: [join_words(name) for name in entries] for kind, entries in names.items()} == {
        "PER": ["Ada Byron", "Bob"],
        "LOC": ["Rome"],
    }
    variants = {
        tuple((word.text, labels[word.tag]) for word in words)
        for seed in range(20)
        if (words := rules.swap_names(rows[0], 1.0, Random(seed), names, types))
    }
    assert variants == {(("Bob", "B-PER"), ("lives", "O"))}


def test_the_words_of_a_name_move_together():
    words = split_tagged(["Ada", " Byron", " lives"], [1, 2, 0], frozenset({2}))
    variants = {join_words(changed) for seed in range(50) if (changed := order.swap_words(words, 0.5, Random(seed)))}
    assert variants == {"lives Ada Byron"}
    variants = {join_words(changed) for seed in range(50) if (changed := noise.delete_words(words, 0.1, Random(seed)))}
    assert variants == {"lives", "Ada Byron"}


def test_fixed_words_are_never_changed():
    words = split_answered("In 1999 it isn't Paris, and that is it.", [(3, 7), (17, 22)])
    for change in (noise.add_keyboard_typos, noise.add_ocr_errors, noise.change_case, noise.delete_words):
        for seed in range(100):
            changed = change(words, 1.0, Random(seed))
            assert changed is None or {"1999", "Paris"} <= {word.text for word in changed}


LEXICON = "buy\tpurchase\tacquire\nbig\tlarge\nran\tsprinted\n"


def test_synonyms_have_the_inflection_and_the_case_of_their_word(tmp_path):
    (tmp_path / "lexicon.tsv").write_text(LEXICON)
    lexicon = read_lexicon(tmp_path / "lexicon.tsv")
    assert find_synonyms("buys", lexicon) == ["purchases", "acquires"]
    assert find_synonyms("Buying", lexicon) == ["purchasing", "acquiring"]
    assert find_synonyms("unknown", lexicon) == []
    variants = {
        join_words(words)
        for seed in range(20)
        if (words := rules.replace_synonyms(split_words("Big cars"), 1.0, Random(seed), lexicon))
    }
    assert variants == {"Large cars"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("buy purchase\n", "line 1: expected a word and its synonyms separated by tabs, found 'buy purchase'"),
        ("# nothing\n", "expected a word in each line, found none"),
    ],
)
def test_a_lexicon_without_synonyms_is_rejected(tmp_path, content, message):
    (tmp_path / "lexicon.tsv").write_text(content)
    with pytest.raises(InputError, match=message):
        read_lexicon(tmp_path / "lexicon.tsv")


def test_a_lexicon_of_another_language_is_rejected():
    texts = [f"where is my card number {word}" for word in ("a", "b", "c")]
    check_lexicon_language({"card": ["pass"]}, texts, "lexicon.tsv")
    with pytest.raises(InputError, match="expected words of the data's language, found 0 of its 8 different words"):
        check_lexicon_language({"Karte": ["Ausweis"]}, texts, "lexicon.tsv")
