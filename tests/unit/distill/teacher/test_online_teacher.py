"""Tests that the signals of a teacher in memory are those of plain forward passes and of its own generation."""

import pytest
import torch
import transformers
from torch import nn

from distill.errors import InputError
from distill.models.generation import TokenSampler
from distill.teacher.online import OnlineTeacher
from support.tiny_models import build_model

ENCODERS = ("bert", "roberta", "distilbert", "electra", "electra-projected")
LAYERS = 4


def llama(**changes: object) -> transformers.LlamaForCausalLM:
    """Returns a tiny causal model whose most likely token differs between positions."""
    settings = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes)))
        for parameter in model.parameters():
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return model.eval()


def model_of(family: str) -> transformers.PreTrainedModel:
    return llama() if family == "llama" else build_model(family)


def projections_of(family: str, model: transformers.PreTrainedModel, layer: int) -> list[nn.Module]:
    """Returns the query, key and value projections of a layer, found by their names in each family."""
    if family == "llama":
        attention = model.model.layers[layer].self_attn
        return [attention.q_proj, attention.k_proj, attention.v_proj]
    if family == "distilbert":
        attention = model.distilbert.transformer.layer[layer].attention
        return [attention.q_lin, attention.k_lin, attention.v_lin]
    body = getattr(model, "electra" if "electra" in family else family)
    attention = body.encoder.layer[layer].attention.self
    return [attention.query, attention.key, attention.value]


def has_hooks(family: str, model: transformers.PreTrainedModel) -> bool:
    return any(each._forward_hooks for layer in range(LAYERS) for each in projections_of(family, model, layer))


@pytest.fixture(params=[*ENCODERS, "llama"])
def family(request) -> str:
    return request.param


@pytest.fixture
def batch(token_batch) -> dict[str, torch.Tensor]:
    return token_batch | {"input_ids": token_batch["input_ids"] % 50}


@torch.no_grad()
def test_logits_are_those_of_a_plain_forward(family, batch):
    model = model_of(family)
    outputs = OnlineTeacher(model)(batch)
    assert list(outputs) == ["logits"]
    assert torch.equal(outputs["logits"], model(**batch).logits)


@torch.no_grad()
def test_hidden_states_are_those_of_the_embeddings_and_all_layers(family, batch):
    model = model_of(family)
    found, expected = OnlineTeacher(model, ["hidden"])(batch)["hidden"], model(**batch, output_hidden_states=True)
    assert len(found) == LAYERS + 1
    for mine, theirs in zip(found, expected.hidden_states, strict=True):
        assert torch.equal(mine, theirs)


@torch.no_grad()
def test_an_embedding_is_the_mean_of_the_last_hidden_states_without_padding(family, batch):
    model = model_of(family)
    embeddings = OnlineTeacher(model, ["embedding"])(batch)["embedding"]
    last = model(**batch, output_hidden_states=True).hidden_states[-1]
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        torch.testing.assert_close(embeddings[row], last[row, :length].mean(0))


@torch.no_grad()
def test_relations_are_the_queries_keys_and_values_of_each_layer_in_order(family, batch):
    model = model_of(family)
    captured: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    for layer in range(LAYERS):
        for linear in projections_of(family, model, layer):
            linear.register_forward_hook(lambda module, inputs, output, outputs=captured[layer]: outputs.append(output))
    model(**batch)
    expected = [list(outputs) for outputs in captured]
    found = OnlineTeacher(model, ["relations"])(batch)["relations"]
    assert len(found) == LAYERS
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs) == 3
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert mine[0].shape == (*batch["input_ids"].shape, 32)


def test_a_query_leaves_no_hooks_no_gradients_and_no_training_mode(family, batch):
    model = model_of(family).train()
    outputs = OnlineTeacher(model, ["logits", "hidden", "relations", "embedding"])(batch)
    assert not has_hooks(family, model)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not outputs["logits"].requires_grad
    assert not outputs["relations"][0][0].requires_grad


