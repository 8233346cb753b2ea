"""Tests that a model split into pipeline stages computes the outputs and gradients of the whole model."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from distill.errors import InputError
from distill.parallel import part_times
from distill.parallel.part_times import measure_part_times
from distill.parallel.pipeline import PipelineForward, PipelineTrainer, StageForward
from distill.parallel.pipeline_stage import PartTimes, balance_shares, load_stage, reduce_to_stage, split_layers
from support.processes.ranks import run_ranks
from support.tiny_models import build_model

LAYERS, VOCABULARY, SECONDS = 4, 50, 60
CLASSIFIER, CAUSAL, MASKED = (
    transformers.AutoModelForSequenceClassification,
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForMaskedLM,
)
AUTO = {"bert": CLASSIFIER, "distilbert": CLASSIFIER, "bert-tied": MASKED, "llama": CAUSAL, "llama-tied": CAUSAL}
TIED = {"llama-tied": "model.embed_tokens.weight", "bert-tied": "bert.embeddings.word_embeddings.weight"}
CASES = [*((family, 2) for family in AUTO), ("llama-tied", 4)]
HIDDEN = (0, 2, LAYERS)
SHAPES = ((6, 11), (5, 7), (1, 4), (7, 5), (6, 11))  # rows, length; 5 and 7 rows don't divide into 3 micro-batches


def model_of(family: str) -> transformers.PreTrainedModel:
    if family == "bert-tied":
        return build_model("bert", "ForMaskedLM", vocab_size=VOCABULARY)
    if "llama" not in family:
        return build_model(family, vocab_size=VOCABULARY)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        tie_word_embeddings="tied" in family,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.LlamaForCausalLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    return model.eval()


def batch_of(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Returns a batch of rows of different lengths, the first without padding."""
    draw = torch.Generator().manual_seed(1000 * rows + length + seed)
    lengths = torch.randint(2, length + 1, (rows,), generator=draw)
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": torch.randint(5, VOCABULARY, (rows, length), generator=draw) * mask, "attention_mask": mask}


# The same loss, computed over a batch in one process or over its micro-batches in the last stage


def targets_of(family: str, batch: dict[str, Tensor]) -> dict[str, object]:
    """Returns labels and a teacher's logits.

    Classifiers get a class per sample, language models labels at a third of the tokens and a list of logits per row.
    """
    draw, mask = torch.Generator().manual_seed(3), batch["attention_mask"]
    if AUTO[family] is CLASSIFIER:
        rows = len(mask)
        return {
            "labels": torch.randint(5, (rows,), generator=draw),
            "teacher": (torch.randn(rows, 5, generator=draw),),
        }
    labels = torch.randint(VOCABULARY, mask.shape, generator=draw)
    labels[(mask == 0) | (labels % 3 > 0)] = -100
    return {"labels": labels, "teacher": [torch.randn(int(n), VOCABULARY, generator=draw) for n in mask.sum(1)]}


def loss_of(family: str, whole: dict[str, object]) -> Callable[[Tensor, dict], Tensor]:
    """Returns a loss function normalized by the size of the batch `whole`, whichever part of it is passed."""
    count = max(1, int((whole["labels"] != -100).sum()))  # type: ignore[attr-defined]

    def classes(logits: Tensor, part: dict) -> Tensor:
        teacher = part["teacher"][0].softmax(-1)
        hard = F.cross_entropy(logits, part["labels"], reduction="sum")
        return (hard + F.cross_entropy(logits, teacher, reduction="sum")) / count

    def tokens(logits: Tensor, part: dict) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), ignore_index=-100, reduction="sum")
        for row, teacher in zip(logits, part["teacher"], strict=True):
            loss = loss + F.cross_entropy(row[: len(teacher)], teacher.softmax(-1), reduction="sum")
        return loss / count

    return classes if AUTO[family] is CLASSIFIER else tokens


# Processes


