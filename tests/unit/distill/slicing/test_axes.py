"""Tests the axes found by tracing against the weights that stock classes build from other sizes in their configs."""

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from distill.checkpoint.layers import find_layer_stack
from distill.errors import InputError
from distill.slicing import Axis, AxisKind, find_axes, trace
from support.tiny_families import FAMILIES, axes_of, build, model_of, traced

WIDER = {"hidden_size": 64, "num_attention_heads": 8}
FFN = {"distilbert": "hidden_dim", "gpt2": "n_inner"}


def dims(axes: tuple[Axis, ...], *kinds: AxisKind) -> set[tuple[str, int]]:
    return {(slot.parameter, slot.dim) for axis in axes if axis.kind in kinds for slot in axis.slots}


def changed_dims(family: str, **sizes: int) -> set[tuple[str, int]]:
    """Returns (parameter, dimension) of every weight whose shape changes when the stock class gets these sizes."""
    before, after = model_of(family).state_dict(), build(family, **sizes).state_dict()
    return {
        (name, d) for name in before for d in range(before[name].dim()) if before[name].shape[d] != after[name].shape[d]
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_feed_forward_axes_cover_exactly_the_weights_that_depend_on_their_size(family: str):
    assert dims(axes_of(family), "ffn") == changed_dims(family, **{FFN.get(family, "intermediate_size"): 72})


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_and_head_axes_cover_exactly_the_weights_that_depend_on_their_sizes(family: str):
    config = model_of(family).config
    more = {"num_key_value_heads": 4} if getattr(config, "num_key_value_heads", None) else {}
    more |= {"embedding_size": 64} if family == "electra" else {}
    names = dict(zip(WIDER, ("dim", "n_heads"), strict=True)) if family == "distilbert" else {k: k for k in WIDER}
    sizes = {names[key]: value for key, value in WIDER.items()} | more
    assert dims(axes_of(family), "hidden", "heads") == changed_dims(family, **sizes)
    if family in ("qwen3", "gemma"):  # a separate head_dim distinguishes the two axes
        assert dims(axes_of(family), "hidden") == changed_dims(family, hidden_size=64)
        assert dims(axes_of(family), "heads") == changed_dims(family, num_attention_heads=8, num_key_value_heads=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vocabulary_axis_covers_exactly_the_weights_that_depend_on_its_size(family: str):
    assert dims(axes_of(family), "vocabulary") == changed_dims(
        family, vocab_size=model_of(family).config.vocab_size + 7
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_axis_has_the_number_of_units_in_the_config(family: str):
    config = model_of(family).config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    ffn = getattr(config, FFN.get(family, "intermediate_size"))
    layers = range(config.num_hidden_layers)
    expected = {"hidden": ("hidden", None, 32), "vocabulary": ("vocabulary", None, config.vocab_size)}
    expected |= {f"layers.{i}.heads": ("heads", i, heads) for i in layers}
    expected |= {f"layers.{i}.ffn": ("ffn", i, ffn) for i in layers}
    assert {axis.name: (axis.kind, axis.layer, axis.units) for axis in axes_of(family)} == expected


def slot_of(family: str, axis: str, parameter: str) -> tuple[int, int, int, str]:
    (match,) = (
        slot
        for known in axes_of(family)
        if known.name == axis
        for slot in known.slots
        if slot.parameter.endswith(parameter)
    )
    return match.dim, match.outer, match.inner, match.role


def test_a_key_head_is_pruned_with_its_group_of_queries():
    slots = [slot_of("qwen3", "layers.1.heads", f"{name}_proj.weight") for name in "qkvo"]
    assert slots == [(0, 1, 24, "out"), (0, 1, 12, "out"), (0, 1, 12, "out"), (1, 1, 24, "in")]


def test_fused_projections_are_pruned_within_each_of_their_parts():
    assert slot_of("modernbert", "layers.1.heads", "attn.Wqkv.weight") == (0, 3, 8, "out")
    assert slot_of("modernbert", "layers.1.ffn", "mlp.Wi.weight") == (0, 2, 1, "out")
    assert slot_of("gpt2", "layers.1.heads", "c_attn.weight") == (1, 3, 8, "out")
    assert slot_of("gpt2", "layers.1.heads", "c_attn.bias") == (0, 3, 8, "out")


def test_tied_weights_keep_both_names_and_roles():
    for family, words, head in (
        ("gpt2", "transformer.wte.weight", "lm_head.weight"),
        ("bert-words", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ):
        assert slot_of(family, "vocabulary", words) == (0, 1, 1, "in")
        assert slot_of(family, "vocabulary", head) == (0, 1, 1, "out")
        assert slot_of(family, "hidden", words) == (1, 1, 1, "out")
        assert slot_of(family, "hidden", head) == (1, 1, 1, "in")
    assert slot_of("bert-words", "vocabulary", "predictions.decoder.bias") == (0, 1, 1, "out")
    assert slot_of("bert-words", "vocabulary", "predictions.bias") == (0, 1, 1, "out")


def test_norms_have_the_scale_role():
    assert slot_of("bert", "hidden", "layer.2.output.LayerNorm.bias") == (0, 1, 1, "scale")
    assert slot_of("gemma", "hidden", "layers.2.input_layernorm.weight") == (0, 1, 1, "scale")
    assert slot_of("modernbert", "hidden", "model.final_norm.weight") == (0, 1, 1, "scale")


def test_projected_narrow_embeddings_are_not_part_of_the_hidden_axis():
    cut = dims(axes_of("electra-projected"), "hidden")
    assert ("electra.embeddings_project.weight", 0) in cut
    assert ("electra.embeddings_project.weight", 1) not in cut
    assert not any(name.startswith("electra.embeddings.") for name, _ in cut)


def test_the_width_of_a_head_and_position_embedding_rows_are_not_prunable():
    cut = {name for axis in axes_of("qwen3") for name in (slot.parameter for slot in axis.slots)}
    assert not any("q_norm" in name or "k_norm" in name for name in cut)
    assert traced("qwen3").left_out["model.layers.0.self_attn.q_norm.weight[0]"]
    assert "looked up" in traced("bert").left_out["bert.embeddings.position_embeddings.weight[0]"]


def test_eager_attention_gives_the_same_axes():
    for family in ("bert", "llama"):
        assert set(find_axes(build(family, attn_implementation="eager"))) == set(axes_of(family))


def test_tracing_leaves_the_model_unchanged():
    model = build("bert").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    model.config._attn_implementation_internal = "flash_attention_2"  # not exportable; sdpa has the same weights
    assert find_axes(model) == list(axes_of("bert"))
    assert model.config._attn_implementation == "flash_attention_2"
    assert model.training
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_models_with_shared_layers_are_rejected():
    config = transformers.AlbertConfig(hidden_size=32, num_attention_heads=4, intermediate_size=40, vocab_size=60)
    with pytest.raises(InputError, match=r"albert: expected one list of 12 layers"):
        find_axes(transformers.AlbertForSequenceClassification(config))


def test_axes_through_an_unsupported_operator_are_left_out():
    config = transformers.FNetConfig(hidden_size=32, num_hidden_layers=2, intermediate_size=40, vocab_size=60)
    model = transformers.FNetForSequenceClassification(config).eval()
    assert {axis.name for axis in find_axes(model)} == {"layers.0.ffn", "layers.1.ffn", "vocabulary"}
    assert "fft" in trace(model).left_out["fnet.embeddings.projection.weight[0]"]


class OddConfig(PretrainedConfig):
    model_type = "oddity"
    num_hidden_layers = 2


class SortingModel(PreTrainedModel):
    """A model that sorts along every dimension that could be pruned."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, **_: object) -> dict[str, Tensor]:
        hidden = self.words(input_ids).sort(-1).values
        for layer in self.layers:
            hidden = layer(hidden).sort(-1).values
        return {"hidden": hidden}


def test_a_model_without_prunable_heads_is_rejected_naming_the_operator():
    with pytest.raises(InputError, match=r"oddity: expected heads.*sort"):
        find_axes(SortingModel(OddConfig()))


def test_the_error_for_an_untraceable_model_names_its_type():
    config = transformers.T5Config(d_model=16, num_layers=2, d_ff=16, num_heads=2, d_kv=8, vocab_size=30)
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(InputError, match="t5: "):
        find_axes(model)
    assert find_layer_stack(model_of("gpt2")) == "transformer.h"
