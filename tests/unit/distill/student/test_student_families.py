"""Tests of students of every family: removed units had no effect, or the rest computes as with them masked."""

import copy
from collections.abc import Iterable
from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.checkpoint.layers import find_layer_names, find_layer_stack
from distill.errors import InputError
from distill.slicing.tracing.trace import trace
from distill.student.build import build_student, student_config
from distill.student.family import FAMILIES, find_family
from distill.student.selection import select_coordinates
from distill.student.sizes import SHARE_PRESETS
from distill.student.spec import resolve_sizes
from distill.teacher.fingerprint import freeze
from support.tiny_models import MODELS, build_model, draw_weights

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
GROUPED = {"num_key_value_heads": 2}
WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
KINDS = ["sliding_attention", "full_attention"]
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True}
DEBERTA |= {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0, "conv_kernel_size": 3}
DEBERTA |= {"pooler_hidden_size": 32, "conv_act": "tanh"}
# name -> (class without its task, settings)
FURTHER = {
    "deberta-v2": ("DebertaV2", DEBERTA),
    "modernbert": ("ModernBert", {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}),
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", GROUPED),
    "qwen2": ("Qwen2", GROUPED | WINDOWS),
    "qwen3": ("Qwen3", GROUPED | WINDOWS | {"head_dim": 12}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 12}),
    "gemma2": ("Gemma2", GROUPED | {"head_dim": 12, "sliding_window": 3}),
    "gemma3_text": ("Gemma3Text", GROUPED | {"head_dim": 12, "sliding_window": 3, "layer_types": KINDS * 2}),
    "gpt2": ("GPT2", {"n_inner": 48, "scale_attn_by_inverse_layer_idx": True}),
    "mobilebert": ("MobileBert", {"embedding_size": 16, "intra_bottleneck_size": 16}),
}

QUICK = ("modernbert", "llama", "gpt2")  # windows, grouped keys, transposed weights


def mark_slow(families: Iterable[str]) -> list:
    """Returns the families as parameters of a test; those beside QUICK are slow."""
    return [pytest.param(family, marks=[pytest.mark.slow] * (family not in QUICK)) for family in families]


@cache
def tiny_model(family: str, head: str = "ForSequenceClassification") -> PreTrainedModel:
    if family not in FURTHER:
        return build_model(family, head)
    name, settings = FURTHER[family]
    kind = getattr(transformers, f"{name}{head}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = kind(getattr(transformers, f"{name}Config")(**(SIZES | settings)))
        draw_weights(model)
    model.config.use_cache = False
    return freeze(model)


def batch(model: PreTrainedModel) -> dict[str, Tensor]:
    mask = (torch.arange(9) < torch.tensor([9, 7, 4, 2])[:, None]).long()
    ids = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids * mask + (1 - mask) * (model.config.pad_token_id or 0), "attention_mask": mask}


@torch.no_grad()
def outputs_of(model: PreTrainedModel) -> Tensor:
    output = model.eval()(**batch(model))
    return output.logits if "logits" in output else output.last_hidden_state


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_every_supported_family_has_a_tiny_model_here():
    known = {build_model(family).config.model_type for family in MODELS} | set(FURTHER)
    assert known == set(FAMILIES), "a family without a tiny model here"


@pytest.mark.parametrize("family", mark_slow(FURTHER))
def test_a_student_of_the_teachers_sizes_gives_bit_identical_outputs(family):
    teacher = tiny_model(family)
    sizes = find_family(teacher.config).sizes(teacher.config)
    student = build_student(teacher, f"layers=4,hidden={sizes.hidden},heads={sizes.heads},ffn={sizes.ffn}")
    assert torch.equal(outputs_of(student), outputs_of(teacher))


