"""Tests of DistillationModule under a plain Lightning Trainer: what it trains, leaves unchanged and logs."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distill.cache import CacheReader, Dense, Identity, Samples, sample_keys, write_cache
from distill.data.batches.data_module import TextDataModule
from distill.data.batches.encode import encode_samples
from distill.data.splits.examples import Examples, Splits
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.losses.logits import IGNORED, forward_kl
from distill.student.build import build_student
from distill.tasks.text_classification import TextClassification
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from support.tiny_models import LABELS, build_model, make_rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")  # its hints on workers and loggers

TRAIN = TrainConfig(epochs=1, learning_rate=1e-3, warmup=0, batch_size=8, dropout=0)
CE, KL = LossConfig(kl=0, ce=1), LossConfig(kl=1)
ALL = LossConfig(kl=1, ce=0.5, hidden=0.1)
BERT_SIZES = (4, 32)  # layers and width of the tiny teacher


def examples(count: int, seed: int) -> Examples:
    rows = make_rows(count, seed)
    return Examples([text for text, _ in rows], None, [LABELS.index(label) for _, label in rows])


@pytest.fixture
def data(tokenizer) -> TextDataModule:
    splits = Splits(LABELS, examples(40, 1), examples(10, 2), examples(10, 3), Examples([], None), {})
    return TextDataModule(splits, tokenizer, batch_size=8, max_length=32)


@pytest.fixture
def batch(tokenizer) -> dict[str, Tensor]:
    """Returns 8 labelled texts of different lengths, padded."""
    return encode_samples(tokenizer, examples(8, 4), 32).collate(range(8), pad_id=0)


def distilled(loss: LossConfig, train: TrainConfig = TRAIN, spec: str = "layers=2,hidden=16") -> DistillationModule:
    """Returns the module of a narrow student of the tiny BERT, with that BERT as its teacher in memory."""
    teacher = build_model("bert")
    student = build_student(teacher, spec)
    signals = OnlineTeacher(teacher, loss.teacher_outputs)
    return DistillationModule(student, loss=loss, train=train, signals=signals, teacher_sizes=BERT_SIZES)


def quiet_trainer(**settings: Any) -> lightning.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(**({"accelerator": "cpu", "max_epochs": 1, "logger": False} | quiet | settings))


def copy_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def gradients(module: DistillationModule, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a batch and the gradient of every parameter."""
    module.zero_grad(set_to_none=True)
    loss = module.training_step(batch, 0)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


class Watch(Callback):
    """Callback that collects the results of `look(module)` before every optimizer step."""

    def __init__(self, look: Callable[[DistillationModule], Any]):
        self.look, self.seen = look, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.seen.append(self.look(pl_module))


# --- what is saved with the student


