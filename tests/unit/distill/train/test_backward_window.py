"""Tests of truncated backpropagation: chunks of a document have the gradients of a pass with keys cut by hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from benchmarks.memory.activations import measure_peak
from distill.data.batches.chunks import cut_chunks
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.token_blocks import LanguageBlocks
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.models.context import Context, check_context
from distill.tasks.language import TokenScorer
from distill.teacher.online import OnlineTeacher
from distill.train.activation_checkpointing import checkpoint_layers
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.backward_window import yield_windows
from distill.train.steps.micro_batches import MicroBatches
from pipelines.runs.strategies.by_layout import SingleProcessStrategy
from unit.distill.train.test_module import quiet_trainer

VOCABULARY_SIZE, LENGTH, WINDOW = 60, 22, 5
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 16, "num_hidden_layers": 3, "head_dim": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 4}),
    "mistral-wide": ("MistralForCausalLM", {"sliding_window": 8}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 4}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 6}),
}
PLAIN = LossConfig(kl=0, ce=1)
SIGNALS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "logits": lambda p: {"logits": p.log()},
    "sampled": lambda p: {"ids": p.topk(7).indices[:, 2:5], "weights": torch.full((len(p), 3), 1 / 3).to(p)},
    "topk": lambda p: {
        "ids": p.topk(4).indices, "log_probs": p.topk(4).values.log(), "tail": 1 - p.topk(4).values.sum(-1)
    },
}  # fmt: skip


def build(family: str, attention: str = "sdpa", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Returns a decoder without dropout, in float64 unless its attention is eager, whose softmax is in float32."""
    name, more = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    rates = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "dropout": 0.0}
    model = kind(kind.config_class(**(SIZES | rates | more | {"attn_implementation": attention} | changes)))
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.3)
    return (model.double() if attention == "sdpa" else model).train()