def test_hooks_are_removed_after_a_failed_forward(batch):
    model = build_model("bert")
    with pytest.raises(IndexError):
        OnlineTeacher(model, ["relations"])(batch | {"input_ids": batch["input_ids"] + 10_000})
    assert not has_hooks("bert", model)


@torch.no_grad()
def test_a_body_without_a_head_returns_only_the_requested_features(batch):
    features = OnlineTeacher(build_model("bert", "Model"), ["hidden", "relations"])(batch)
    assert set(features) == {"hidden", "relations"}


def test_token_types_reach_the_teacher(batch):
    teacher = OnlineTeacher(build_model("bert"))
    typed = batch | {"token_type_ids": batch["attention_mask"]}
    assert not torch.equal(teacher(batch)["logits"], teacher(typed)["logits"])


def test_an_unknown_signal_is_rejected():
    with pytest.raises(InputError, match="attentions"):
        OnlineTeacher(build_model("bert"), ["logits", "attentions"])


SMALL = {"vocab_size": 50, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
FUSED_PROJECTIONS = {
    "gpt2": (transformers.GPT2Config, {}, lambda model, layer: model.transformer.h[layer].attn.c_attn),
    "modernbert": (
        transformers.ModernBertConfig,
        {"intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
        | {"sep_token_id": 2},
        lambda model, layer: model.model.layers[layer].attn.Wqkv,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("family", FUSED_PROJECTIONS)
def test_a_fused_projection_is_split_into_queries_keys_and_values(family, batch):
    kind, settings, find_projection = FUSED_PROJECTIONS[family]
    auto = transformers.AutoModelForCausalLM if family == "gpt2" else transformers.AutoModelForMaskedLM
    model = auto.from_config(kind(**SMALL, **settings)).eval()
    projections: list[torch.Tensor] = []
    find_projection(model, 1).register_forward_hook(lambda module, inputs, output: projections.append(output))
    relations = OnlineTeacher(model, ["relations"])(batch)["relations"]
    assert len(relations) == 2
    for i, each in enumerate(relations[1]):
        assert torch.equal(each, projections[0][..., 32 * i : 32 * (i + 1)])


def test_relations_of_layers_with_shared_projections_are_rejected():
    sizes = {"embedding_size": 16, "hidden_size": 32, "intermediate_size": 64}
    config = transformers.AlbertConfig(vocab_size=50, num_hidden_layers=3, num_attention_heads=4, **sizes)
    with pytest.raises(InputError, match="3 layers, found them in 1"):
        OnlineTeacher(transformers.AlbertModel(config), ["relations"])


# Generated sequences

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12], [13], [14, 15, 16, 17, 18]]


def prompts_of(prompts: list[list[int]], *, left: bool = False) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        columns = slice(longest - len(prompt), None) if left else slice(0, len(prompt))
        ids[row, columns], mask[row, columns] = torch.tensor(prompt), 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def greedy_tokens(model: nn.Module, prompt: list[int], new_tokens: int, ends: set[int]) -> list[int]:
    """Returns the greedy continuation, computed with one full forward per token."""
    new: list[int] = []
    while len(new) < new_tokens and not ends & set(new):
        new.append(int(model(input_ids=torch.tensor([prompt + new])).logits[0, -1].argmax()))
    return new


@torch.no_grad()
def teacher_forced_log_probs(
    model: nn.Module, prompt: list[int], new: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Returns the log-probabilities of `new`, computed in one forward over prompt and sequence."""
    ids = torch.cat([torch.tensor(prompt), new])
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, new[:, None])[:, 0]


def generated(model: nn.Module, prompts: list[list[int]], *, left: bool = False, **settings: object) -> tuple:
    return OnlineTeacher(model, ["generated"], **settings)(prompts_of(prompts, left=left))["generated"]


@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
def test_greedy_tokens_are_those_of_forwards_over_each_prompt_alone(left):
    model = llama()
    ids, log_probs = generated(model, PROMPTS, left=left, new_tokens=9)
    for i, prompt in enumerate(PROMPTS):
        assert ids[i].tolist() == greedy_tokens(model, prompt, 9, set())
        torch.testing.assert_close(log_probs[i], teacher_forced_log_probs(model, prompt, ids[i]), atol=1e-4, rtol=1e-4)
    assert len({tuple(each.tolist()) for each in ids}) == len(PROMPTS)


def test_a_sequence_ends_with_its_end_token_while_the_others_continue():
    free = [each.tolist() for each in generated(llama(), PROMPTS, new_tokens=9)[0]]
    early, late = free[0][3], free[3][0]
    for ends in (early, [early, late]):
        model = llama(eos_token_id=ends)
        ids, log_probs = generated(model, PROMPTS, new_tokens=9)
        for i, prompt in enumerate(PROMPTS):
            wanted = greedy_tokens(model, prompt, 9, {ends} if isinstance(ends, int) else set(ends))
            assert ids[i].tolist() == wanted
            torch.testing.assert_close(
                log_probs[i], teacher_forced_log_probs(model, prompt, ids[i]), atol=1e-4, rtol=1e-4
            )
        assert ids[0][-1] == early
        assert len(ids[0]) <= 4
        assert max(map(len, ids)) == 9


def test_a_checkpoints_generation_config_changes_neither_tokens_nor_probabilities():
    model = llama()
    expected = generated(model, PROMPTS, new_tokens=9)
    habits = {"repetition_penalty": 3.0, "do_sample": True, "top_k": 2, "no_repeat_ngram_size": 1, "temperature": 0.3}
    model.generation_config = transformers.GenerationConfig(**habits)
    found = generated(model, PROMPTS, new_tokens=9)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert model.generation_config.repetition_penalty == 3.0


def test_sampled_tokens_come_with_their_log_probs_at_the_sampling_temperature():
    model = llama()
    ids, log_probs = generated(model, PROMPTS, new_tokens=9, temperature=1.7, seed=3)
    for i, prompt in enumerate(PROMPTS):
        expected = teacher_forced_log_probs(model, prompt, ids[i], temperature=1.7)
        torch.testing.assert_close(log_probs[i], expected, atol=1e-4, rtol=1e-4)
    assert any(each.tolist() != greedy_tokens(model, p, 9, set()) for each, p in zip(ids, PROMPTS, strict=True))


def test_a_prompts_continuation_depends_on_the_seed_but_not_on_the_batch():
    model, settings = llama(), {"new_tokens": 9, "temperature": 1.0}
    together = generated(model, PROMPTS, **settings)[0]
    backwards = generated(model, PROMPTS[::-1], **settings)[0][::-1]
    alone = [generated(model, [prompt], **settings)[0][0] for prompt in PROMPTS]
    other = generated(model, PROMPTS, seed=1, **settings)[0]
    for i in range(len(PROMPTS)):
        assert torch.equal(together[i], backwards[i])
        assert torch.equal(together[i], alone[i])
        assert not torch.equal(together[i], other[i])


def test_tokens_are_sampled_with_the_frequencies_of_the_teachers_distribution():
    model, n, temperature = llama(), 2000, 3.0
    logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].detach() / temperature
    first = [
        TokenSampler(torch.tensor([PROMPTS[0]]), temperature, seed)(torch.empty(0), logits[None] * temperature).argmax()
        for seed in range(n)
    ]
    share, p = torch.bincount(torch.stack(first), minlength=50) / n, logits.softmax(-1)
    # 5 standard deviations of a binomial proportion
    assert ((share - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-3).all()


def test_generation_leaves_the_global_random_state_unchanged():
    model, state = llama(), torch.get_rng_state()
    generated(model, PROMPTS, new_tokens=3, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_sequences_and_logits_can_be_requested_together():
    outputs = OnlineTeacher(llama(), ["logits", "generated"], new_tokens=2)(prompts_of(PROMPTS))
    assert outputs["logits"].shape == (5, 5, 50)
    assert [len(each) for each in outputs["generated"][0]] == [2] * 5
