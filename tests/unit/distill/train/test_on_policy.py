"""Tests of on-policy distillation: generated sequences, the teacher's signals for them, and resuming after a kill."""

import csv
from dataclasses import replace
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distill.cache import CacheReader, Identity, TopK, write_cache
from distill.cache.samples import build_samples
from distill.cache.sequences import Sequences
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.sharding import shard_batch
from distill.data.batches.token_blocks import LanguageBlocks
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.losses.logits import IGNORED, reverse_kl
from distill.models.generation import generate
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.on_policy import OnPolicy, extract_prompts
from distill.train.steps.on_policy_config import OnPolicyConfig
from pipelines.runs.console import Console
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.trainer import fit_module
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import MachineConfig
from support.interrupted_training import Killed, killed_at
from support.tiny_models import build_model
from unit.distill.models.test_generation import VOCABULARY_SIZE, decoder

LOSS = LossConfig(kl=1, temperature=1, divergence="reverse_kl")
TRAIN = TrainConfig(epochs=2, batch_size=4, learning_rate=1e-3, dropout=0.1, checkpoint_every=2)
ON_POLICY = OnPolicyConfig(share=1, new_tokens=7, prompt_tokens=3)
BLOCKS = LanguageBlocks(list(np.random.default_rng(0).integers(3, VOCABULARY_SIZE, (14, 9))))


def batch_of(rows: int = 5) -> dict[str, Tensor]:
    return BLOCKS.collate(range(rows), 0)


def module_of(
    student: nn.Module,
    *,
    config: OnPolicyConfig = ON_POLICY,
    loss: LossConfig = LOSS,
    seed: int = 3,
    **settings: object,
) -> DistillationModule:
    settings = {"signals": OnlineTeacher(decoder(seed=1))} | settings
    return DistillationModule(student, loss=loss, train=TRAIN, on_policy=OnPolicy(config, seed), **settings)


def expected_kl(
    student: nn.Module, teacher: nn.Module, config: OnPolicyConfig, batch: dict, stream: int
) -> list[Tensor]:
    """Returns the reverse KL at each generated token, a tensor per row, with each row alone and in float64."""
    rows = []
    for ids in batch["input_ids"]:
        prompt = ids[: config.prompt_tokens]
        settings = {"new_tokens": config.new_tokens, "temperature": config.temperature, "seed": stream}
        new = generate(student, [prompt], **settings).split_rows()[0][0]
        whole = torch.cat([prompt, new])[None]
        q, p = (
            each(input_ids=whole).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
            for each in (student, teacher)
        )
        assert len(q) == len(new)
        rows.append((q.exp() * (q - p)).sum(-1))
    return rows


def test_positions_cover_the_generated_tokens_up_to_the_end_but_not_the_prompt():
    student, policy = decoder(), OnPolicy(ON_POLICY, 3)
    generated = policy.build_batch(student, 4, batch_of(10))
    new = generate(student, list(batch_of(10)["input_ids"][:, :3]), new_tokens=7, seed=policy.draw_seed(4))
    assert new.lengths.min() < new.lengths.max() == 7
    for i, length in enumerate(new.lengths.tolist()):
        assert generated["attention_mask"][i].sum() == 3 + length
        assert torch.equal(generated["input_ids"][i, :3], batch_of(10)["input_ids"][i, :3])
        places = generated["positions"][i].nonzero()[:, 0]
        assert torch.equal(generated["input_ids"][i, places + 1], new.ids[i, :length])
        assert len(places) == length
    assert (generated["labels"] == IGNORED).all()


