"""Tests that a model sharded across processes has the outputs, gradients and weights of the model in one process."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from distill.checkpoint.layers import find_layer_names
from distill.errors import InputError
from distill.parallel.apply import apply_layout, gather_tensor, reshard
from distill.parallel.clip import clip_gradients
from distill.parallel.layout import Layout, parse_layout
from distill.parallel.load import load_sharded
from distill.parallel.mesh import build_mesh, find_data_rank
from distill.parallel.tensor_plan import build_tensor_plan
from support.processes.ranks import RanksError, WorldError, run_ranks
from support.run_outputs import find_excess
from support.tiny_models import VOCABULARY, build_model, draw_weights

CLASSIFIERS = ("bert", "roberta", "distilbert", "electra-projected")
DECODERS = ("llama", "llama-tied", "qwen3")
FULL = StateDictOptions(full_state_dict=True)
VOCABULARY_SIZE = 51  # odd, so that tp=2 splits the vocabulary unevenly


def auto_class(family: str) -> type:
    if family in DECODERS:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForMaskedLM if "mlm" in family else transformers.AutoModelForSequenceClassification


def decoder(family: str, **changes: object) -> transformers.PreTrainedModel:
    settings = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": family == "llama-tied",
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    name = "Qwen3" if family == "qwen3" else "Llama"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = getattr(transformers, f"{name}Config")(**(settings | changes))
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        draw_weights(model)
    return model.eval()


def tiny(family: str) -> transformers.PreTrainedModel:
    if family in DECODERS:
        return decoder(family)
    return build_model("bert", "ForMaskedLM") if family == "bert-mlm" else build_model(family)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a checkpoint of each family, in a subfolder named after the family."""
    folder = tmp_path_factory.mktemp("models")
    for family in (*CLASSIFIERS, "bert-mlm", *DECODERS):
        tiny(family).save_pretrained(folder / family)
    return folder


def batch_of(family: str, rows: int = 8, length: int = 9) -> dict[str, torch.Tensor]:
    """Returns rows of different lengths, padded on the right, with any id of the vocabulary, including the pad id."""
    words = VOCABULARY_SIZE if family in DECODERS else len(VOCABULARY)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": torch.randint(0, words, (rows, length), generator=generator), "attention_mask": mask}


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return (logits.logsumexp(-1) - 0.3 * logits[..., 1]).mean()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest absolute difference relative to the largest value of `b`."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))


@dataclass
class LayoutComparison:
    """Comparison of a model under a layout with the model in one process, as measured by one process."""

    share: float
    loaded: bool
    buffers: bool
    same_bits: bool
    logits: float
    gradients: dict[str, float]
    norm: float
    expected_norm: float
    after_step: float
    share_after_reshard: float


def share_of(model: nn.Module) -> float:
    """Returns the share of the weights that this process holds."""
    parameters = list(model.parameters())
    local = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in parameters)
    return local / sum(each.numel() for each in parameters)


def compare(
    rank: int, folders: Path, processes: int, cases: list[tuple[str, str]]
) -> dict[tuple[str, str], LayoutComparison]:
    comparisons = {}
    for family, text in cases:
        layout = parse_layout(text, processes)
        comparisons[family, text] = compare_one(folders / family, family, layout)
    return comparisons


def compare_one(folder: Path, family: str, layout: Layout) -> LayoutComparison:
    mesh = build_mesh(layout, "cpu")
    model = load_sharded(folder, auto_class(family), layout, mesh)
    plain = auto_class(family).from_pretrained(folder)
    share, (data_rank, data_ranks) = share_of(model), find_data_rank(mesh)
    state, expected_state = get_model_state_dict(model, options=FULL), plain.state_dict()
    loaded = state.keys() == expected_state.keys()
    loaded &= all(torch.equal(values, expected_state[name]) for name, values in state.items())
    buffers = all(torch.equal(mine, theirs) for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True))
    batch = batch_of(family)
    mine = {name: values.chunk(data_ranks)[data_rank] for name, values in batch.items()}
    with torch.no_grad():
        logits, expected = model(**mine).logits, plain(**mine).logits
    reshard(model)  # otherwise the optimizer would get the weights that the forward left unsharded
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, foreach=False) for each in (model, plain)]
    loss_of(model(**mine).logits).backward()
    loss_of(plain(**batch).logits).backward()
    largest = max(float(each.grad.abs().max()) for each in plain.parameters())
    gradients = {
        name: float((gather_tensor(each.grad) - theirs.grad).abs().max()) / largest
        for (name, each), theirs in zip(model.named_parameters(), plain.parameters(), strict=True)
    }
    norms = [norm_and_clip(each) for each in (model, plain)]
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        after_step = distance(model(**mine).logits, plain(**mine).logits)
    reshard(model)
    return LayoutComparison(
        share=share,
        loaded=loaded,
        buffers=buffers,
        same_bits=torch.equal(logits, expected),
        logits=distance(logits, expected),
        gradients=gradients,
        norm=norms[0],
        expected_norm=norms[1],
        after_step=after_step,
        share_after_reshard=share_of(model),
    )


