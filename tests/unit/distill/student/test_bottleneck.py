"""Tests of bottleneck students: the stock class and the weights taken over from the teacher."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import BertConfig, MobileBertConfig, PreTrainedModel

from distill.errors import InputError
from distill.slicing.factorize import factorize_table
from distill.student.bottleneck import fit_scale_and_shift, project_token_embeddings
from distill.student.build import build_student, student_config
from support.tiny_models import MODELS, build_model

BERT_LARGE = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=4, intermediate_size=4096)


@torch.no_grad()
def states(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return model(**batch, output_hidden_states=True).hidden_states


def parameters(config: MobileBertConfig) -> int:
    with torch.device("meta"):
        return transformers.MobileBertModel(config).num_parameters()


def test_the_presets_have_the_sizes_and_parameter_counts_of_the_paper():
    """Sun et al. 2020, table 1 and 3: 25.3M and 15.1M parameters, for a teacher of width 512 between its blocks."""
    inverted = student_config(BERT_LARGE, "inverted-bottleneck")
    assert (inverted.hidden_size, inverted.intra_bottleneck_size, inverted.embedding_size) == (512, 1024, 128)
    assert (inverted.intermediate_size, inverted.num_feedforward_networks) == (4096, 1)
    stock = MobileBertConfig()
    config = student_config(inverted, "mobilebert")
    for name in ("hidden_size", "intra_bottleneck_size", "embedding_size", "intermediate_size", "num_hidden_layers"):
        assert getattr(config, name) == getattr(stock, name), name
    for name in ("num_attention_heads", "num_feedforward_networks", "use_bottleneck_attention", "normalization_type"):
        assert getattr(config, name) == getattr(stock, name), name
    assert config.true_hidden_size == 128
    assert parameters(config) / 1e6 == pytest.approx(25.3, abs=0.8)
    assert parameters(student_config(inverted, "mobilebert-tiny")) / 1e6 == pytest.approx(15.1, abs=0.8)


@pytest.mark.parametrize("preset", ["mobilebert", "mobilebert-tiny", "inverted-bottleneck"])
@pytest.mark.parametrize("family", MODELS)
def test_the_stock_mobilebert_class_loads_the_saved_student(family, preset, token_batch, tmp_path):
    teacher = build_model(family)
    if preset == "inverted-bottleneck" and family == "distilbert":
        with pytest.raises(InputError, match="expected a teacher whose layers fit into its blocks"):
            build_student(teacher, preset)
        return
    student = build_student(teacher, preset, seed=3)
    student.save_pretrained(tmp_path)
    again, report = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is transformers.MobileBertForSequenceClassification
    assert not any(report.values()), report
    with torch.no_grad():
        assert torch.equal(again(**token_batch).logits, student(**token_batch).logits)
    assert again.config.id2label == teacher.config.id2label
    other = build_student(teacher, preset, seed=4)
    assert not torch.equal(states(other, token_batch)[-1], states(student, token_batch)[-1])


def test_a_student_is_reproducible_from_its_seed_without_the_global_random_state(token_batch):
    teacher = build_model("bert")
    before = torch.get_rng_state()
    one = build_student(teacher, "mobilebert", seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    assert torch.equal(
        states(build_student(teacher, "mobilebert", seed=5), token_batch)[-1], states(one, token_batch)[-1]
    )


@pytest.mark.parametrize("family", ["bert", "electra-projected", "distilbert"])
def test_embeddings_of_full_rank_reproduce_the_teachers_table(family, token_batch):
    teacher = build_model(family)
    rank = min(teacher.get_input_embeddings().weight.shape[1], 32)
    student = build_student(teacher, f"mobilebert,embeddings={rank}")
    table, wanted = project_token_embeddings(student), project_token_embeddings(teacher).clone()
    wanted[0] = 0  # the padding row, so that a text in a padded batch has the same neighbors as alone
    torch.testing.assert_close(table, wanted, rtol=1e-4, atol=1e-5)


def test_a_text_gets_the_same_hidden_states_alone_and_in_a_padded_batch(token_batch):
    student = build_student(build_model("bert"), "mobilebert")
    whole = states(student, token_batch)[-1]
    for row, length in enumerate(token_batch["attention_mask"].sum(1).tolist()):
        alone = states(student, {name: value[row : row + 1, :length] for name, value in token_batch.items()})[-1]
        torch.testing.assert_close(whole[row : row + 1, :length], alone, rtol=1e-4, atol=1e-5)


def test_the_embedding_output_approximates_the_teachers(token_batch):
    """A scale and a shift replace the norm, so the match is approximate; a randomly initialized student is far off."""
    teacher = build_model("bert")
    wanted = states(teacher, token_batch)[0]
    mask = token_batch["attention_mask"].bool()

    def apart(student: PreTrainedModel) -> float:
        return ((states(student, token_batch)[0] - wanted)[mask].square().mean() / wanted[mask].var()).item()

    near = apart(build_student(teacher, "mobilebert,embeddings=32"))
    drawn = apart(transformers.MobileBertForSequenceClassification(student_config(teacher.config, "mobilebert")))
    assert near < 0.2 < drawn


def test_an_inverted_bottleneck_as_wide_as_its_teacher_has_the_teachers_inner_weights(token_batch):
    teacher = build_model("bert")
    student = build_student(teacher, "inverted-bottleneck")
    block, layer = student.mobilebert.encoder.layer[2], teacher.bert.encoder.layer[2]
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(block.attention.self, name).weight, getattr(layer.attention.self, name).weight)
    assert torch.equal(block.intermediate.dense.weight, layer.intermediate.dense.weight)
    rows = block.output.bottleneck.dense.weight
    torch.testing.assert_close(rows @ rows.T, torch.eye(16), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(block.bottleneck.input.dense.weight, rows.T)


def test_heads_of_another_number_do_not_get_the_teachers_weights():
    teacher = build_model("bert")
    student = build_student(teacher, "inverted-bottleneck,heads=2")
    block, layer = student.mobilebert.encoder.layer[2], teacher.bert.encoder.layer[2]
    query = block.attention.self.query.weight
    assert query.shape == layer.attention.self.query.weight.shape
    assert not torch.equal(query, layer.attention.self.query.weight)


def test_listed_layers_of_the_teacher_are_the_inverted_bottlenecks():
    teacher = build_model("bert")
    student = build_student(teacher, "inverted-bottleneck,layers=0,2")
    for block, number in zip(student.mobilebert.encoder.layer, (0, 2), strict=True):
        assert torch.equal(
            block.intermediate.dense.weight, teacher.bert.encoder.layer[number].intermediate.dense.weight
        )
    with pytest.raises(InputError, match="layers=0,9: expected distinct numbers from 0 to"):
        build_student(teacher, "inverted-bottleneck,layers=0,9")


@pytest.mark.parametrize("preset", ["mobilebert", "inverted-bottleneck"])
def test_a_fresh_student_has_nothing_of_its_teacher(preset):
    teacher = build_model("bert")
    before = build_student(teacher, f"fresh,{preset}", seed=3).state_dict()
    for weight in teacher.parameters():
        torch.nn.init.normal_(weight)
    after = build_student(teacher, f"fresh,{preset}", seed=3).state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_the_teachers_pooler_and_classifier_are_copied():
    for family, pooler, head in (
        ("bert", "bert.pooler.dense", "classifier"),
        ("roberta", "classifier.dense", "classifier.out_proj"),
    ):
        teacher = build_model(family)
        student = build_student(teacher, "mobilebert")
        assert torch.equal(student.mobilebert.pooler.dense.weight, teacher.get_submodule(pooler).weight)
        assert torch.equal(student.classifier.weight, teacher.get_submodule(head).weight)


def test_a_student_of_a_bottleneck_teacher_starts_from_the_best_low_rank_embeddings(token_batch):
    inverted = build_student(build_model("bert"), "inverted-bottleneck")
    student = build_student(inverted, "mobilebert,embeddings=4")
    assert student.config.hidden_size == inverted.config.hidden_size == 16
    table, wanted = project_token_embeddings(student), project_token_embeddings(inverted).clone()
    wanted[0] = 0
    best = factorize_table(project_token_embeddings(inverted), 4)
    wanted = best[0] @ best[1]
    wanted[0] = 0
    torch.testing.assert_close(table, wanted, rtol=1e-4, atol=1e-5)


def test_the_fitted_line_is_that_of_least_squares():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    scale, shift = fit_scale_and_shift(x, 2 * x + torch.tensor([1.0, 0.0, -3.0]))
    torch.testing.assert_close(scale, torch.full((3,), 2.0))
    torch.testing.assert_close(shift, torch.tensor([1.0, 0.0, -3.0]))


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("mobilebert,inner=10,heads=4", "inner=10, heads=4: expected heads that divide"),
        ("mobilebert,stacks=0", "stacks=0: expected at least 1"),
        ("mobilebert,hidden=0", "hidden=0: expected at least 1"),
        ("mobilebert,layers=0,1", "expected a number of layers, found 0,1: these blocks are random"),
        ("layers=1,embeddings=0", "expected embeddings of at least 1, found 0"),
        ("mobilebert,depth=3", "expected layers, hidden, heads, ffn, embeddings, inner, stacks, norm, found 'depth'"),
        ("mobilebert,mobilebert-tiny", "expected one preset among"),
    ],
)
def test_impossible_blocks_are_rejected(spec, named):
    with pytest.raises(InputError, match="student") as caught:
        student_config(build_model("bert").config, spec)
    assert named in str(caught.value)