def test_the_loss_is_the_reverse_kl_over_the_sequences_that_the_student_generated():
    student, teacher = decoder(), decoder(seed=1)
    module = module_of(student, loss=replace(LOSS, ce=1))
    batch = batch_of() | {"signals": {"logits": torch.zeros(5, 9, VOCABULARY_SIZE)}}  # as from a cache of the texts
    found = module.compute_terms(module._select_batch(batch))
    with torch.no_grad():
        expected = torch.cat(
            expected_kl(student, teacher, ON_POLICY, batch, OnPolicy(ON_POLICY, 3).draw_seed(0))
        ).mean()
    assert found["kl"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert found["ce"].item() == 0


@pytest.mark.parametrize("autocast", [False, True])
def test_the_gradient_is_that_of_the_loss_on_the_generated_sequences_as_fixed_data(autocast):
    student = decoder(attention_dropout=0.2).train()
    module = module_of(student)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.manual_seed(1)
        module.training_step(batch_of(), 0).backward()
    gradients = {name: each.grad.clone() for name, each in student.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        generated = module.on_policy.build_batch(student, 0, batch_of())
    student.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.manual_seed(1)
        logits = student(input_ids=generated["input_ids"], attention_mask=generated["attention_mask"]).logits
        teacher = decoder(seed=1)(
            input_ids=generated["input_ids"], attention_mask=generated["attention_mask"]
        ).logits.detach()
        reverse_kl(logits[generated["positions"]], teacher[generated["positions"]]).backward()
    assert any(each.abs().max() > 0 for each in gradients.values())
    for name, each in student.named_parameters():
        assert torch.equal(gradients[name], each.grad), name
    assert student.training


def test_the_configured_share_of_steps_is_on_policy_and_reproducible_from_the_seed():
    policy, n = OnPolicy(replace(ON_POLICY, share=0.3), 7), 4000
    drawn = [policy.draw_seed(step) for step in range(n)]
    count = sum(each is not None for each in drawn)
    assert abs(count - 0.3 * n) < 5 * (0.3 * 0.7 * n) ** 0.5
    assert len(set(drawn)) == count + 1
    assert drawn[:50] == [OnPolicy(replace(ON_POLICY, share=0.3), 7).draw_seed(step) for step in range(50)]
    assert drawn[:50] != [OnPolicy(replace(ON_POLICY, share=0.3), 8).draw_seed(step) for step in range(50)]
    batch = batch_of()
    assert all(OnPolicy(replace(ON_POLICY, share=0)).build_batch(decoder(), step, batch) is batch for step in range(50))
    assert None not in [OnPolicy(ON_POLICY).draw_seed(step) for step in range(50)]


def test_a_prompt_ends_where_the_answer_begins_and_leaves_a_texts_last_token():
    sequences = Sequences([np.array([5, 6, 7, 8]), np.array([9])], [np.array([10, 11]), np.array([12, 13, 14, 15, 16])])
    batch = sequences.collate([0, 1], 0)
    by_labels = {name: value for name, value in batch.items() if name != "positions"}
    unlabelled = batch | {"labels": torch.full_like(batch["labels"], IGNORED)}
    for each in (batch, by_labels, unlabelled):
        # If the first token is already requested, as in plain text, the prompt has three tokens.
        assert [ids[:n].tolist() for ids, n in extract_prompts(each, 3)] == [[5, 6, 7, 8], [9, 12, 13]]
    left_padded = {
        name: value.flip(1) for name, value in LanguageBlocks([np.array([7, 6, 5, 4])] * 2).collate([0, 1], 0).items()
    }
    left_padded = {
        name: torch.cat([torch.zeros(2, 2, dtype=torch.int64), value], 1) for name, value in left_padded.items()
    }
    assert [ids[:n].tolist() for ids, n in extract_prompts(left_padded | {"labels": left_padded["input_ids"]}, 9)] == [
        [4, 5, 6]
    ] * 2, "the last token is left to be generated, or the continuation comes after the end of a text"


def test_a_long_prompt_is_truncated_from_the_left_to_fit_the_positions():
    student = decoder("GPT2", n_positions=12)
    rows = Sequences([np.arange(3, 13)], [np.array([20, 21])])
    generated = OnPolicy(ON_POLICY).build_batch(student, 0, rows.collate([0], 0))
    assert generated["input_ids"].shape[1] <= 12
    assert generated["input_ids"][0, :5].tolist() == [8, 9, 10, 11, 12]  # the end of the prompt


def test_the_mean_gradient_over_processes_is_that_of_the_whole_batch():
    """The processes' mean gradient is the gradient of the whole batch, however many tokens each generated."""
    batch, whole = batch_of(7), decoder().train()
    module_of(whole).training_step(batch, 0).backward()
    parts = [shard_batch(batch, rank, 8) for rank in range(8)]  # one of them has no row
    batches = [
        OnPolicy(ON_POLICY, 3).build_batch(whole, 0, {n: v for n, v in each.items() if n != "shares"}) for each in parts
    ]
    token_counts = torch.tensor([int(each["positions"].sum()) for each in batches[:7]] + [0])
    assert len(set(token_counts.tolist())) > 2
    total, local_counts = [torch.zeros_like(each) for each in whole.parameters()], []
    for part in parts:
        student = decoder().train()
        module = module_of(student)

        def mean(values: Tensor) -> Tensor:
            local_counts.append(float(values[0]))
            tokens = torch.tensor([int(each["attention_mask"].sum()) for each in batches[:7]]).sum() / 8
            return torch.tensor([token_counts.sum() / 8, 0, tokens])

        generated = module.on_policy.build_batch(student, 0, part, mean)
        module.compute_terms(generated)["kl"].backward()
        total = [a + b.grad / 8 for a, b in zip(total, student.parameters(), strict=True)]
    assert local_counts == token_counts.tolist()
    for found, expected in zip(total, whole.parameters(), strict=True):
        torch.testing.assert_close(found, expected.grad, atol=2e-5, rtol=1e-4)


def fit_weights(folder: Path, config: OnPolicyConfig, train: TrainConfig = TRAIN) -> dict[str, Tensor]:
    lightning.seed_everything(7, verbose=False)
    module = module_of(decoder(attention_dropout=0.1), config=config)
    data = RowsDataModule(BLOCKS, LanguageBlocks(BLOCKS.input_ids[:2]), batch_size=train.batch_size, seed=7)
    machine = MachineConfig(accelerator="cpu", precision="32", threads=1, log_every=1)
    job = TrainingJob(
        label="test", train=train, machine=machine, precision="32", seed=7, console=Console(quiet=True),
        wandb_folder=folder,
    )  # fmt: skip
    (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
    fit_module(module, data, folder, job)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_killed_and_resumed_run_gives_the_weights_of_an_undisturbed_run(accumulate, tmp_path, monkeypatch):
    config, train = replace(ON_POLICY, share=0.5), replace(TRAIN, accumulate=accumulate, checkpoint_every=1)
    expected = fit_weights(tmp_path / "undisturbed", config, train)
    for batch in (3, 5):
        with monkeypatch.context() as patch:
            killed_at(batch, patch)
            with pytest.raises(Killed):
                fit_weights(tmp_path / str(batch), config, train)
        found = fit_weights(tmp_path / str(batch), config, train)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), f"after batch {batch}"
    texts = fit_weights(tmp_path / "texts", replace(config, share=0), train)
    assert any(not torch.equal(texts[name], value) for name, value in expected.items())


def test_the_share_of_time_spent_on_generation_is_logged(tmp_path):
    fit_weights(tmp_path, ON_POLICY)
    with next((tmp_path / "logs").glob("*/metrics.csv")).open() as file:
        shares = [float(row["train/generation_share"]) for row in csv.DictReader(file) if row["train/kl"]]
    assert len(shares) > 4
    assert all(0 < share < 1 for share in shares)


NARROW = 8  # the texts contain only tokens below this id


@torch.no_grad()
def distance_on_own_texts(student: nn.Module, teacher: nn.Module) -> float:
    """Returns the reverse KL in nats per token on the student's continuations of unseen prompts."""
    prompts = {"input_ids": torch.from_numpy(np.random.default_rng(9).integers(3, NARROW, (32, 3)))}
    return torch.cat(expected_kl(student, teacher, ON_POLICY, prompts, 11)).mean().item()


def test_on_policy_training_brings_a_student_closer_to_its_teacher_on_its_own_texts():
    """The teacher, which depends on the last token only, soon leaves the few tokens that occur in the texts."""
    teacher = decoder(seed=1)
    for layer in teacher.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    distances = {}
    for share in (0.0, 1.0):
        student = decoder(seed=2, num_hidden_layers=1).train()
        module = module_of(student, config=replace(ON_POLICY, share=share), signals=OnlineTeacher(teacher))
        optimizer, draw = torch.optim.Adam(student.parameters(), lr=1e-2), np.random.default_rng(5)
        for step in range(20):
            rows = LanguageBlocks(list(draw.integers(3, NARROW, (16, 10)))).collate(range(16), 0)
            optimizer.zero_grad()
            module.compute_terms(module.on_policy.build_batch(student, step, rows))["kl"].backward()
            optimizer.step()
        distances[share] = distance_on_own_texts(student.eval(), teacher)
    assert distances[1.0] < 0.8 * distances[0.0]


BAD = {"share": 1.5, "new_tokens": 0, "prompt_tokens": 0, "temperature": -1.0, "top_p": 0.0}


@pytest.mark.parametrize("name", BAD)
def test_a_meaningless_setting_is_rejected(name):
    with pytest.raises(InputError, match=f"on_policy.{name}: expected .* found {BAD[name]}"):
        OnPolicyConfig(**{name: BAD[name]})


def test_settings_that_rule_out_on_policy_training_are_rejected(tmp_path):
    write_cache(
        tmp_path,
        Identity("t", "w", (TopK(VOCABULARY_SIZE, k=4),)),
        build_samples(BLOCKS, 0),
        OnlineTeacher(decoder(seed=1)),
    )
    for signals, found in ((None, "none"), (CacheReader(tmp_path), "a cache")):
        with pytest.raises(InputError, match=f"expected a teacher that is queried in the step .* found {found}"):
            module_of(decoder(), signals=signals)
    for loss, found in ((LossConfig(kl=0, ce=1), "no kl"), (LossConfig(divergence="decoupled_kl"), "decoupled_kl")):
        with pytest.raises(InputError, match=f"expected the term kl .* found {found}"):
            module_of(decoder(), loss=loss)
    with pytest.raises(InputError, match="expected a causal language model, found BertForMaskedLM"):
        module_of(build_model("bert", "ForMaskedLM"))
    with pytest.raises(InputError, match="at most 9 together, .* found 10"):
        module_of(decoder("GPT2", n_positions=9))
    with pytest.raises(InputError, match="pipeline stages"):
        module_of(decoder(), stages=object())


def test_a_student_generates_within_its_teachers_vocabulary_and_positions():
    student, teacher = decoder(vocab_size=VOCABULARY_SIZE + 400), decoder("GPT2", seed=1, n_positions=12)
    module = module_of(student, signals=OnlineTeacher(teacher), config=replace(ON_POLICY, new_tokens=9))
    generated = module.on_policy.build_batch(student, 0, batch_of())
    assert int(generated["input_ids"].max()) < VOCABULARY_SIZE
    assert generated["input_ids"].shape[1] <= 12
    assert generated["positions"].sum(1).min() >= 1
    with pytest.raises(
        InputError, match="at most 12 together, the maximum sequence length of student and teacher, found 16"
    ):
        module_of(student, signals=OnlineTeacher(teacher), config=replace(ON_POLICY, new_tokens=13))