def norm_and_clip(model: nn.Module) -> float:
    """Clips gradients to a norm that they all exceed, with our function for sharded models and torch's for plain ones.

    Returns the norm before clipping.
    """
    parameters = list(model.parameters())
    if any(isinstance(each, DTensor) for each in parameters):
        return float(clip_gradients(parameters, 0.1))
    return float(torch.nn.utils.clip_grad_norm_(parameters, 0.1))


TWO = [
    *[(family, text) for family in ("bert", "llama-tied") for text in ("fsdp=2", "tp=2", "zero2")],
    *[(family, text) for family in ("distilbert", "llama") for text in ("fsdp=2", "tp=2")],
    *[(family, "tp=2") for family in ("roberta", "electra-projected", "bert-mlm", "qwen3")],
]
FOUR = [
    ("bert", "hsdp=2x2"),
    ("llama-tied", "hsdp=2x2"),
    *[(family, "fsdp=2,tp=2") for family in ("bert", "llama-tied", "qwen3")],
    ("bert", "dp=2,tp=2"),
]


@pytest.fixture(scope="module")
def compared(folders: Path) -> dict[int, list[dict[tuple[str, str], LayoutComparison]]]:
    return {}


def case_of(compared: dict, folders: Path, processes: int, case: tuple[str, str]) -> list[LayoutComparison]:
    """Returns the results of each process; all cases of a number of processes run in one launch."""
    if processes not in compared:
        cases = TWO if processes == 2 else FOUR
        compared[processes] = run_ranks(compare, processes, folders, processes, cases)
    return [results[case] for results in compared[processes]]


@pytest.mark.parametrize(
    ("processes", "case"),
    [
        *[pytest.param(2, case, id="-".join(case)) for case in TWO],
        *[pytest.param(4, case, id="-".join(case), marks=pytest.mark.slow) for case in FOUR],
    ],
)
def test_a_model_with_a_layout_computes_and_trains_as_in_one_process(compared, folders, processes, case):
    comparisons = case_of(compared, folders, processes, case)
    for comparison in comparisons:
        assert comparison.loaded
        assert comparison.buffers
        assert comparison.logits <= 1e-5
        assert comparison.same_bits or "tp" in case[1]
        assert find_excess(comparison.gradients, 1e-5) == {}
        assert comparison.norm == pytest.approx(comparison.expected_norm, rel=1e-5)
        assert comparison.after_step <= 1e-5
        assert comparison.share_after_reshard == comparison.share
        parts = 4 if case[1] == "fsdp=2,tp=2" else 2
        assert 1 / parts - 0.03 <= comparison.share <= 1 / parts + (0.06 if "tp" in case[1] else 0.03)
    assert len({comparison.norm for comparison in comparisons}) == 1


# A frozen teacher, options, and a mesh without some of the processes, all in one launch

EXACT = ("bert", "distilbert", "electra-projected", "bert-mlm", *DECODERS)


