"""Tests of students built from a teacher: specs, selected weights, and loading with the stock class."""

import copy
import math

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.errors import InputError
from distill.student.build import build_student
from distill.student.family import FAMILIES, find_family
from distill.student.sizes import Sizes
from distill.student.spec import is_relative, resolve_sizes
from distill.teacher.fingerprint import freeze
from support.tiny_models import build_model

TEACHER = Sizes(tuple(range(12)), 768, 12, 3072)
HEAD_WIDTH = 8  # of the tiny teachers
# Parts of a layer by their names in BERT and in DistilBERT.
PARTS = {
    "query": ("attention.self.query", "attention.q_lin"),
    "key": ("attention.self.key", "attention.k_lin"),
    "value": ("attention.self.value", "attention.v_lin"),
    "out": ("attention.output.dense", "attention.out_lin"),
    "up": ("intermediate.dense", "ffn.lin1"),
    "down": ("output.dense", "ffn.lin2"),
    "attention norm": ("attention.output.LayerNorm", "sa_layer_norm"),
    "output norm": ("output.LayerNorm", "output_layer_norm"),
}


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    body = model.base_model
    return body.transformer.layer if model.config.model_type == "distilbert" else body.encoder.layer


def part(model: PreTrainedModel, layer: int, name: str) -> nn.Module:
    return layers_of(model)[layer].get_submodule(PARTS[name][model.config.model_type == "distilbert"])


@torch.no_grad()
def logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).logits


def indices_in(few: Tensor, many: Tensor) -> Tensor:
    """Returns the position in `many` of each number of `few`, and checks that all are there, in the same order."""
    matches = few[:, None] == many[None]
    assert (matches.sum(1) == 1).all(), "a number of the student isn't the teacher's"
    where = matches.int().argmax(1)
    assert (where.diff() > 0).all()
    return where


@pytest.mark.parametrize("spec", ["layers=4", "layers=0,1,2,3", "hidden=32,heads=4,ffn=64"])
def test_a_student_of_the_teachers_size_gives_bit_identical_logits(teacher, token_batch, spec):
    expected = logits(teacher, token_batch)
    assert expected.std(0).min() > 0.05, "the teacher says the same of every text"
    assert torch.equal(logits(build_student(teacher, spec), token_batch), expected)


@pytest.mark.parametrize(
    ("spec", "selected"),
    [
        ("distilbert", [0, 2]),
        ("layers=1", [0]),
        ("layers=2", [0, 3]),
        ("layers=3", [0, 2, 3]),
        ("layers=1,3", [1, 3]),
        ("layers=3,0", [3, 0]),
    ],
)
def test_the_student_has_the_layers_that_the_spec_selects(teacher, token_batch, spec, selected):
    by_hand = copy.deepcopy(teacher)
    layers = layers_of(by_hand)
    chosen = [layers[i] for i in selected]
    del layers[:]
    layers.extend(chosen)
    student = build_student(teacher, spec)
    assert student.config.num_hidden_layers == len(layers_of(student)) == len(selected)
    assert torch.equal(logits(student, token_batch), logits(by_hand, token_batch))
    assert not torch.allclose(logits(student, token_batch), logits(teacher, token_batch), atol=1e-2)


def drop_neurons(model: PreTrainedModel, layer: int, dropped: Tensor) -> None:
    for parameter in part(model, layer, "up").parameters():
        parameter.data[dropped] = 0
    part(model, layer, "down").weight.data[:, dropped] = 0


def test_a_narrow_student_computes_as_the_teacher_without_its_weakest_neurons(teacher, token_batch):
    student, masked = build_student(teacher, "ffn=24"), copy.deepcopy(teacher)
    for i in range(4):
        up, down = part(teacher, i, "up").weight.double(), part(teacher, i, "down").weight.double()
        strength = (up**2).sum(1) + (down**2).sum(0)
        drop_neurons(masked, i, strength.argsort()[:40])
    torch.testing.assert_close(logits(student, token_batch), logits(masked, token_batch), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(student, token_batch), logits(teacher, token_batch), atol=1e-2)