def run_stage(rank: int, count: int, family: str, folder: Path) -> dict:
    stage = load_stage(folder, AUTO[family], rank, count)
    weights = {name: each for name, each in stage.named_parameters() if each.requires_grad}
    results = {
        "state": dict(stage.state_dict()),
        "parameters": {name: each.numel() for name, each in weights.items()},
        "answers": {},
        "losses": {},
        "gradients": {},
    }
    for parts in (1, 3):
        forward = PipelineForward(stage, micro_batches=parts, hidden=HIDDEN)
        results["answers"][parts] = [forward(batch_of(*shape)) for shape in SHAPES]
    for parts in (1, 4):
        stage.zero_grad()
        trainer = PipelineTrainer(stage, micro_batches=parts)
        results["losses"][parts] = []
        for shape in SHAPES[:2]:  # gradients of two batches are added up
            batch = batch_of(*shape)
            targets = targets_of(family, batch)
            loss = loss_of(family, targets)
            results["losses"][parts].append(trainer.step(batch, targets if rank == count - 1 else None, loss))
        results["gradients"][parts] = {name: each.grad.clone() for name, each in weights.items()}
    results["norm"] = trainer.clip_gradients(0.1)
    results["clipped"] = {name: each.grad for name, each in weights.items()}
    return results


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} on {case[1]}")
def pipeline_run(request, tmp_path_factory) -> tuple:
    """Returns the family, the whole model and the results of each process."""
    family, count = request.param
    folder = tmp_path_factory.mktemp(family)
    model_of(family).save_pretrained(folder / "model")
    results = run_ranks(run_stage, count, count, family, folder / "model", limit=SECONDS)
    # Loaded from files like the stages, since the summation order of a one-row product depends on the matrix's address.
    return family, AUTO[family].from_pretrained(folder / "model"), results