@torch.no_grad()
def run_options(rank: int, folders: Path) -> dict[str, object]:
    """Returns what one of two processes found in forwards of frozen models, keyed by check."""
    results: dict[str, object] = {}
    tensor, parts = (build_mesh(parse_layout(text, 2), "cpu") for text in ("tp=2", "fsdp=2"))
    for family in EXACT:
        batch, plain = batch_of(family), auto_class(family).from_pretrained(folders / family)
        cut = load_sharded(folders / family, auto_class(family), Layout(tp=2), tensor, exact=True, frozen=True)
        states = [model(**batch, output_hidden_states=True) for model in (cut, plain)]
        results[f"exact {family}"] = [
            torch.equal(a, b) for a, b in zip(*(each.hidden_states for each in states), strict=True)
        ] + [torch.equal(*(each.logits for each in states))]
    plain, batch = auto_class("llama").from_pretrained(folders / "llama"), batch_of("llama")
    expected = plain(**batch).logits

    def llama(**settings: object) -> transformers.PreTrainedModel:
        return load_sharded(folders / "llama", auto_class("llama"), Layout(fsdp=2), parts, frozen=True, **settings)

    model = llama()
    before, same = share_of(model), torch.equal(model(**batch).logits, expected)
    results["frozen"] = (before, share_of(model), same, any(each.requires_grad for each in model.parameters()))
    results["offload"] = torch.equal(llama(offload=True)(**batch).logits, expected)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    halved = llama(policy=policy)(**batch).logits
    results["policy"] = (halved.dtype, distance(halved, expected), distance(halved, halved.bfloat16().float()))
    half = llama(dtype=torch.bfloat16)
    results["half"] = ({each.dtype for each in half.parameters()}, half.model.rotary_emb.inv_freq.dtype)
    for depth in (0, 3):
        whole_model = auto_class("llama").from_pretrained(folders / "llama").requires_grad_(False)
        ahead = apply_layout(whole_model, Layout(fsdp=2), parts, prefetch=depth)
        results[f"prefetch {depth}"] = torch.equal(ahead(**batch).logits, expected)
    alone = build_mesh(Layout(), "cpu", ranks=[1])
    inside = alone.get_coordinate() is not None
    results["outside"] = (inside, find_data_rank(alone) if inside else None)
    uncut = load_sharded(folders / "llama", auto_class("llama"), Layout(dp=2), build_mesh(Layout(dp=2), "cpu"))
    results["uncut"] = not any(isinstance(each, DTensor) for each in uncut.parameters())
    first_only = StateDictOptions(full_state_dict=True, cpu_offload=True)
    results["keys"] = list(get_model_state_dict(llama(), options=first_only))
    return results


@pytest.fixture(scope="module")
def option_results(folders: Path) -> list[dict[str, object]]:
    return run_ranks(run_options, 2, folders)


@pytest.mark.parametrize("family", EXACT)
def test_an_exact_tensor_parallel_teacher_is_bit_identical_to_the_plain_model(option_results, family):
    for results in option_results:
        assert all(results[f"exact {family}"])


def test_a_frozen_model_is_sharded_again_after_a_forward(option_results):
    for results in option_results:
        before, after, same, trained = results["frozen"]
        assert same
        assert not trained
        assert after == before < 0.53


def test_offloading_and_prefetching_leave_logits_bit_identical(option_results):
    for results in option_results:
        assert results["offload"]
        assert results["prefetch 0"]
        assert results["prefetch 3"]


def test_a_mixed_precision_policy_computes_in_bfloat16_and_returns_float32(option_results):
    for results in option_results:
        dtype, error, rounded = results["policy"]
        assert dtype == torch.float32
        assert 1e-5 < error < 0.1
        assert rounded == 0


def test_weights_are_loaded_in_the_requested_dtype_and_buffers_keep_theirs(option_results):
    for results in option_results:
        assert results["half"] == ({torch.bfloat16}, torch.float32)


def test_a_process_outside_a_mesh_has_no_coordinate_in_it(option_results):
    assert [results["outside"] for results in option_results] == [(False, None), (True, (0, 1))]


def test_a_layout_that_shards_nothing_leaves_plain_parameters(option_results):
    assert all(results["uncut"] for results in option_results)


def test_the_full_weights_are_gathered_only_in_the_first_process(option_results):
    assert option_results[0]["keys"] == list(tiny("llama").state_dict())
    assert option_results[1]["keys"] == []


# Rejections, in one process, before any mesh is used


def loading(folder: Path, kind: type = transformers.AutoModelForCausalLM) -> None:
    load_sharded(folder, kind, Layout(fsdp=2), mesh=None)