def draw_batch(lengths: tuple[int, ...] = (LENGTH, 13, 4), side: str = "right", **more: Any) -> dict[str, Any]:
    """Returns rows with labels; a label is the token after its own position, and the last token has none."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY_SIZE, (len(lengths), max(lengths)), generator=draw)
    order = torch.arange(max(lengths)) if side == "right" else torch.arange(max(lengths)).flip(0)
    mask = (order < torch.tensor(lengths)[:, None]).long()
    ids = ids * mask
    labels = torch.where((mask * mask.roll(-1, 1)).bool(), ids.roll(-1, 1), -100)
    labels[:, -1] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **more}


def build_module(model: PreTrainedModel, window: int, loss: LossConfig = PLAIN, **settings: Any) -> DistillationModule:
    module = DistillationModule(
        model, loss=loss, train=TrainConfig(backward_window=window, dropout=0), **settings
    )  # fmt: skip
    model.train()
    return module


def build_reference(model: PreTrainedModel, loss: LossConfig = PLAIN) -> DistillationModule:
    """Returns a module that trains whole rows, on all logits."""
    module = build_module(model, 0, loss)
    module.fused_term.name = ""
    return module


def train_step(
    module: DistillationModule, batch: dict[str, Any], parts: int = 1
) -> tuple[Tensor, dict[str, Tensor], int]:
    """Returns the loss, the gradients and the number of backward passes of a step."""
    module.zero_grad(set_to_none=True)
    module.micro_batches.parts, passes = parts, []

    def backward(loss: Tensor) -> None:
        passes.append(loss)
        loss.backward()

    total, terms = module.micro_batches.run(
        batch, module.compute_loss, backward, module.parameters(), pytest.fail, module.divide_batch
    )
    weights = {name: getattr(module.loss, name) for name in terms}
    torch.testing.assert_close(sum(weights[name] * value for name, value in terms.items()), total, check_dtype=False)
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return total, gradients, len(passes)


def check_equal(found: tuple[Tensor, dict[str, Tensor], int], expected: tuple[Tensor, dict[str, Tensor], int]) -> None:
    # Losses are in float32.
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6, check_dtype=False)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(value.abs().max()) for value in expected[1].values())
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6 * largest)


@contextmanager
def cut_attention(model: PreTrainedModel, window: int, padding: Tensor) -> Iterator[None]:
    """Makes the attention of a whole pass drop the gradients to keys and values of earlier chunks.

    Scores are computed for each chunk of queries in turn, from keys of which the earlier ones are detached.
    """

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **settings: Any
    ) -> tuple[Tensor, None]:
        groups, length = query.shape[1] // key.shape[1], query.shape[2]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        at, outputs = torch.arange(length), []
        allowed = (at[:, None] >= at) & padding.bool()[:, None, None, :]
        if settings.get("sliding_window"):
            allowed = allowed & (at[:, None] - at < settings["sliding_window"])
        for start in range(0, length, window):
            chunk, earlier = slice(start, start + window), slice(0, start)
            keys, values = (torch.cat([each[:, :, earlier].detach(), each[:, :, chunk]], 2) for each in (key, value))
            scores = query[:, :, chunk] @ keys.transpose(2, 3) * scaling
            if settings.get("softcap"):
                scores = torch.tanh(scores / settings["softcap"]) * settings["softcap"]
            scores = scores.masked_fill(~allowed[:, :, chunk, : start + window], torch.finfo(scores.dtype).min)
            outputs.append(scores.softmax(-1) @ values)
        return torch.cat(outputs, 2).transpose(1, 2), None

    AttentionInterface.register("cut", attend)
    AttentionMaskInterface.register("cut", lambda *args, **settings: None)
    before = model.config._attn_implementation
    model.config._attn_implementation = "cut"
    try:
        yield
    finally:
        model.config._attn_implementation = before


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral", "mistral-wide", "gemma2", "gemma3"])
def test_gradients_equal_those_of_a_whole_pass_with_the_keys_of_earlier_chunks_cut(family, side):
    model, batch = build(family, "eager" if family == "gemma2" else "sdpa"), draw_batch(side=side)
    with cut_attention(model, WINDOW, batch["attention_mask"]):
        expected = train_step(build_reference(model), batch)
    found = train_step(build_module(model, WINDOW), batch)
    check_equal(found, expected)
    assert found[2] == -(-LENGTH // WINDOW)
    plain = train_step(build_module(model, 0), batch)
    torch.testing.assert_close(found[0], plain[0], rtol=1e-6, atol=1e-6)
    assert not all(torch.allclose(found[1][name], value, rtol=1e-2) for name, value in plain[1].items())


@pytest.mark.parametrize("window", [LENGTH, 100])
def test_a_window_that_covers_the_documents_is_the_plain_step(window):
    model, batch = build("llama").float(), draw_batch()
    expected, found = (train_step(build_module(model, each), batch) for each in (0, window))
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_chunks_are_those_of_the_whole(family, attention, side):
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("gemma2 has no sdpa")
    model, batch = build(family, attention), draw_batch(side=side)
    check_context(model)
    with torch.no_grad():
        whole = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        context, parts = Context(LENGTH), []
        for start in range(0, LENGTH, WINDOW):
            inputs = {name: batch[name][:, start : start + WINDOW] for name in ("input_ids", "attention_mask")}
            parts.append(model(**context.add_inputs(model, inputs)).logits)
            context.advance(inputs["attention_mask"])
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(parts, 1)[mask], whole[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", SIGNALS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_signals_of_the_batch_are_those_of_the_chunks_positions(kind, parts, mode):
    model, loss = build("llama"), LossConfig(kl=1, ce=0.5, temperature=1.0)
    batch = draw_batch()
    batch["positions"] = batch["attention_mask"].bool() & (torch.arange(LENGTH) > 2)  # labels before it count as well
    batch["labels"] = torch.where(batch["positions"], batch["labels"], -100)
    count = int(batch["positions"].sum())
    batch["signals"] = SIGNALS[kind](torch.rand(count, VOCABULARY_SIZE).double().add(0.1).pow(3).softmax(-1))
    batch["signals"] |= {"temperature": torch.tensor(1.0)}
    with cut_attention(model, WINDOW, batch["attention_mask"]):
        expected = train_step(build_reference(model, loss), batch)
    module = build_module(model, WINDOW, loss)
    with checkpoint_layers(model, mode):
        check_equal(train_step(module, batch, parts), expected)


@pytest.mark.parametrize("loss", [PLAIN, LossConfig(kl=1, temperature=1.0)], ids=["labels", "signals"])
def test_a_blocked_loss_has_the_gradients_of_all_logits(loss):
    model, batch = build("llama"), draw_batch()
    draws = torch.rand(int(batch["attention_mask"].sum()), VOCABULARY_SIZE).double().softmax(-1)
    batch["signals"] = SIGNALS["topk"](draws)
    module = build_module(model, WINDOW, loss)
    result = train_step(module, batch)
    assert module.fused_term.has_plain_head
    module.fused_term.name = ""
    check_equal(result, train_step(module, batch))


def test_a_teacher_in_memory_reads_each_chunk_with_keys_of_its_own():
    model, teacher, batch = build("llama"), build("qwen3", seed=1), draw_batch()
    loss = LossConfig(kl=1, ce=0.5, temperature=2.0)
    calls: list[int] = []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    module = build_module(model, WINDOW, loss, signals=OnlineTeacher(teacher))
    result = train_step(module, batch)
    assert len(calls) == result[2] == 5
    whole = OnlineTeacher(teacher)(batch)
    check_equal(result, train_step(build_module(model, WINDOW, loss), batch | {"signals": whole}))


def test_signals_that_are_looked_up_are_read_once_for_whole_rows():
    model, batch, shapes = build("llama"), draw_batch(), []
    signals = SIGNALS["topk"](torch.rand(int(batch["attention_mask"].sum()), VOCABULARY_SIZE).double().softmax(-1))
    loss = LossConfig(kl=1, temperature=1.0)

    def look_up(part: dict[str, Tensor]) -> dict[str, Tensor]:
        shapes.append(part["input_ids"].shape)
        return signals

    result = train_step(build_module(model, WINDOW, loss, signals=look_up), batch)
    assert shapes == [batch["input_ids"].shape]
    check_equal(result, train_step(build_module(model, WINDOW, loss), batch | {"signals": signals}))


def test_finished_rows_and_padding_are_not_computed():
    model, batch, shapes = build("llama"), draw_batch((22, 13, 4, 0)), []
    for name in ("input_ids", "attention_mask", "labels"):  # padded as in a larger batch
        batch[name] = torch.cat([batch[name], torch.full((4, 30), -100 if name == "labels" else 0)], 1)
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, output: shapes.append(tuple(inputs[0].shape)))
    module = build_module(model, WINDOW)
    module.fused_term.name = ""
    train_step(module, batch)
    assert shapes == [(3, 5), (2, 5), (2, 5), (1, 5), (1, 2)]


def test_chunks_without_a_loss_have_no_backward_pass_and_are_read_by_later_ones():
    model, batch = build("llama"), draw_batch((22, 22))
    batch["positions"] = (torch.arange(22) >= 11).expand(2, 22)  # a prompt of two chunks and a token
    batch["labels"] = torch.where(batch["positions"], batch["labels"], -100)
    with cut_attention(model, WINDOW, batch["attention_mask"]):
        expected = train_step(build_reference(model), batch)
    found = train_step(build_module(model, WINDOW), batch)
    check_equal(found, expected)
    assert found[2] == 3


def test_shares_of_chunks_add_up_to_those_of_the_batch():
    shares = {"rows": 0.5, "labels": 2.0, "tokens": 1.0}
    chunks = list(cut_chunks(draw_batch() | {"shares": shares}, WINDOW))
    for name in ("rows", "labels", "tokens"):
        assert sum(chunk.batch["shares"][name] for chunk in chunks) == pytest.approx(shares[name])
    assert sum((chunk.batch["labels"] != -100).sum() for chunk in chunks) == (draw_batch()["labels"] != -100).sum()


def test_packed_rows_and_rows_with_one_label_are_rejected():
    batch = draw_batch()
    with pytest.raises(InputError, match="train.backward_window: expected one document a row, found packed rows"):
        next(cut_chunks(batch | {"documents": batch["attention_mask"]}, WINDOW))
    with pytest.raises(InputError, match="train.backward_window: expected a label for each token, found"):
        next(cut_chunks(batch | {"labels": torch.zeros(3, dtype=torch.long)}, WINDOW))


def test_models_with_another_kind_of_memory_are_rejected():
    config = transformers.MambaConfig(vocab_size=60, hidden_size=16, state_size=4, num_hidden_layers=2)
    with pytest.raises(InputError, match="train.backward_window: MambaForCausalLM: expected a decoder"):
        check_context(transformers.MambaForCausalLM(config))
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=60, hidden_size=16, num_attention_heads=2))
    with pytest.raises(InputError, match="train.backward_window: BertForMaskedLM: expected a decoder"):
        check_context(bert)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=60, hidden_size=16, n_head=2, n_layer=1))
    check_context(bloom)  # positions follow from the mask


def test_a_teacher_with_another_kind_of_memory_is_rejected_before_the_first_step():
    config = transformers.MambaConfig(vocab_size=60, hidden_size=16, state_size=4, num_hidden_layers=2)
    teacher = OnlineTeacher(transformers.MambaForCausalLM(config))
    with pytest.raises(InputError, match="train.backward_window: MambaForCausalLM: expected a decoder"):
        build_module(build("llama"), WINDOW, LossConfig(kl=1, ce=1), signals=teacher).on_fit_start()
    build_module(build("llama"), WINDOW, signals=teacher).on_fit_start()  # labels alone: it isn't read


def test_a_pass_that_is_computed_again_reads_the_same_keys():
    model, batch = build("mistral"), draw_batch()
    expected = train_step(build_module(model, WINDOW), batch)
    for mode in ("full", "selective", "every=2"):
        with checkpoint_layers(model, mode):
            check_equal(train_step(build_module(model, WINDOW), batch), expected)


def test_offloaded_activations_have_the_same_gradients(tmp_path, monkeypatch):
    from distill.train.offload import ActivationOffload

    monkeypatch.setitem(ActivationOffload.__init__.__kwdefaults__, "smallest", 1)
    model, batch = build("llama"), draw_batch()
    expected = train_step(build_module(model, WINDOW), batch)
    module = build_module(model, WINDOW)
    module.train_config, module.scratch = replace(module.train_config, offload="activations"), tmp_path
    found = train_step(module, batch)
    assert module.offload is not None
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


def test_memory_follows_the_window():
    sizes = {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 1, "intermediate_size": 192}
    model, batch = build("llama", max_position_embeddings=1024, **sizes).float(), draw_batch((1024,))
    peaks = {}
    for window in (0, 256, 64):
        module = build_module(model, window)
        train_step(module, batch)
        peaks[window] = measure_peak(lambda module=module: train_step(module, batch))
    assert peaks[256] < 0.6 * peaks[0]
    assert peaks[64] < 0.3 * peaks[0]


def test_a_batch_that_does_not_fit_is_divided_into_rows_and_chunks():
    model, batch = build("llama"), draw_batch()
    module = build_module(model, WINDOW)
    expected = train_step(module, batch)
    module.zero_grad(set_to_none=True)
    micro, reported = MicroBatches(), []

    def compute(part: dict[str, Any]) -> Any:
        if len(part["labels"]) > 2:
            raise MemoryError
        return module.compute_loss(part)

    total, _ = micro.run(
        batch, compute, lambda loss: loss.backward(), module.parameters(), reported.append, module.divide_batch
    )
    assert reported == [2]
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    check_equal((total, gradients, 0), expected)


def test_a_batch_that_fits_is_yielded_itself():
    batch = draw_batch()
    assert next(yield_windows(batch, LENGTH, pytest.fail)) is batch


def fit(window: int, trainer: dict[str, Any]) -> tuple[DistillationModule, dict[str, Any]]:
    """Returns a module and the validation's values after a step on labels."""
    rng = np.random.default_rng(0)
    blocks = [LanguageBlocks([rng.integers(3, VOCABULARY_SIZE, length) for length in (22, 13, 4)]) for _ in range(2)]
    data = RowsDataModule(*blocks, pad_id=0, batch_size=3, batch_tokens=0, seed=0)
    train = TrainConfig(backward_window=window, optimizer="sgd", learning_rate=0.1, max_grad_norm=0, dropout=0)
    module = DistillationModule(build("llama"), loss=PLAIN, train=train, metric=TokenScorer(0))
    run = quiet_trainer(max_steps=1, **trainer)
    run.fit(module, datamodule=data)
    return module, dict(run.callback_metrics)