def with_layers(teacher: PreTrainedModel, chosen: list[int]) -> PreTrainedModel:
    """Returns a copy of the teacher that consists of the chosen layers only, in that order."""
    rewired = copy.deepcopy(teacher)
    stack = rewired.get_submodule(find_layer_names(rewired)[0].rpartition(".")[0])
    assert isinstance(stack, nn.ModuleList)
    layers = [stack[i] for i in chosen]
    del stack[:]
    stack.extend(layers)
    rewired.config.num_hidden_layers = len(chosen)
    kinds = getattr(rewired.config, "layer_types", None)
    if kinds:
        rewired.config.layer_types = [kinds[i] for i in chosen]
    return rewired


CHOSEN = [(family, chosen) for family in (*FURTHER, "electra") for chosen in ([0, 3], [1, 3], [2, 0])]


# ModernBERT's first layer has no attention norm; see below.
@pytest.mark.parametrize(("family", "chosen"), [each for each in CHOSEN if each[0] != "modernbert" or not each[1][0]])
def test_a_student_has_the_requested_layers_in_the_requested_order(family, chosen):
    teacher = tiny_model(family)
    student = build_student(teacher, f"layers={chosen[0]},{chosen[1]}")
    rewired = with_layers(teacher, chosen)
    assert getattr(student.config, "layer_types", None) == getattr(rewired.config, "layer_types", None)
    assert close(outputs_of(student), outputs_of(rewired))
    assert not close(outputs_of(rewired), outputs_of(teacher))