def test_missing_and_unexpected_weights_are_named(folders):
    names = r"missing 4 \(bert.pooler.dense.weight, .*\); unexpected 5 \(cls.predictions.bias, "
    with pytest.raises(InputError, match=f"bert-mlm.*BertForSequenceClassification, found others: {names}"):
        loading(folders / "bert-mlm", transformers.AutoModelForSequenceClassification)


def test_weights_of_a_different_shape_are_named(folders, tmp_path):
    model = decoder("llama")
    model.save_pretrained(tmp_path)
    decoder("llama", intermediate_size=48).config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"another shape 12 \(.*gate_proj.weight: \[64, 32\] in the files, \[48, 32\]"):
        loading(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    decoder("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model.safetensors is damaged"):
        loading(tmp_path)


def test_a_missing_file_of_a_sharded_checkpoint_is_named(tmp_path):
    decoder("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    missing = sorted(tmp_path.glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(InputError, match=rf"{missing.name} is missing"):
        loading(tmp_path)


def test_a_family_without_a_tensor_parallel_plan_is_rejected_in_favour_of_fsdp():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(InputError, match=r"expected a model type with a tensor-parallel plan.*GPT2LMHeadModel.*fsdp=N"):
        build_tensor_plan(model, exact=False)


def test_a_plan_with_an_unknown_parallel_style_is_rejected():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=50, **sizes, num_local_experts=2))
    with pytest.raises(InputError, match=r"expected a plan with the styles.*found .*experts"):
        build_tensor_plan(model, exact=False)


def test_layers_that_share_their_weights_are_rejected():
    sizes = {"embedding_size": 16, "hidden_size": 32, "intermediate_size": 64}
    config = transformers.AlbertConfig(vocab_size=50, num_hidden_layers=3, num_attention_heads=4, **sizes)
    with pytest.raises(InputError, match="expected a list of 3 layers, found none"):
        find_layer_names(transformers.AlbertModel(config))


# Clipping in one process


def test_plain_gradients_are_clipped_as_torch_clips_them():
    ours, theirs = tiny("bert"), tiny("bert")
    for model in (ours, theirs):
        loss_of(model(**batch_of("bert")).logits).backward()
    norm = clip_gradients(ours.parameters(), 0.5)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_gradients_within_the_norm_are_unchanged():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([weight, nn.Parameter(torch.zeros(1))], 10.0) == 5.0
    assert weight.grad.tolist() == [3.0, 4.0]
    assert clip_gradients([], 1.0) == 0.0


# The launcher


def fails_on_one(rank: int) -> int:
    assert rank != 1, "the second one fails"
    torch.distributed.barrier()
    return rank


def dies_once(rank: int, marker: Path) -> int:
    if rank == 0 and not marker.exists():
        marker.touch()
        os._exit(3)
    return rank


def loses_connection_once(rank: int, marker: Path) -> int:
    if rank == 0 and not marker.exists():
        marker.touch()
        raise ConnectionResetError("Connection reset by peer")
    return rank


def never_ends(rank: int) -> None:
    time.sleep(1000)


def test_an_error_in_a_process_is_raised_in_the_test():
    with pytest.raises(RanksError, match="rank 1.*\n(.*\n)*.*the second one fails"):
        run_ranks(fails_on_one, 2)


def test_a_world_with_a_process_that_died_is_restarted_once_on_request(tmp_path):
    with pytest.raises(RanksError, match=r"exit codes \[3, "):
        run_ranks(dies_once, 2, tmp_path / "first")
    with pytest.warns(UserWarning, match=r"started once more: exit codes \[3, "):
        assert run_ranks(dies_once, 2, tmp_path / "second", retried=WorldError) == [0, 1]


def test_a_world_that_lost_a_connection_is_restarted_once(tmp_path):
    with pytest.warns(UserWarning, match=r"started once more: .*Connection reset by peer"):
        assert run_ranks(loses_connection_once, 2, tmp_path / "lost") == [0, 1]


def test_a_world_that_exceeds_its_time_limit_is_ended():
    with pytest.raises(RanksError, match="not done after 1 s"):
        run_ranks(never_ends, 1, limit=1)