def test_a_trainer_takes_one_step_for_all_chunks_and_validates_in_chunks():
    plain, whole, chunked = (
        fit(window, {"strategy": SingleProcessStrategy(device=torch.device("cpu"))}) for window in (0, 64, WINDOW)
    )
    for name, value in plain[0].state_dict().items():
        assert torch.equal(whole[0].state_dict()[name], value)
    assert any(not torch.equal(chunked[0].state_dict()[name], value) for name, value in plain[0].state_dict().items())
    model, weights = build("llama"), chunked[0].student.state_dict()
    model.load_state_dict(weights)
    check = DistillationModule(model, loss=PLAIN, train=TrainConfig(), metric=TokenScorer(0))
    rng = np.random.default_rng(0)
    rows = [[rng.integers(3, VOCABULARY_SIZE, length) for length in (22, 13, 4)] for _ in range(2)][1]
    batch = LanguageBlocks(rows).collate(range(3), 0)
    with torch.no_grad():
        logits = check(batch).logits
    labels = batch["labels"][batch["attention_mask"].bool()]
    loss = torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(chunked[1]["val/loss"].double(), loss, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_a_trainer_that_runs_backward_passes_itself_is_rejected():
    with pytest.raises(
        InputError, match="train.backward_window: expected .* one process .* found the strategy SingleDev"
    ):
        fit(WINDOW, {})
    fit(0, {})