def gradients_of(family: str, model: transformers.PreTrainedModel) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses and gradients of the same two batches in one process."""
    model.zero_grad()
    losses = []
    for shape in SHAPES[:2]:
        batch = batch_of(*shape)
        targets = targets_of(family, batch)
        loss = loss_of(family, targets)(model(**batch).logits, targets)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: each.grad.clone() for name, each in model.named_parameters()}


@torch.no_grad()
def test_every_process_gets_the_logits_and_hidden_states_of_the_whole_model(pipeline_run):
    family, model, results = pipeline_run
    for parts, rank in itertools.product((1, 3), range(len(results))):
        for shape, mine in zip(SHAPES, results[rank]["answers"][parts], strict=True):
            batch = batch_of(*shape)
            theirs = model(**batch, output_hidden_states=True)
            pairs = [(mine["logits"], theirs.logits)]
            pairs += [(mine["hidden"][number], theirs.hidden_states[number]) for number in HIDDEN]
            for a, b in pairs:
                assert a.shape == b.shape
                # With one micro-batch the operations are the same, so the results are bit-identical.
                assert torch.equal(a, b) if parts == 1 else (a - b).abs().max() <= 1e-5


def test_losses_and_gradients_are_those_of_the_mean_loss_over_the_whole_batch(pipeline_run):
    family, model, results = pipeline_run
    losses, gradients = gradients_of(family, model)
    for parts in (1, 4):
        seen = set()
        for each in results:
            for mine, theirs in zip(each["losses"][parts], losses, strict=True):
                assert abs(mine.sum().item() - theirs) <= 1e-5
            for name, mine in each["gradients"][parts].items():
                close = (
                    torch.equal(mine, gradients[name]) if parts == 1 else (mine - gradients[name]).abs().max() <= 1e-5
                )
                assert close, name
            seen |= set(each["gradients"][parts])
        assert seen == set(gradients)
    assert [len(mine) for mine in results[0]["losses"][4]] == [3, 3]  # micro-batches of 2, 2, 2 and of 2, 2, 1 rows


def test_a_weight_tied_across_two_stages_gets_bit_identical_gradients(pipeline_run):
    family, model, results = pipeline_run
    shared = set(results[0]["gradients"][1]) & set(results[-1]["gradients"][1])
    assert shared == ({TIED[family]} if family in TIED else set())
    for name, parts in itertools.product(shared, (1, 4)):
        assert torch.equal(results[0]["gradients"][parts][name], results[-1]["gradients"][parts][name])


def test_gradients_are_clipped_by_their_norm_over_all_stages(pipeline_run):
    family, model, results = pipeline_run
    gradients_of(family, model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.2
    for each in results:
        torch.testing.assert_close(each["norm"], norm, rtol=1e-5, atol=0)
        for name, mine in each["clipped"].items():
            torch.testing.assert_close(mine, model.get_parameter(name).grad, rtol=1e-4, atol=1e-7)


def test_the_stages_partition_the_model_and_none_holds_more_than_its_share(pipeline_run):
    family, model, results = pipeline_run
    whole = model.state_dict()
    assert set().union(*(each["state"] for each in results)) == set(whole)
    for each in results:
        assert all(torch.equal(value, whole[name]) for name, value in each["state"].items())
    sizes = {name: value.numel() for name, value in model.named_parameters()}
    stage_sizes = [sum(each["parameters"].values()) for each in results]
    twice = sizes[TIED[family]] if family in TIED else 0
    assert sum(stage_sizes) == sum(sizes.values()) + twice
    assert max(stage_sizes) <= sum(stage_sizes) / len(stage_sizes) * 1.6


def run_two_pipelines(rank: int, count: int, folder: Path) -> dict:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = rank % 2
    stage = load_stage(folder, CAUSAL, dist.get_rank(groups[mine]), 2)
    batch = batch_of(5, 6, seed=mine)
    targets = targets_of("llama-tied", batch)
    PipelineTrainer(stage, groups[mine]).step(batch, targets, loss_of("llama-tied", targets))
    stage.gradient_checkpointing_enable()
    stage.train()
    again = PipelineTrainer(stage, groups[mine])
    before = {name: each.grad.clone() for name, each in stage.named_parameters()}
    again.step(batch, targets, loss_of("llama-tied", targets))
    return {
        "index": dist.get_rank(groups[mine]),
        "logits": PipelineForward(stage.eval(), groups[mine], micro_batches=2)(batch)["logits"],
        "once": before,
        "twice": {name: each.grad for name, each in stage.named_parameters()},
    }


def test_two_pipelines_in_one_world_do_not_interfere(tmp_path):
    model = model_of("llama-tied")
    model.save_pretrained(tmp_path / "model")
    results = run_ranks(run_two_pipelines, 4, 4, tmp_path / "model", limit=SECONDS)
    assert [each["index"] for each in results] == [0, 0, 1, 1]
    for rank, each in enumerate(results):
        batch = batch_of(5, 6, seed=rank % 2)
        targets = targets_of("llama-tied", batch)
        model.zero_grad()
        logits = model(**batch).logits
        loss_of("llama-tied", targets)(logits, targets).backward()
        assert (each["logits"] - logits).abs().max() <= 1e-5
        for name, mine in each["once"].items():
            assert (mine - model.get_parameter(name).grad).abs().max() <= 1e-5, name
            # The second step accumulated the same gradient, with activations recomputed in the backward pass.
            assert (each["twice"][name] - 2 * mine).abs().max() <= 1e-5, name


def rejection_messages(rank: int, count: int, folder: Path) -> list[str]:
    messages = []
    for attempt in (
        lambda: PipelineForward(load_stage(folder, CLASSIFIER, 1 - rank, 2)),
        lambda: PipelineTrainer(load_stage(folder, CLASSIFIER, rank, 4)),
        lambda: PipelineForward(load_stage(folder, CLASSIFIER, rank, 2), hidden=(0, LAYERS + 1)),
        lambda: PipelineForward(CLASSIFIER.from_pretrained(folder)),
    ):
        try:
            attempt()
            messages.append("")
        except InputError as error:
            messages.append(str(error))
    return messages


def test_wrong_stages_missing_hidden_states_and_unsplit_models_are_rejected(tmp_path):
    build_model("bert").save_pretrained(tmp_path / "model")
    for rank, messages in enumerate(run_ranks(rejection_messages, 2, 2, tmp_path / "model", limit=SECONDS)):
        assert f"expected stage {rank} of 2 in this process of the group, found stage {1 - rank} of 2" in messages[0]
        assert f"expected stage {rank} of 2 in this process of the group, found stage {rank} of 4" in messages[1]
        assert "from 0 to 4, found 5" in messages[2]
        assert "expected a pipeline stage, found a full model" in messages[3]


# Stages in one process


def run_stages(stages: list[transformers.PreTrainedModel], batch: dict[str, Tensor]) -> StageForward:
    """Returns the last stage after a forward pass through all stages."""
    inputs, rest = batch["input_ids"], {"attention_mask": batch["attention_mask"]}
    for stage in stages:
        forward = StageForward(stage)
        inputs = forward(inputs, **rest)
        rest["input_ids"] = batch["input_ids"]
    return forward


DECODER = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "sliding_window": 3, "bos_token_id": 1}
OTHERS = {
    "gpt2": ("GPT2{}", "LMHeadModel", {}),  # adds positions outside the embeddings
    "gemma2": ("Gemma2{}", "ForCausalLM", DECODER),  # scales the embeddings
    "qwen2": ("Qwen2{}", "ForCausalLM", DECODER | {"use_sliding_window": True, "max_window_layers": 3}),
    "bloom": ("Bloom{}", "ForCausalLM", {}),  # layers return tuples
    "modernbert": ("ModernBert{}", "ForSequenceClassification", {"local_attention": 4, "intermediate_size": 64}),
}


def other_model(family: str) -> transformers.PreTrainedModel:
    if family not in OTHERS:
        return build_model(family)
    name, head, changes = OTHERS[family]
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4}
    sizes |= {"pad_token_id": 0, "eos_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = getattr(transformers, name.format("Config"))(**sizes, **changes)
        return getattr(transformers, name.format(head))(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("family", ["roberta", "electra", "electra-projected", *OTHERS])
def test_the_chained_stages_of_other_families_give_the_logits_of_the_whole_model(family, tmp_path):
    model, batch = other_model(family), batch_of(4, 9)
    model.save_pretrained(tmp_path)
    auto = CAUSAL if "LM" in type(model).__name__ else CLASSIFIER
    last_stage = run_stages([load_stage(tmp_path, auto, index, 3) for index in range(3)], batch)
    assert torch.equal(last_stage.logits[0], model(**batch).logits)


@torch.no_grad()
def test_a_stage_is_loaded_in_the_requested_dtype_and_its_buffers_keep_theirs(tmp_path):
    model_of("llama").save_pretrained(tmp_path)
    whole = CAUSAL.from_pretrained(tmp_path, dtype=torch.bfloat16)
    stages = [load_stage(tmp_path, CAUSAL, index, 2, dtype=torch.bfloat16) for index in range(2)]
    assert torch.equal(stages[1].model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    assert {each.dtype for stage in stages for each in stage.parameters()} == {torch.bfloat16}
    assert torch.equal(run_stages(stages, batch_of(3, 6)).logits[0], whole(**batch_of(3, 6)).logits)
    assert type(stages[0]) is type(whole)


def test_a_weight_missing_from_the_files_is_named_by_the_stage_that_needs_it(tmp_path):
    build_model("bert").save_pretrained(tmp_path)
    name = "bert.encoder.layer.3.output.dense.bias"
    tensors = {key: value for key, value in load_file(tmp_path / "model.safetensors").items() if key != name}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    load_stage(tmp_path, CLASSIFIER, 0, 2)
    with pytest.raises(InputError, match=rf"{name}.*stage 1 of 2"):
        load_stage(tmp_path, CLASSIFIER, 1, 2)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_largest_share_is_minimal(count):
    for seed in range(20):
        sizes = torch.randint(1, 30, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
        starts = balance_shares(tuple(sizes), count)
        every = [(0, *rest) for rest in itertools.combinations(range(1, 7), count - 1)]
        largest = {each: max(sum(sizes[a:b]) for a, b in itertools.pairwise((*each, 7))) for each in every}
        assert starts in every
        assert largest[starts] == min(largest.values())


def test_a_stage_with_large_embeddings_has_fewer_layers():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    with torch.device("meta"):
        small = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=10))
        large = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=1000))
        headless = transformers.LlamaModel(transformers.LlamaConfig(**sizes, vocab_size=1000))
    assert [len(each) for each in split_layers(small, 4)] == [2, 2, 2, 2]
    assert [len(each) for each in split_layers(large, 4)] == [1, 3, 3, 1]
    assert [len(each) for each in split_layers(headless, 2)] == [2, 6]


def test_more_stages_than_layers_are_rejected():
    with pytest.raises(InputError, match="pp=5.*4"):
        split_layers(model_of("llama"), 5)


@pytest.mark.parametrize(
    ("family", "message"), [("Albert", "expected one list of 4 layers, found 0"), ("MPNet", "relative_attention_bias")]
)
def test_families_whose_layers_share_weights_are_rejected(family, message):
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    with pytest.raises(InputError, match=message):
        split_layers(getattr(transformers, f"{family}Model")(config), 2)


def test_a_model_that_runs_its_modules_in_an_unexpected_order_is_rejected():
    model = model_of("llama")
    body = model.model
    norm, layers = body._modules.pop("norm"), body._modules.pop("layers")
    body._modules |= {"norm": norm, "layers": layers}
    reduce_to_stage(model, [range(2), range(2, 4)], 1)
    with pytest.raises(
        InputError, match="expected a removed module to run before its layers, found a call after its layers"
    ):
        StageForward(model)(torch.zeros(2, 3, 32), input_ids=torch.ones(2, 3, dtype=torch.int64))


def test_measured_times_balance_the_stages():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    with torch.device("meta"):
        large = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=1000))
    times = PartTimes(before=0.0, layer=1.0, after=3.0)
    assert [len(each) for each in split_layers(large, 2, times)] == [5, 3]
    assert [len(each) for each in split_layers(large, 4, times)] == [2, 2, 3, 1]
    assert [len(each) for each in split_layers(large, 2, PartTimes(0.0, 1.0, 0.0))] == [4, 4]


def test_the_parts_of_a_model_are_timed_separately(monkeypatch):
    """By a clock that counts operations instead of seconds."""
    counter = FlopCounterMode(display=False)
    monkeypatch.setattr(part_times, "_read_clock", lambda device: float(counter.get_total_flops()))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    with counter:
        times = measure_part_times(
            transformers.LlamaConfig(**sizes, vocab_size=8000), CAUSAL, 4, 16, torch.device("cpu"), rounds=1
        )
    products = 64 * (4 * 64 + 3 * 128)  # of a layer's matrices with a token; attention's own come on top
    assert times.before == 0
    assert times.after == 6 * 4 * 16 * 64 * 8000
    assert 6 * 4 * 16 * products <= times.layer < 1.5 * 6 * 4 * 16 * products


def test_stages_cut_by_time_compute_what_the_model_does(tmp_path):
    model = model_of("llama")
    model.save_pretrained(tmp_path)
    stages = [load_stage(tmp_path, CAUSAL, index, 2, times=PartTimes(0.0, 1.0, 2.0)) for index in range(2)]
    assert [list(stage.boundary.layers) for stage in stages] == [[0, 1, 2], [3]]
    names = [set(stage.state_dict()) for stage in stages]
    assert names[0] | names[1] == set(model.state_dict())