def test_neurons_with_zero_weights_are_dropped_first(teacher, token_batch):
    for i in range(4):
        drop_neurons(teacher, i, torch.randperm(64, generator=torch.Generator().manual_seed(i))[:40])
    student = build_student(teacher, "ffn=24")
    torch.testing.assert_close(logits(student, token_batch), logits(teacher, token_batch), rtol=1e-5, atol=1e-5)


WIDTHS = [
    ("half", (4, 16, 2, 32)),
    ("hidden=16", (4, 16, 2, 64)),
    ("hidden=20,heads=4,ffn=40", (4, 20, 4, 40)),
    ("layers=1,3,hidden=16,heads=4", (2, 16, 4, 64)),
]


@pytest.mark.parametrize(("spec", "sizes"), WIDTHS)
def test_a_width_is_reduced_to_the_same_coordinates_in_every_weight(teacher, spec, sizes):
    student = build_student(teacher, spec)
    assert find_family(student.config).sizes(student.config) == Sizes(tuple(range(sizes[0])), *sizes[1:])
    _, width, heads, _ = sizes
    kept_layers = [1, 3] if sizes[0] == 2 else [0, 1, 2, 3]
    hidden = indices_in(part(student, 0, "output norm").weight, part(teacher, kept_layers[0], "output norm").weight)
    sharper = math.sqrt(width / heads / HEAD_WIDTH)
    for new, old in enumerate(kept_layers):
        mine = {name: part(student, new, name) for name in PARTS}
        full = {name: part(teacher, old, name) for name in PARTS}
        qk = indices_in(mine["query"].bias, full["query"].bias * sharper)
        vo = indices_in(mine["value"].bias, full["value"].bias)
        ffn = indices_in(mine["up"].bias, full["up"].bias)
        assert torch.equal(mine["query"].weight, (full["query"].weight * sharper)[qk][:, hidden])
        for name, rows, columns in (
            ("key", qk, hidden),
            ("value", vo, hidden),
            ("out", hidden, vo),
            ("up", ffn, hidden),
            ("down", hidden, ffn),
        ):
            assert torch.equal(mine[name].weight, full[name].weight[rows][:, columns]), name
            assert torch.equal(mine[name].bias, full[name].bias[rows]), name
        for name in ("attention norm", "output norm"):
            assert torch.equal(mine[name].weight, full[name].weight[hidden]), name
            assert torch.equal(mine[name].bias, full[name].bias[hidden]), name
        # Each head of the student is part of one head of the teacher, the same for queries and values.
        owner = (qk // HEAD_WIDTH).reshape(heads, -1)
        assert (owner == owner[:, :1]).all()
        assert torch.equal(owner, (vo // HEAD_WIDTH).reshape(heads, -1))
        assert owner[:, 0].tolist() == strongest_heads(full, heads)
    check_outside_the_layers(student, teacher, hidden)


def strongest_heads(full: dict[str, nn.Module], count: int) -> list[int]:
    """Returns the heads with the largest sum of squares over all their weights, in ascending order."""
    rows = [full["query"].weight, full["key"].weight, full["value"].weight, full["out"].weight.T]
    strength = [sum((w[i : i + HEAD_WIDTH] ** 2).sum().item() for w in rows) for i in range(0, 32, HEAD_WIDTH)]
    return sorted(sorted(range(4), key=lambda head: -strength[head])[:count])


def check_outside_the_layers(student: PreTrainedModel, teacher: PreTrainedModel, hidden: Tensor) -> None:
    """Checks that embeddings and head are reduced to `hidden` on every axis of the teacher's width, and on no other."""
    mine, full = (
        {name: weight for name, weight in model.state_dict().items() if ".layer." not in name}
        for model in (student, teacher)
    )
    assert mine.keys() == full.keys()
    for name, weight in full.items():
        for axis, size in enumerate(weight.shape):
            weight = weight.index_select(axis, hidden) if size == teacher.config.hidden_size else weight
        assert torch.equal(mine[name], weight), name


@torch.no_grad()
def test_the_weakest_coordinates_are_dropped(teacher):
    weak = torch.tensor([0, 5, 6, 7, 13, 20, 21, 25, 29, 30, 31])  # hidden coordinates
    weak_qk, weak_vo = (
        torch.tensor([3, *range(8, 16), 19, 27]),
        torch.tensor([5, *range(8, 16), 21, 29]),
    )  # all of head 1
    for i in range(4):
        for name, rows in (("query", weak_qk), ("key", weak_qk), ("value", weak_vo), ("up", [])):
            part(teacher, i, name).weight[rows] = 0
            part(teacher, i, name).weight[:, weak] = 0
        part(teacher, i, "out").weight[:, weak_vo] = 0
        for name in ("out", "down"):
            part(teacher, i, name).weight[weak] = 0
    student = build_student(teacher, "hidden=21,heads=3")
    for weights, dropped in (("output norm", weak), ("value", weak_vo)):
        name = "weight" if "norm" in weights else "bias"
        few, many = (getattr(part(model, 2, weights), name) for model in (student, teacher))
        assert sorted({*range(32)} - set(indices_in(few, many).tolist())) == dropped.tolist()
    keys = indices_in(part(student, 2, "key").bias, part(teacher, 2, "key").bias)
    assert sorted({*range(32)} - set(keys.tolist())) == weak_qk.tolist()


def scores(model: PreTrainedModel, inputs: Tensor, heads: int) -> Tensor:
    """Returns the attention scores of the first layer, [heads, length, length], by Vaswani et al. 2017."""
    q, k = (part(model, 0, name)(inputs).unflatten(-1, (heads, -1)).transpose(0, 1) for name in ("query", "key"))
    return q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])


@torch.no_grad()
def test_the_attention_scores_of_narrower_heads_keep_their_scale(teacher):
    student = build_student(teacher, "hidden=20,heads=4")
    hidden = indices_in(part(student, 0, "output norm").weight, part(teacher, 0, "output norm").weight)
    key_rows = indices_in(part(student, 0, "key").bias, part(teacher, 0, "key").bias)
    dropped = sorted({*range(32)} - set(key_rows.tolist()))
    for name in ("query", "key"):
        part(teacher, 0, name).weight[dropped] = 0
        part(teacher, 0, name).bias[dropped] = 0
    inputs = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(6, 32).index_copy(1, hidden, inputs)
    torch.testing.assert_close(scores(student, inputs, 4), scores(teacher, wide, 4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["distilbert", "half", "layers=3,hidden=20,heads=4,ffn=40"])
def test_the_stock_class_loads_the_saved_student(teacher, token_batch, spec, tmp_path):
    student = build_student(teacher, spec)
    student.save_pretrained(tmp_path)
    stock = getattr(transformers, type(teacher).__name__)
    again, report = stock.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(again) is type(student) is stock
    assert torch.equal(logits(again, token_batch), logits(student, token_batch))
    assert again.config.id2label == teacher.config.id2label
    assert sum(weight.numel() for weight in again.state_dict().values()) < 0.9 * teacher.num_parameters()


def test_the_student_is_trainable_and_shares_no_weights_with_its_teacher(teacher, token_batch):
    before = logits(teacher, token_batch)
    torch.manual_seed(1)
    student = build_student(freeze(teacher), "layers=2")
    torch.manual_seed(2)
    assert torch.equal(logits(build_student(teacher, "layers=2"), token_batch), logits(student, token_batch))
    assert not student.training
    assert all(parameter.requires_grad for parameter in student.parameters())
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 1
    assert torch.equal(logits(teacher, token_batch), before)
    assert teacher.config.num_hidden_layers == 4


# --- specs


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("distilbert", Sizes((0, 2, 4, 6, 8, 10), 768, 12, 3072)),
        ("half", Sizes(TEACHER.layers, 384, 6, 1536)),
        ("layers=12", TEACHER),
        ("layers=4", Sizes((0, 4, 7, 11), 768, 12, 3072)),
        ("layers=0,5,11", Sizes((0, 5, 11), 768, 12, 3072)),
        ("layers=3,hidden=192,heads=6,ffn=768", Sizes((0, 6, 11), 192, 6, 768)),
        ("hidden=384", Sizes(TEACHER.layers, 384, 6, 3072)),
        (" ffn = 100 , layers=1, 2", Sizes((1, 2), 768, 12, 100)),
    ],
)
def test_a_spec_is_resolved_to_its_sizes(spec, sizes):
    assert is_relative(spec)
    assert resolve_sizes(spec, TEACHER) == sizes


