"""Tests that a batch in parts has the loss and gradients of the whole, also after memory has run out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from distill.data.batches.split import split_batch
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.student.build import build_student
from distill.tasks.logit_rows import SpanRows
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.micro_batches import MicroBatches, is_out_of_memory
from support.tiny_models import build_model, draw_weights
from unit.distill.train.test_fused_term import LOSS, build, cached, rows_of
from unit.distill.train.test_module import BERT_SIZES

TRAIN = TrainConfig(dropout=0)


@pytest.fixture
def batch(token_batch) -> dict[str, Tensor]:
    return token_batch | {"labels": torch.arange(len(token_batch["input_ids"])) % 3}


def leave_whole(part: dict) -> tuple[dict]:
    return (part,)


def run_parts(module: DistillationModule, batch: dict, parts: int) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad(set_to_none=True)
    total, terms = MicroBatches(parts).run(
        batch, module.compute_loss, lambda loss: loss.backward(), module.parameters(), pytest.fail, leave_whole
    )
    torch.testing.assert_close(sum(terms.values()), total)
    return total, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def check_parts(module: DistillationModule, batch: dict) -> None:
    loss, expected = run_parts(module, batch, 1)
    for parts in (2, 3, len(batch["attention_mask"])):
        found_loss, found = run_parts(module, batch, parts)
        torch.testing.assert_close(found_loss, loss, rtol=1e-5, atol=1e-6)
        assert found.keys() == expected.keys()
        largest = max(value.abs().max() for value in expected.values())
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5 * float(largest))


@pytest.mark.parametrize("kind", ["sampled", "topk"])
@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("in_batch", [False, True], ids=["read in the step", "in the batch"])
def test_parts_of_a_language_models_batch_have_its_gradients(family, kind, in_batch, tmp_path):
    rows = rows_of(family)
    signals = cached(kind, rows, build(family, 64), tmp_path / "c")
    module = DistillationModule(build(family), loss=LOSS, train=TRAIN, signals=signals)
    batch = rows.collate(range(len(rows)), 0)
    check_parts(module, batch | ({"signals": signals(batch)} if in_batch else {}))


@pytest.mark.parametrize(
    "loss", [LossConfig(kl=1, ce=1), LossConfig(kl=0, hidden=1, relations=1, relation_heads=4), LossConfig(kl=0, ce=1)]
)
@pytest.mark.parametrize("in_batch", [False, True], ids=["read in the step", "in the batch"])
def test_parts_of_a_classifiers_batch_have_its_gradients(loss, in_batch, batch):
    teacher = build_model("bert")
    signals = OnlineTeacher(teacher, loss.teacher_outputs)
    torch.manual_seed(0)
    module = DistillationModule(
        build_student(teacher, "layers=2"), loss=loss, train=TRAIN, signals=signals, teacher_sizes=BERT_SIZES
    )
    check_parts(module, batch | ({"signals": signals(batch)} if in_batch and loss.needs_teacher else {}))


@pytest.mark.parametrize("in_batch", [False, True], ids=["read in the step", "in the batch"])
def test_parts_of_a_batch_of_questions_have_its_gradients(in_batch, batch):
    """A row has one label, but cached logits for each position that an answer may have."""
    mask = batch["attention_mask"].bool()
    positions = mask & (torch.arange(mask.shape[1]) != 1)
    ends = (positions * torch.arange(mask.shape[1])).argmax(1)
    questions = batch | {"positions": positions, "labels": torch.zeros(len(mask), dtype=torch.long), "ends": ends}
    teacher, student = (
        build_model("bert", "ForQuestionAnswering", num_labels=2, num_hidden_layers=layers) for layers in (3, 2)
    )
    draw_weights(teacher)
    signals = OnlineTeacher(teacher)
    module = DistillationModule(
        student, loss=LossConfig(kl=1, ce=1), train=TRAIN, signals=signals, output_rows=SpanRows()
    )
    cached = {"logits": signals(questions)["logits"][positions]}
    check_parts(module, questions | ({"signals": cached} if in_batch else {}))


def test_signals_of_positions_and_of_rows_are_divided_in_the_same_batch(batch):
    rows, count = len(batch["attention_mask"]), int(batch["attention_mask"].sum())
    signals = {
        "logits": torch.randn(count, 2),
        "tail": torch.rand(count),
        "embedding": torch.randn(rows, 4),
        "hidden": {1: torch.randn(*batch["attention_mask"].shape, 4)},
    }
    parts = [part["signals"] for part in split_batch(batch | {"signals": signals}, 3)]
    assert [len(part["logits"]) for part in parts] == [
        int(each["attention_mask"].sum()) for each in split_batch(batch, 3)
    ]
    for name in ("logits", "tail", "embedding"):
        assert torch.equal(torch.cat([part[name] for part in parts]), signals[name])
    assert torch.equal(torch.cat([part["hidden"][1] for part in parts]), signals["hidden"][1])


def test_shares_of_a_batch_are_divided(batch):
    batch |= {"shares": {"rows": 0.5, "labels": 2.0, "tokens": 1.0}}
    parts = split_batch(batch, 2)
    for name, share in batch["shares"].items():
        assert sum(part["shares"][name] for part in parts) == pytest.approx(share)


def test_a_batch_in_one_part_is_the_batch_itself(batch):
    assert split_batch(batch, 1)[0] is batch


class Memory:
    """Fails the passes of more rows than fit, in the forward or the backward pass."""

    def __init__(self, module: DistillationModule, max_rows: int, stage: str):
        self.module, self.max_rows, self.stage, self.rows = module, max_rows, stage, 0

    def compute(self, batch: dict) -> Any:
        self.rows = len(batch["attention_mask"])
        if self.stage == "forward":
            self.check()
        return self.module.compute_loss(batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if self.stage == "backward":
            self.check()

    def check(self) -> None:
        if self.rows > self.max_rows:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_batch_that_does_not_fit_is_trained_in_parts_with_the_same_gradients(stage, batch):
    module = DistillationModule(build_model("bert"), loss=LossConfig(kl=0, ce=1), train=TRAIN)
    _, expected = run_parts(module, batch, 1)
    module.zero_grad(set_to_none=True)
    earlier = next(module.student.parameters())
    earlier.grad = torch.ones_like(earlier)  # of an earlier batch of the same step
    memory, micro, reported = Memory(module, 2, stage), MicroBatches(), []
    micro.run(batch, memory.compute, memory.backward, module.parameters(), reported.append, leave_whole)
    assert reported == [2, 4]
    for name, parameter in module.named_parameters():
        wanted = expected.get(name, torch.zeros_like(parameter)) + (1.0 if parameter is earlier else 0.0)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)
    memory.max_rows = 100
    micro.run(batch, memory.compute, memory.backward, module.parameters(), pytest.fail, leave_whole)


def test_a_single_row_that_does_not_fit_is_rejected(batch):
    module = DistillationModule(build_model("bert"), loss=LossConfig(kl=0, ce=1), train=TRAIN)
    memory = Memory(module, 0, "forward")
    with pytest.raises(InputError, match="train: expected memory for one row of .* tokens, found too little"):
        MicroBatches().run(batch, memory.compute, memory.backward, module.parameters(), [].append, leave_whole)


def test_other_errors_are_raised(batch):
    def fail(batch: dict) -> Any:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        MicroBatches().run(batch, fail, lambda loss: None, [], pytest.fail, leave_whole)


def test_errors_of_a_lack_of_memory_are_known():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
