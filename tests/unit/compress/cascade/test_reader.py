"""The reader of a cascade: which member answers, which run, and pairs, on graphs computed by hand."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from compress.cascade.reader import Cascade
from compress.cascade.thresholds import ChosenCascade
from compress.cascade.write import classify_in_subprocess, write_cascade

WORDS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "yes": 3, "no": 4, "perhaps": 5}
LABELS = ("agrees", "refuses")
SMALL = {"yes": (9.0, 0.0), "no": (0.0, 9.0)}  # unsure of other words
LARGE = {"yes": (9.0, 0.0), "no": (0.0, 9.0), "perhaps": (0.0, 9.0)}


def write_member(folder: Path, logits: dict[str, tuple[float, float]], words: dict[str, int] = WORDS) -> Path:
    """Writes a model whose logits are the sum of its words' logits, those of a second text negated."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    table = np.zeros((len(words), 2), np.float32)
    for word, values in logits.items():
        table[words[word]] = values
    constants = {"table": table, "signs": np.array([[1.0], [-1.0]], np.float32), "axis": np.array([1])}
    names = ("input_ids", "token_type_ids")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in names]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["own"]),
        helper.make_node("Gather", ["signs", "token_type_ids"], ["sign"]),
        helper.make_node("Mul", ["own", "sign"], ["signed"]),
        helper.make_node("ReduceSum", ["signed", "axis"], ["logits"], keepdims=0),
    ]
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])
    stored = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "member", inputs, [output], stored)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "model.onnx"
    )
    return folder


def build(
    folder: Path, *, multi_label: bool = False, words: dict[str, int] = WORDS, lengths: tuple[int, int] = (8, 8)
) -> Path:
    exports = {"small": write_member(folder / "s", SMALL), "large": write_member(folder / "l", LARGE, words)}
    chosen = ChosenCascade(("small", "large"), (0.5, 0.0), 1.0, 1.0, (0.7, 0.3))
    temperatures, max_lengths = {"small": 1.0, "large": 1.0}, dict(zip(exports, lengths, strict=True))
    write_cascade(
        folder / "cascade", chosen, exports, temperatures, labels=LABELS, multi_label=multi_label,
        max_lengths=max_lengths,
    )  # fmt: skip
    return folder / "cascade"


def test_an_unsure_member_leaves_the_text_to_the_next(tmp_path):
    predictions = Cascade(build(tmp_path)).classify(["yes", "no no", "perhaps"])
    assert [(each.label, each.member) for each in predictions] == [
        ("agrees", "small"), ("refuses", "small"), ("refuses", "large"),
    ]  # fmt: skip
    assert all(0.9 < each.margin <= 1 for each in predictions)


def test_a_member_that_does_not_run_gets_no_inputs(tmp_path):
    cascade = Cascade(build(tmp_path))
    ran = []

    def list_inputs(text: str):
        for name, inputs in zip(cascade.names, cascade.encode(text), strict=True):
            ran.append(name)
            yield inputs

    cascade.answer(list_inputs("yes"))
    assert ran == ["small"]
    cascade.answer(list_inputs("perhaps"))
    assert ran == ["small", "small", "large"]


def test_members_with_equal_tokenizers_share_them_and_others_have_their_own(tmp_path):
    shared = Cascade(build(tmp_path / "same")).load_tokenizers()
    assert shared[0] is shared[1]
    turned = dict(zip(WORDS, (0, 1, 2, 5, 4, 3), strict=True))
    cascade = Cascade(build(tmp_path / "other", words=turned))
    assert cascade.load_tokenizers()[0] is not cascade.load_tokenizers()[1]
    assert [each.label for each in cascade.classify(["perhaps", "yes"])] == ["refuses", "agrees"]


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_fresh_process_gives_the_same_answers_for_texts_and_pairs(multi_label, tmp_path):
    folder = build(tmp_path, multi_label=multi_label)
    texts = ["yes", "perhaps", ("no", "perhaps"), ("yes", "no"), "yes no"]
    expected = [(each.label, each.member) for each in Cascade(folder).classify(texts)]
    assert classify_in_subprocess(folder, texts) == expected
    assert len({member for _, member in expected}) == 2
    if multi_label:
        assert expected[-1] == (["agrees", "refuses"], "small")


@pytest.mark.parametrize("expected", [(8, 8), (8, 5)], ids=["same length", "shared tokenizer, other length"])
def test_long_texts_are_cut_where_they_were_in_each_members_training(expected, tmp_path):
    folder = build(tmp_path, lengths=expected)
    lengths = [each["input_ids"].shape[1] for each in Cascade(folder).encode("yes " * 50)]
    assert lengths == [each["max_length"] for each in json.loads((folder / "cascade.json").read_text())["members"]]
    assert lengths == list(expected)
