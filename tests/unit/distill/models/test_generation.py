"""Tests of generated continuations, which don't depend on the rest of the batch, and of training rows made of them."""

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from distill.cache import CacheReader, Generated, Identity, TopK, write_cache
from distill.cache.samples import build_samples, from_rows
from distill.cache.sequences import Sequences, collect_sequences
from distill.data.batches.token_blocks import LanguageBlocks
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.losses.logits import IGNORED
from distill.models.generation import Continuations, TokenSampler, find_end_tokens, generate
from distill.parallel.apply import apply_layout
from distill.parallel.layout import Layout
from distill.parallel.mesh import build_mesh
from distill.student.build import build_student
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from support.processes.ranks import run_ranks
from support.tiny_models import build_model, draw_weights

VOCABULARY_SIZE = 50
END, ENDS = 1, [1, *range(20, 25)]  # enough end tokens that some sequences end early
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12], [13], [14, 15, 16, 17, 18, 19, 33]]
FAMILIES = {  # each has another kind of positions or of attention window
    "Llama": {"intermediate_size": 48, "num_key_value_heads": 2},
    "GPT2": {},
    "Bloom": {},
    "Mistral": {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 4},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}


def decoder(family: str = "Llama", seed: int = 7, **changes: object) -> transformers.PreTrainedModel:
    """Returns a tiny decoder of the family in eval mode."""
    sizes = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    names = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": ENDS}
    config = getattr(transformers, f"{family}Config")(**(sizes | names | FAMILIES[family] | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        draw_weights(model)
    return model.eval()


def tensors(prompts: list[list[int]]) -> list[Tensor]:
    return [torch.tensor(prompt) for prompt in prompts]


def generate_rows(
    model: nn.Module, prompts: list[list[int]], new_tokens: int = 12, **settings: object
) -> Continuations:
    return generate(model, tensors(prompts), new_tokens=new_tokens, **settings)


@torch.no_grad()
def greedy_tokens(model: nn.Module, prompt: list[int], new_tokens: int) -> list[int]:
    """Returns the greedy continuation, computed with one full forward per token, without a KV cache or padding."""
    new: list[int] = []
    while len(new) < new_tokens and not set(ENDS) & set(new):
        new.append(int(model(input_ids=torch.tensor([prompt + new])).logits[0, -1].argmax()))
    return new


@torch.no_grad()
def log_probs_of(model: nn.Module, prompt: list[int], new: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the log-probabilities of `new`, computed in one forward over prompt and continuation."""
    ids = torch.cat([torch.tensor(prompt), new])
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, new[:, None])[:, 0].float()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuations_in_a_padded_batch_equal_those_of_each_prompt_alone(family):
    model = decoder(family)
    ids, log_probs = generate_rows(model, PROMPTS, temperature=0).split_rows()
    for prompt, continuation, continuation_log_probs in zip(PROMPTS, ids, log_probs, strict=True):
        assert continuation.tolist() == greedy_tokens(model, prompt, 12)
        torch.testing.assert_close(
            continuation_log_probs, log_probs_of(model, prompt, continuation), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_a_sampled_continuation_depends_on_prompt_and_seed_but_not_on_the_batch(family, top_p):
    model, settings = decoder(family), {"temperature": 1.3, "top_p": top_p, "seed": 3}
    together, found_log_probs = generate_rows(model, PROMPTS, **settings).split_rows()
    backwards = generate_rows(model, PROMPTS[::-1], **settings).split_rows()[0][::-1]
    alone = [generate_rows(model, [prompt], **settings).split_rows()[0][0] for prompt in PROMPTS]
    other = generate_rows(model, PROMPTS, **settings | {"seed": 4}).split_rows()[0]
    for i, prompt in enumerate(PROMPTS):
        assert torch.equal(together[i], backwards[i])
        assert torch.equal(together[i], alone[i])
        torch.testing.assert_close(
            found_log_probs[i], log_probs_of(model, prompt, together[i], 1.3), atol=1e-4, rtol=1e-4
        )
    assert any(not torch.equal(a, b) for a, b in zip(together, other, strict=True))
    assert any(each.tolist() != greedy_tokens(model, p, 12) for each, p in zip(together, PROMPTS, strict=True))


def test_a_continuation_ends_with_its_end_token_followed_by_padding_only():
    model = decoder()
    generated = generate_rows(model, PROMPTS, temperature=1.0, seed=5)
    assert generated.ids.shape == generated.log_probs.shape == (len(PROMPTS), int(generated.lengths.max()))
    ended = 0
    for ids, log_probs, length in zip(generated.ids, generated.log_probs, generated.lengths.tolist(), strict=True):
        assert not set(ENDS) & set(ids[: length - 1].tolist())
        assert length == 12 or int(ids[length - 1]) in ENDS
        assert not ids[length:].any()
        assert not log_probs[length:].any()
        ended += length < 12
    assert 0 < ended < len(PROMPTS)


def test_tokens_are_sampled_from_the_nucleus_with_their_renormalized_probabilities():
    n, top_p, temperature = 3000, 0.7, 2.0
    logits = torch.randn(VOCABULARY_SIZE, generator=torch.Generator().manual_seed(3)) * 4
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    nucleus = order[: int((p[order].cumsum(0) < top_p).sum()) + 1]
    expected = torch.zeros_like(p).index_copy(0, nucleus, p[nucleus] / p[nucleus].sum())
    assert 3 < len(nucleus) < VOCABULARY_SIZE
    prompts = tensors([[i // VOCABULARY_SIZE, i % VOCABULARY_SIZE] for i in range(n)])
    drawn = TokenSampler(prompts, temperature, 0, top_p)(torch.empty(0), logits.expand(n, -1)).argmax(-1)
    share = torch.bincount(drawn, minlength=VOCABULARY_SIZE) / n
    assert not share[expected == 0].any()
    # 5 standard deviations of a binomial proportion
    assert ((share - expected).abs() <= 5 * (expected * (1 - expected) / n).sqrt() + 1e-3).all()


def test_generation_ignores_and_restores_training_modes_settings_and_the_random_state():
    model = decoder(attention_dropout=0.5)
    expected = generate_rows(model, PROMPTS, temperature=1.0)
    model.generation_config.repetition_penalty = 3.0
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    model.train()
    model.lm_head.eval()
    modes, lengths = [module.training for module in model.modules()], []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: lengths.append(args[0].shape[1]))
    state = torch.get_rng_state()
    found = generate_rows(model, PROMPTS, temperature=1.0)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.log_probs, expected.log_probs)
    assert lengths == [max(map(len, PROMPTS)), *[1] * (len(lengths) - 1)]
    assert [module.training for module in model.modules()] == modes
    assert model.is_gradient_checkpointing
    assert model.config.use_cache is False
    assert model.generation_config.repetition_penalty == 3.0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failed_generation_restores_training_mode_and_generation_config():
    model = decoder().train()
    generation_config = model.generation_config
    with pytest.raises(IndexError):
        generate_rows(model, [[VOCABULARY_SIZE + 3]])
    assert model.training
    assert model.generation_config is generation_config


def test_generation_with_anything_but_a_causal_model_is_rejected():
    bidirectional = transformers.BertLMHeadModel(build_model("bert").config)
    t5 = transformers.T5Config(vocab_size=VOCABULARY_SIZE, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    for model in (build_model("bert", "ForMaskedLM"), bidirectional, transformers.T5ForConditionalGeneration(t5)):
        with pytest.raises(InputError, match=f"expected a causal language model, found {type(model).__name__}"):
            generate_rows(model, [[5, 6]])


PROMPTS_OF_RANK = ((0, 2, 3), (1, 4))  # prompts of each process; all continuations of the second process end early


def generate_sharded(rank: int) -> tuple[list[list[int]], Tensor]:
    """Returns this process's continuations by a model sharded across two processes, and a gradient taken afterwards."""
    model = apply_layout(decoder(), Layout(fsdp=2), build_mesh(Layout(fsdp=2), "cpu"))
    model.train()
    ids = generate_rows(model, [PROMPTS[i] for i in PROMPTS_OF_RANK[rank]], temperature=1.0, seed=5).split_rows()[0]
    model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.square().mean().backward()
    return [each.tolist() for each in ids], model.lm_head.weight.grad.full_tensor()


def test_sharded_processes_that_finish_generating_at_different_steps_stay_in_sync():
    model = decoder()
    expected = [each.tolist() for each in generate_rows(model, PROMPTS, temperature=1.0, seed=5).split_rows()[0]]
    model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.square().mean().backward()
    found = run_ranks(generate_sharded, 2)
    assert max(len(expected[i]) for i in PROMPTS_OF_RANK[1]) < max(map(len, expected))
    for rows, (ids, gradient) in zip(PROMPTS_OF_RANK, found, strict=True):
        assert ids == [expected[i] for i in rows]
        torch.testing.assert_close(gradient, model.lm_head.weight.grad, atol=1e-5, rtol=1e-4)


# Sequences as training data

TEXTS = [np.array(prompt) for prompt in PROMPTS]


def test_cached_and_online_sequences_equal_the_teachers_continuations_in_prompt_order(tmp_path):
    model, samples = decoder(), from_rows(TEXTS, None, None, 0)
    teacher = OnlineTeacher(model, ["generated"], new_tokens=6, temperature=1.0, seed=2)
    write_cache(
        tmp_path,
        Identity("t", "w", (Generated(VOCABULARY_SIZE, new_tokens=6, temperature=1.0, seed=2),)),
        samples,
        teacher,
    )
    expected = generate_rows(model, PROMPTS, 6, temperature=1.0, seed=2).split_rows()[0]
    for signals in (CacheReader(tmp_path), teacher):
        found = collect_sequences(signals, samples, batch_tokens=8)
        assert [each.tolist() for each in found.prompts] == PROMPTS
        assert [each.tolist() for each in found.continuations] == [each.tolist() for each in expected]


def test_signals_without_sequences_and_mismatched_or_empty_sequences_are_rejected(tmp_path):
    samples = build_samples(LanguageBlocks(TEXTS), 0)
    write_cache(tmp_path, Identity("t", "w", (TopK(VOCABULARY_SIZE, k=4),)), samples, OnlineTeacher(decoder()))
    with pytest.raises(InputError, match="expected a teacher's generated sequences, found ids, log_probs, tail"):
        collect_sequences(CacheReader(tmp_path), samples)
    with pytest.raises(InputError, match="found 1 for 2"):
        Sequences(TEXTS[:2], TEXTS[:1])
    with pytest.raises(InputError, match="found 1 empty ones"):
        Sequences([*TEXTS[:1], np.zeros(0, np.int64)], TEXTS[:2])


def test_labels_and_positions_cover_the_continuations_but_not_prompts_or_padding():
    rows = Sequences(TEXTS, [np.array(new) for new in ([30, 31], [32, END], [33], [34, 35, 36], [37])])
    batch = rows.collate([1, 4, 3], 0)
    assert rows.lengths.tolist() == [5, 4, 4, 4, 8]
    assert batch["input_ids"].tolist() == [
        [8, 9, 32, END, 0, 0, 0, 0],
        [14, 15, 16, 17, 18, 19, 33, 37],
        [13, 34, 35, 36, 0, 0, 0, 0],
    ]
    assert batch["attention_mask"].sum(1).tolist() == [4, 8, 4]
    wanted = torch.full((3, 8), IGNORED)
    wanted[0, 1:3], wanted[1, 6], wanted[2, :3] = torch.tensor([32, END]), 37, torch.tensor([34, 35, 36])
    assert torch.equal(batch["labels"], wanted)
    assert torch.equal(batch["positions"], wanted != IGNORED)
    samples = from_rows(rows.input_ids, None, rows.positions, 0)  # for a cache of distributions at these positions
    assert torch.equal(samples.batch([1, 4, 3])["positions"], batch["positions"])


def test_the_loss_on_sequences_is_the_mean_over_the_tokens_of_their_continuations():
    model, teacher = decoder(seed=1), decoder()
    sequences = collect_sequences(OnlineTeacher(teacher, ["generated"], new_tokens=5), from_rows(TEXTS, None, None, 0))
    batch = sequences.collate(range(len(TEXTS)), 0)
    module = DistillationModule(
        model, loss=LossConfig(kl=1, ce=1, temperature=1), train=TrainConfig(), signals=OnlineTeacher(teacher)
    )
    with torch.no_grad():
        terms = module.compute_terms(batch)
    losses, distances = [], []
    for prompt, new in zip(sequences.prompts, sequences.continuations, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, new]))[None]
        places = slice(len(prompt) - 1, -1)
        p, q = (each(input_ids=ids).logits[0, places].double().log_softmax(-1) for each in (teacher, model))
        losses.append(-q.gather(1, torch.from_numpy(new)[:, None])[:, 0])
        distances.append((p.exp() * (p - q)).sum(-1))
    assert float(terms["ce"]) == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert float(terms["kl"]) == pytest.approx(torch.cat(distances).mean().item(), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_limited_to_a_smaller_vocabulary_emits_and_normalizes_over_its_ids_only(temperature):
    model = decoder(eos_token_id=END)
    free = generate_rows(model, PROMPTS, temperature=temperature)
    assert int(free.ids.max()) >= 30
    bound = generate_rows(model, PROMPTS, temperature=temperature, vocabulary_size=30)
    assert int(bound.ids.max()) < 30
    ids, log_probs = bound.split_rows()
    logits = model(input_ids=torch.cat([torch.tensor(PROMPTS[0]), ids[0]])[None]).logits[0, len(PROMPTS[0]) - 1 : -1]
    expected = logits[:, :30].log_softmax(-1).gather(-1, ids[0][:, None])[:, 0]
    assert torch.allclose(log_probs[0], expected, atol=1e-5)


def test_end_tokens_are_those_of_the_model_and_the_tokenizer_together(tokenizer):
    assert find_end_tokens(decoder(eos_token_id=None), tokenizer) == [tokenizer.sep_token_id]
    assert find_end_tokens(decoder(eos_token_id=[40, 41]), tokenizer) == sorted({40, 41, tokenizer.sep_token_id})


@pytest.mark.parametrize("spec", ["teacher", "layers=1", "fresh,layers=1"])
def test_a_student_keeps_the_end_tokens_of_its_teachers_generation_config(spec):
    teacher = decoder()
    teacher.generation_config.eos_token_id = [3, 4]
    assert build_student(teacher, spec).generation_config.eos_token_id == [3, 4]