@pytest.mark.parametrize("count", range(1, 13))
def test_evenly_spread_layers_are_distinct_and_include_both_ends(count):
    layers = resolve_sizes(f"layers={count}", TEACHER).layers
    assert len(set(layers)) == count
    assert layers[0] == 0
    assert count == 1 or layers[-1] == 11
    steps = [b - a for a, b in zip(layers, layers[1:], strict=False)]
    assert not steps or max(steps) - min(steps) <= 1


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("layer=2", "expected layers, hidden, heads, ffn, embeddings, norm, found 'layer'"),
        ("layers=2,width=3", "found 'width'"),
        ("ffn=many", "expected numbers after ffn=, found 'many'"),
        ("layers=", "expected numbers after layers="),
        ("hidden=1.5", "found '1.5'"),
        ("ffn=-1", "found '-1'"),
        ("ffn=64,32", "expected one number for ffn, found '64,32'"),
        ("layers=13", "the teacher has 12 layers; expected 1 to 12"),
        ("layers=0", "the teacher has 12 layers"),
        ("layers=0,12", "expected distinct numbers from 0 to 11"),
        ("layers=3,3", "expected distinct numbers"),
        ("hidden=769", "student hidden=769: expected 1 to 768"),
        ("hidden=0", "student hidden=0"),
        ("heads=13", "student heads=13: expected 1 to 12"),
        ("ffn=4096", "can't be wider than it"),
        ("hidden=100,heads=3", "expected heads that divide hidden"),
        ("heads=6", "at most 64, the teacher's head width; found 128"),
    ],
)
def test_an_impossible_spec_is_rejected(spec, named):
    with pytest.raises(InputError, match="student") as caught:
        resolve_sizes(spec, TEACHER)
    assert named in str(caught.value)