@pytest.mark.parametrize("family", ["modernbert", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_the_tiny_models_outputs_depend_on_which_layer_has_the_window(family):
    teacher = tiny_model(family)
    config, kinds = copy.deepcopy(teacher.config), teacher.config.layer_types
    config.layer_types = kinds[1:] + kinds[:1]
    other = type(teacher)(config)
    other.load_state_dict(teacher.state_dict())
    assert not close(outputs_of(other), outputs_of(teacher))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForMaskedLM", "Model"])
def test_the_norm_of_a_modernbert_layer_that_becomes_the_first_is_folded_into_its_weights(bias, head):
    kind = getattr(transformers, f"ModernBert{head}")
    settings = SIZES | FURTHER["modernbert"][1] | {"norm_bias": bias, "attention_bias": bias, "norm_eps": 1e-12}
    teacher = kind(transformers.ModernBertConfig(**settings)).eval()
    draw_weights(teacher)
    embeddings = teacher.base_model.embeddings
    # One scale for all coordinates, no shift, and a negligible eps, so that folding is exact.
    torch.nn.init.constant_(embeddings.norm.weight, 0.7)
    if bias:
        torch.nn.init.zeros_(embeddings.norm.bias)
    student = build_student(teacher, "layers=1,3")
    assert close(outputs_of(student), outputs_of(with_layers(teacher, [1, 3])))
    assert build_student(teacher, "layers=1,3,2,0,hidden=16,heads=2,ffn=20").config.num_hidden_layers == 4


def test_folding_the_norm_is_closer_to_the_teacher_than_dropping_it():
    teacher = copy.deepcopy(tiny_model("modernbert"))
    wanted = outputs_of(with_layers(teacher, [1, 3]))
    folded = build_student(teacher, "layers=1,3")
    dropped = copy.deepcopy(folded)
    dropped.model.layers[0].attn.Wqkv.load_state_dict(teacher.model.layers[1].attn.Wqkv.state_dict())
    apart = [(outputs_of(each) - wanted).norm().item() for each in (folded, dropped)]
    assert apart[0] < 0.5 * apart[1], apart
    moved = build_student(teacher, "layers=2,0")
    assert torch.equal(moved.model.layers[1].attn_norm.weight, teacher.model.embeddings.norm.weight)


def masked_outputs(teacher: PreTrainedModel, spec: str) -> Tensor:
    """Returns the outputs of the teacher with the weights of the heads and neurons that the spec drops set to 0."""
    copied = copy.deepcopy(teacher)
    old = find_family(teacher.config).sizes(teacher.config)
    weights = copied.state_dict()
    cuts = select_coordinates(weights, trace(teacher), find_layer_stack(teacher), old, resolve_sizes(spec, old))
    with torch.no_grad():
        for name, dimensions in cuts.items():
            for dim, coordinates in dimensions:
                if weights[name].dim() == 2:
                    rows = weights[name].index_select(dim, coordinates)
                    weights[name].zero_().index_copy_(dim, coordinates, rows)
    return outputs_of(copied)


@pytest.mark.parametrize("family", mark_slow(FURTHER))
def test_a_student_with_fewer_neurons_computes_as_the_teacher_with_the_others_masked(family):
    teacher = tiny_model(family)
    student = build_student(teacher, "ffn=20")
    assert close(outputs_of(student), masked_outputs(teacher, "ffn=20"))
    assert not close(outputs_of(student), outputs_of(teacher))


def sets_head_width(name: str) -> bool:
    return find_family(tiny_model(name).config).config_sets_head_width


# Families whose head width is independent of the hidden size, so that fewer heads leave the rest unchanged.
@pytest.mark.parametrize(
    "family", mark_slow(name for name in FURTHER if find_family(tiny_model(name).config).config_sets_head_width)
)
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_student_with_fewer_heads_computes_as_the_teacher_with_the_others_masked(family, heads):
    teacher = tiny_model(family)
    shared = teacher.config.num_key_value_heads
    if heads % shared and heads % (4 // shared):
        with pytest.raises(InputError, match=f"heads={heads}: expected a multiple of {4 // shared}"):
            build_student(teacher, f"heads={heads}")
        return
    student = build_student(teacher, f"heads={heads}")
    assert student.config.num_attention_heads == heads
    assert close(outputs_of(student), masked_outputs(teacher, f"heads={heads}"))


REJECTED = {("modernbert", preset): "rotary position embeddings" for preset in ("tinybert4", "minilm-l6-h384")}
REJECTED |= {("mobilebert", "half"): "expected the teacher's 4"}


@pytest.mark.parametrize("family", mark_slow(FURTHER))
@pytest.mark.parametrize("preset", SHARE_PRESETS)
def test_a_preset_is_built_as_a_loadable_student_or_rejected_with_the_reason(family, preset, tmp_path):
    teacher = tiny_model(family)
    rejection = REJECTED.get((family, preset))
    if rejection:
        with pytest.raises(InputError, match=rejection):
            build_student(teacher, preset)
        return
    student = build_student(teacher, preset)
    assert type(student) is type(teacher)
    assert student.num_parameters() < teacher.num_parameters() or preset == "teacher"
    student.save_pretrained(tmp_path)
    again, report = type(teacher).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(outputs_of(again), outputs_of(student))
    assert outputs_of(student).isfinite().all()


@pytest.mark.parametrize("family", mark_slow(name for name in FURTHER if name not in ("modernbert", "mobilebert")))
def test_hidden_coordinates_with_zero_weights_are_the_ones_dropped(family):
    """Every matrix that writes or reads the last eight coordinates is 0 there, so these are dropped."""
    teacher = copy.deepcopy(tiny_model(family))
    weights = teacher.state_dict()
    hidden = [slot for axis in trace(teacher).axes if axis.kind == "hidden" for slot in axis.slots]
    for slot in hidden:
        if weights[slot.parameter].dim() == 2:
            weights[slot.parameter].narrow(slot.dim, 24, 8).zero_()
    student = build_student(teacher, "hidden=24")
    for name, weight in student.state_dict().items():
        full = weights[name]
        for dim in {slot.dim for slot in hidden if slot.parameter == name}:
            full = full.narrow(dim, 0, 24)
        if full.shape == weight.shape:
            assert torch.equal(weight, full) or "query" in name or "c_attn" in name, name


TASKS = [("bert", "ForMaskedLM"), ("roberta", "ForMaskedLM"), ("distilbert", "ForMaskedLM"), ("electra", "ForMaskedLM")]
TASKS += [("modernbert", "ForMaskedLM"), ("gpt2", "LMHeadModel")]
TASKS += [(name, "ForCausalLM") for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2")]


@pytest.mark.parametrize(("family", "head"), TASKS)
def test_a_language_modelling_head_keeps_its_vocabulary_and_takes_the_students_width(family, head):
    teacher = tiny_model(family, head)
    student = build_student(teacher, "layers=2,hidden=16,heads=2,ffn=20")
    assert outputs_of(student).shape == outputs_of(teacher).shape
    same = build_student(teacher, "layers=4")
    assert torch.equal(outputs_of(same), outputs_of(teacher))


def test_factorized_embeddings_are_the_best_low_rank_fit_and_approach_the_teachers_output():
    teacher = tiny_model("deberta-v2")
    table = teacher.get_input_embeddings().weight
    wide = outputs_of(teacher)
    errors = []
    for rank in (8, 24, 31):
        student = build_student(teacher, f"embeddings={rank}")
        assert student.config.embedding_size == rank
        narrow = student.deberta.embeddings
        product = narrow.word_embeddings.weight @ narrow.embed_proj.weight.T
        nearest = torch.linalg.svd(table, full_matrices=False)
        best = nearest.U[:, :rank] * nearest.S[:rank] @ nearest.Vh[:rank]
        torch.testing.assert_close(product, best, rtol=1e-4, atol=1e-5)
        errors.append((outputs_of(student) - wide).abs().max().item())
    assert errors[0] > errors[1] > errors[2]
    again = build_student(build_student(teacher, "embeddings=24"), "embeddings=8")
    assert close(outputs_of(again), outputs_of(build_student(teacher, "embeddings=8")))


@pytest.mark.parametrize(
    ("family", "spec", "named"),
    [
        ("bert", "embeddings=8", "the stock class of a 'bert' has no map between embeddings and layers; deberta-v2"),
        ("deberta-v2", "embeddings=32", "expected less than hidden, 32"),
        ("llama", "heads=3", "expected a multiple of 2, whole groups, or of 2"),
        (
            "modernbert",
            "hidden=16,heads=4",
            "expected heads 8 wide as the teacher's, found 4: rotary",
        ),
        ("mobilebert", "heads=2", "expected the teacher's 4, found another number"),
        ("gpt2", "mobilebert", "expected an encoder as teacher, among bert, roberta"),
        ("bert", "half,distilbert", "expected one preset among"),
        ("bert", "fresh,tiny", "found tiny"),
    ],
)
def test_a_spec_that_the_family_cannot_build_is_rejected_with_what_it_can(family, spec, named):
    with pytest.raises(InputError, match="student") as caught:
        student_config(tiny_model(family).config, spec)
    assert named in str(caught.value)


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "llama", "gpt2"])
def test_a_fresh_student_has_the_requested_sizes_and_is_reproducible_from_its_seed(family):
    teacher = tiny_model(family)
    spec = "fresh,layers=5,hidden=64,heads=8,ffn=100"
    student = build_student(teacher, spec, seed=1)
    assert (student.config.num_hidden_layers, student.config.hidden_size) == (5, 64)
    torch.manual_seed(99)
    assert torch.equal(outputs_of(build_student(teacher, spec, seed=1)), outputs_of(student))
    assert not close(outputs_of(build_student(teacher, spec, seed=2)), outputs_of(student))
    assert student.config.vocab_size == teacher.config.vocab_size


def test_a_fresh_student_of_a_preset_keeps_the_presets_widths_when_layers_are_given():
    config = student_config(tiny_model("bert").config, "fresh,minilm-l6-h384,layers=7")
    preset = student_config(tiny_model("bert").config, "fresh,minilm-l6-h384")
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (7, 16, preset.intermediate_size)
    assert preset.intermediate_size < tiny_model("bert").config.intermediate_size
    with pytest.raises(InputError, match="student layers=0: expected at least 1"):
        student_config(tiny_model("bert").config, "fresh,layers=0")


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("spec", ["layers=2", "hidden=16,heads=2"])
def test_a_decoder_for_token_classification_is_reduced_with_its_head(family, spec):
    student = build_student(tiny_model(family, "ForTokenClassification"), spec)
    assert student.score.bias.shape == (2,)
    assert student.score.weight.shape[1] == student.config.hidden_size