def test_projections_are_trained_but_not_saved_with_the_student(data, tmp_path):
    module = distilled(ALL)
    assert len(module.layer_terms.projections) == 3  # embeddings and two layers
    before = copy_state(module.layer_terms.projections)
    quiet_trainer().fit(module, datamodule=data)
    for name, value in module.layer_terms.projections.state_dict().items():
        assert not torch.equal(value, before[name]), f"projection {name} stayed as it was"
    module.student.save_pretrained(tmp_path)
    stock = type(module.student)(module.student.config)
    assert module.student.state_dict().keys() == stock.state_dict().keys()
    loaded, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    assert all(torch.equal(value, module.student.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_a_student_as_wide_as_its_teacher_has_no_projections():
    assert not list(distilled(ALL, spec="layers=2").layer_terms.projections.parameters())


def test_an_online_teacher_is_neither_trained_nor_saved_with_the_module(data, tmp_path):
    module = distilled(ALL)
    teacher = module.signals.model
    before = copy_state(teacher)
    teacher_ids = {id(p) for p in teacher.parameters()}
    trainer = quiet_trainer()

    def look(distiller: DistillationModule) -> tuple[bool, bool, bool]:
        quiet = all(not m.training for m in teacher.modules())
        return distiller.student.training, quiet, all(p.grad is None for p in teacher.parameters())

    watch = Watch(look)
    trainer.callbacks.append(watch)
    trainer.fit(module, datamodule=data)
    assert watch.seen == [(True, True, True)] * 5
    assert not teacher_ids & {id(p) for p in module.parameters()}
    assert not teacher_ids & {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert all(name.startswith(("student.", "layer_terms.")) for name in module.state_dict())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == module.state_dict().keys()
    numbers = sum(value.numel() for value in tensors(saved))
    trained = sum(p.numel() for p in module.parameters())
    assert numbers <= 3 * trained + 100  # weights and Adam's two averages; the teacher would add as many again
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def tensors(saved: Any) -> list[Tensor]:
    if isinstance(saved, Tensor):
        return [saved]
    parts = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


# --- signals and labels


def test_cached_and_online_signals_give_the_same_loss_and_gradients(batch, tmp_path):
    online = distilled(replace(KL, ce=0.5))
    teacher_logits = online.signals(batch)["logits"]
    identity = Identity("teacher", "tokenizer", (Dense(width=len(LABELS)),))
    lengths = batch["attention_mask"].sum(1).numpy()
    samples = Samples(sample_keys(batch), lengths, lambda rows: {k: v[list(rows)] for k, v in batch.items()})
    row_of = {key: i for i, key in enumerate(sample_keys(batch))}
    write_cache(
        tmp_path / "cache",
        identity,
        samples,
        lambda part: {"logits": teacher_logits[[row_of[key] for key in sample_keys(part)]]},
    )
    reader = CacheReader(tmp_path / "cache", identity)
    assert len(reader) == len(set(sample_keys(batch))) == 8
    cached = DistillationModule(online.student, loss=online.loss, train=TRAIN, signals=reader)
    loss, found = gradients(cached, batch)
    expected_loss, expected = gradients(online, batch)
    assert loss == expected_loss
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    # In another order and with more padding the teacher's logits change by rounding, the cached ones not at all.
    rows = torch.tensor([5, 0, 7, 2])
    other = {name: F.pad(value[rows], (0, 3)) if value.dim() == 2 else value[rows] for name, value in batch.items()}
    assert torch.equal(reader(other)["logits"], teacher_logits[rows])
    torch.testing.assert_close(gradients(cached, other), gradients(online, other), rtol=1e-4, atol=1e-5)


def test_unlabelled_rows_count_for_the_teachers_term_but_not_for_the_label_term(batch):
    module = distilled(replace(KL, ce=1))
    whole = module.compute_terms(batch)
    labelled = torch.tensor([0, 3, 4])
    partly = batch | {"labels": torch.full((8,), IGNORED)}
    partly["labels"][labelled] = batch["labels"][labelled]
    terms, logits = module.compute_terms(partly), module(batch).logits
    assert terms["kl"] == whole["kl"] == forward_kl(logits, module.signals(batch)["logits"], temperature=2.0)
    torch.testing.assert_close(terms["ce"], F.cross_entropy(logits[labelled], batch["labels"][labelled]))
    assert abs(terms["ce"] - whole["ce"]) > 1e-3
    none = module.compute_terms(batch | {"labels": torch.full((8,), IGNORED)})
    assert none["ce"] == 0
    none["ce"].backward()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("loss", [KL, LossConfig(kl=0, ce=1, hidden=1)])
def test_a_teacher_term_without_teacher_signals_is_rejected(loss, batch):
    module = DistillationModule(build_model("bert"), loss=loss, train=TRAIN, teacher_sizes=BERT_SIZES)
    with pytest.raises(InputError, match="expected signals for the terms that read the teacher, found none"):
        module.compute_terms(batch)


def test_hidden_states_that_cannot_be_paired_are_rejected():
    signals = OnlineTeacher(build_model("bert"), ("hidden",))
    with pytest.raises(InputError, match=r"expected the sizes of the teacher, found none"):
        DistillationModule(build_model("bert"), loss=ALL, train=TRAIN, signals=signals)
    wrong = replace(ALL, layer_map="0:0,2:9")
    with pytest.raises(InputError, match="found 2:9"):
        DistillationModule(build_model("bert"), loss=wrong, train=TRAIN, signals=signals, teacher_sizes=BERT_SIZES)


# --- what training changes


def test_frozen_word_embeddings_stay_fixed_while_all_other_weights_train(data):
    module = distilled(KL, replace(TRAIN, freeze_embeddings=True))
    before = copy_state(module.student)
    quiet_trainer().fit(module, datamodule=data)
    word = "bert.embeddings.word_embeddings.weight"
    still = {name for name, value in module.student.state_dict().items() if torch.equal(value, before[name])}
    assert still == {word}


def test_the_configured_dropout_applies_in_training_and_is_not_saved_with_the_student(data, tmp_path):
    module = distilled(KL, replace(TRAIN, dropout=0.25))
    rates = Watch(
        lambda distiller: {m.p for m in distiller.student.modules() if isinstance(m, nn.Dropout) and m.training}
    )
    quiet_trainer(callbacks=[rates]).fit(module, datamodule=data)
    assert rates.seen == [{0.25}] * 5
    module.student.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.1
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert {m.p for m in reloaded.modules() if isinstance(m, nn.Dropout)} == {0.1}


@pytest.mark.parametrize(("rate", "same"), [(0.0, True), (None, False), (0.3, False)])
def test_a_dropout_rate_takes_effect_when_training_starts(teacher, batch, rate, same):
    module = DistillationModule(teacher, loss=CE, train=replace(TRAIN, dropout=rate))
    if teacher.config.model_type == "distilbert":
        del batch["token_type_ids"]
    module.on_fit_start()
    with torch.no_grad():
        assert torch.equal(module(batch).logits, module(batch).logits) is same


def test_two_accumulated_batches_of_four_give_the_gradients_of_one_batch_of_eight(tokenizer):
    # Rows of one length, so that there is no padding and each batch has the same weight.
    texts = [" ".join(text.split()[:4]) for text, _ in make_rows(8, 4)]
    rows = encode_samples(tokenizer, Examples(texts, None, [i % 5 for i in range(8)]), 32)
    assert len(set(rows.lengths)) == 1
    step_gradients = []
    for batches, accumulate in (([range(8)], 1), ([range(4), range(4, 8)], 2)):
        module = DistillationModule(build_model("bert"), loss=CE, train=TRAIN)
        watch = Watch(lambda m: {name: p.grad.clone() for name, p in m.named_parameters()})
        trainer = quiet_trainer(accumulate_grad_batches=accumulate, callbacks=[watch])
        trainer.fit(module, DataLoader([rows.collate(batch, 0) for batch in batches], batch_size=None))
        assert trainer.global_step == 1
        step_gradients += watch.seen
    whole, halves = step_gradients
    assert max(value.abs().max() for value in whole.values()) > 0.01
    torch.testing.assert_close(halves, whole, rtol=1e-5, atol=1e-6)


# --- logging and checks


def logged(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_logged_terms_add_up_to_the_loss_and_gradient_shares_to_1(data, tmp_path):
    module = distilled(ALL)
    logger = CSVLogger(tmp_path, name="", version="run")
    quiet_trainer(logger=logger, log_every_n_steps=2, max_epochs=2).fit(module, datamodule=data)
    rows = [row for row in logged(tmp_path / "run") if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 3, 5, 7, 9]
    for row in rows:
        shares = [row[f"train/{name}_gradient_share"] for name in ("kl", "ce", "hidden")]
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert min(shares) > 0
        assert [row[f"train/{name}_weight"] for name in ("kl", "ce", "hidden")] == pytest.approx([1, 0.5, 0.1])
        total = sum(row[f"train/{name}_weight"] * row[f"train/{name}"] for name in ("kl", "ce", "hidden"))
        assert row["train/loss"] == pytest.approx(total, rel=1e-5)
        assert 0 < row["lr"] <= TRAIN.learning_rate


def test_a_non_finite_loss_stops_training(data):
    module = distilled(KL)
    module.student.classifier.weight.data.fill_(float("nan"))
    with pytest.raises(InputError, match="expected a finite loss, found nan in step 0"):
        quiet_trainer(log_every_n_steps=1).fit(module, datamodule=data)


def test_a_training_that_ends_by_an_error_restores_attention_and_layers(data):
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    module = distilled(KL, replace(TRAIN, checkpointing="full"))
    module.student.classifier.weight.data.fill_(float("nan"))
    with pytest.raises(InputError, match="expected a finite loss"):
        quiet_trainer(log_every_n_steps=1).fit(module, datamodule=data)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attention
    assert not any("forward" in vars(each) for each in module.student.modules())


@pytest.mark.parametrize(
    ("loss", "parameter", "named"),
    [
        (KL, "classifier.bias", "logits"),
        (LossConfig(kl=0, ce=1, hidden=1), "bert.encoder.layer.3.output.dense.bias", "hidden states of layer 4"),
        (LossConfig(kl=0, relations=1, relation_heads=2), "bert.encoder.layer.3.attention.self.key.bias", "keys"),
    ],
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_teacher_with_non_finite_signals_stops_training_before_the_student_changes(
    loss, parameter, named, poison, data
):
    module = distilled(loss)
    module.signals.model.get_parameter(parameter).data[0] = poison
    before = copy_state(module)
    with pytest.raises(InputError, match=f"teacher: expected finite {named}.* found .* rows with NaN or infinity"):
        quiet_trainer(log_every_n_steps=50).fit(module, datamodule=data)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_non_finite_teacher_states_at_padding_do_not_affect_the_terms(batch):
    module = distilled(LossConfig(kl=1, hidden=1))
    teacher, padding = module.signals, batch["attention_mask"] == 0

    def poisoned(batch: dict[str, Tensor]) -> dict[str, Any]:
        signals = teacher(batch)
        return signals | {"hidden": [each.masked_fill(padding[..., None], torch.nan) for each in signals["hidden"]]}

    module.signals = poisoned
    assert all(value.isfinite() for value in module.compute_terms(batch).values())


# --- use in notebooks


def test_a_default_trainer_runs_and_resumes_from_its_checkpoint(data, tmp_path):
    module = distilled(ALL)
    lightning.Trainer(fast_dev_run=True, accelerator="cpu").fit(module, datamodule=data)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path)
    trainer.fit(module, datamodule=data)
    assert trainer.progress_bar_callback is not None
    assert trainer.global_step == 10
    (saved,) = tmp_path.rglob("*.ckpt")
    again = lightning.Trainer(max_epochs=3, accelerator="cpu", default_root_dir=tmp_path)
    again.fit(distilled(ALL), datamodule=data, ckpt_path=saved, weights_only=True)
    assert again.global_step == 15


def test_the_loss_falls_within_thirty_steps_and_the_score_is_that_of_the_final_weights(data):
    student, metric = build_model("bert"), TextClassification(LABELS).scorer()
    module = DistillationModule(student, loss=CE, train=replace(TRAIN, schedule="constant"), metric=metric)
    losses = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            losses.append(outputs["loss"].item())

    trainer = quiet_trainer(max_epochs=6, callbacks=[Keep()])
    trainer.fit(module, datamodule=data)
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    # The validation score is that of the trained weights.
    batch = data.validation.collate(range(10), data.pad_id)
    with torch.no_grad():
        right = (student.eval()(batch["input_ids"], batch["attention_mask"]).logits.argmax(-1) == batch["labels"]).sum()
    assert trainer.callback_metrics["val/score"] == pytest.approx(right.item() / 10)


def test_hidden_states_missing_from_the_signals_are_rejected(tiny_model, token_batch):
    teacher = tiny_model("bert")
    module = DistillationModule(
        tiny_model("bert"),
        loss=LossConfig(kl=0, hidden=1),
        train=TrainConfig(),
        signals=OnlineTeacher(teacher),
        teacher_sizes=(4, 32),
    )
    with pytest.raises(InputError, match="expected hidden states of layer .* found none"):
        module.compute_terms(token_batch | {"labels": torch.zeros(6, dtype=torch.long)})


def test_a_second_fit_with_the_same_data_starts_at_the_first_batch(tokenizer):
    data = TextDataModule(
        Splits(LABELS, *[Examples(["badi"] * 20, None, [0] * 20)] * 3, Examples([], None), {}), tokenizer
    )
    data.load_state_dict({"position": 1})
    assert data.train_dataloader().position == 1
    data.teardown("fit")
    assert data.train_dataloader().position == 0