def test_a_checkpoint_name_or_path_is_not_a_spec():
    assert not is_relative("google/bert_uncased_L-4_H-256_A-4")
    assert not is_relative("./runs/student")


def test_paths_with_equals_signs_are_not_specs_and_a_specs_meaning_ignores_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("lr=1e-4", "layers=2", "half"):
        (tmp_path / name).mkdir()
    for path in ("runs/lr=1e-4/student", "runs/lr=1e-4,layers=2", "./layers=2", str(tmp_path / "layers=2"), "lr=1e-4"):
        assert not is_relative(path), path
    for spec in ("layers=2", "half", "layers=2,hidden=16", "lr=1e-5", "layrs=2"):
        assert is_relative(spec), spec


@pytest.mark.parametrize("name", ["Ernie", "Camembert", "Phi", "GPTNeoX"])
def test_a_family_that_is_not_listed_is_cut_by_its_trace(name):
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 0}
    teacher = getattr(transformers, f"{name}ForSequenceClassification")(getattr(transformers, f"{name}Config")(**sizes))
    assert teacher.config.model_type not in FAMILIES
    student = build_student(teacher, "layers=2,hidden=16,heads=2,ffn=20")
    config = student.config
    student_sizes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size
    assert student_sizes == (2, 16, 2, 20)
    assert student(input_ids=torch.tensor([[3, 4, 5]])).logits.isfinite().all()


def test_layers_that_share_their_weights_cannot_be_selected():
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    teacher = transformers.AlbertModel(transformers.AlbertConfig(**sizes, vocab_size=60, embedding_size=16))
    with pytest.raises(InputError, match="albert: expected one list of 4 layers, found none"):
        build_student(teacher, "layers=2")


def test_a_hidden_size_as_narrow_as_the_teachers_embeddings_is_rejected():
    with pytest.raises(InputError, match="hidden=24: the teacher's embeddings have this width too"):
        build_student(build_model("electra-projected"), "hidden=24,heads=3")
