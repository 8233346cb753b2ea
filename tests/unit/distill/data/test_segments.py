"""Tests that segments have the entries of their positions, and shares that make their means one over the batch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distill.data.batches.batches import EvalBatches, TrainBatches
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.loss_mask import loss_counts, loss_mask
from distill.data.batches.packing import PackedRows
from distill.data.batches.segments import cut_segment
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.rows.chat import TargetBlocks
from distill.losses.logits import IGNORED

LENGTHS = (11, 6, 3, 11, 2)
IDS = [np.arange(10 * row + 3, 10 * row + 3 + length) for row, length in enumerate(LENGTHS)]
BLOCKS = LanguageBlocks(IDS)
TARGETS = TargetBlocks(IDS, [np.arange(len(row)) >= 8 for row in IDS])  # none in the first half of any row


def cut_all(batch: dict[str, Any], segments: int) -> list[dict[str, Any]]:
    return [cut_segment(batch, number, segments) for number in range(segments)]


def join(parts: list[dict[str, Any]], name: str) -> Tensor:
    return torch.cat([part[name] for part in parts], 1)


@pytest.mark.parametrize("segments", [2, 3, 4, 13])
def test_segments_are_the_positions_of_the_padded_rows_in_order(segments):
    batch = BLOCKS.collate(range(5), pad_id=0)
    parts, size = cut_all(batch, segments), -(-11 // segments)
    fills = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    for name, fill in fills.items():
        assert all(part[name].shape == (5, size) for part in parts)
        joined = join(parts, name)
        assert torch.equal(joined[:, :11], batch[name])
        assert (joined[:, 11:] == fill).all()
    assert all(torch.equal(part["row_mask"], join(parts, "attention_mask")) for part in parts)
    expected = torch.arange(segments * size) * parts[0]["row_mask"]
    assert torch.equal(join(parts, "position_ids"), expected)


def test_one_segment_is_the_batch_itself():
    batch = BLOCKS.collate([0, 1], pad_id=0)
    assert cut_segment(batch, 0, 1) is batch


@pytest.mark.parametrize("rows", [BLOCKS, TARGETS], ids=["every-position", "targets"])
@pytest.mark.parametrize("segments", [2, 4])
def test_means_of_segments_times_their_shares_average_to_the_mean_of_the_batch(rows, segments):
    batch = rows.collate(range(5), pad_id=0) | {"shares": {"rows": 0.5, "labels": 2.0, "tokens": 1.5}}
    values = torch.rand(5, 11, dtype=torch.float64)
    whole = values[loss_mask(batch)].mean() * 0.5
    total = torch.zeros((), dtype=torch.float64)
    padded = torch.nn.functional.pad(values, (0, -11 % segments))
    for number, part in enumerate(cut_all(batch, segments)):
        segment_values = padded.chunk(segments, 1)[number][loss_mask(part)]
        assert part["shares"]["rows"] == 0 if not len(segment_values) else part["shares"]["rows"] > 0
        total += (segment_values.mean() if len(segment_values) else 0) * part["shares"]["rows"] / segments
    torch.testing.assert_close(total, whole)
    counts = [loss_counts(part) for part in cut_all(batch, segments)]
    assert {name: sum(each[name] for each in counts) for name in counts[0]} == loss_counts(batch)


@pytest.mark.parametrize("rows", [BLOCKS, TARGETS], ids=["every-position", "targets"])
def test_a_segment_has_the_signals_of_its_positions(rows):
    batch = rows.collate(range(5), pad_id=0)
    numbers = torch.full((5, 11), -1.0)
    numbers[loss_mask(batch)] = torch.arange(float(loss_mask(batch).sum()))
    hidden = torch.rand(5, 11, 2)
    batch["signals"] = {
        "ids": torch.arange(float(loss_mask(batch).sum()))[:, None].expand(-1, 3),
        "hidden": {4: hidden},
        "relations": [(hidden, 2 * hidden)],
        "temperature": 2.0,
        "scale": torch.tensor(3.0),
    }
    parts = cut_all(batch, 2)
    padded = torch.nn.functional.pad(numbers, (0, 1), value=-1.0)
    for number, part in enumerate(parts):
        assert part["signals"]["ids"][:, 0].tolist() == padded.chunk(2, 1)[number][loss_mask(part)].tolist()
        assert part["signals"]["temperature"] == 2.0
        assert part["signals"]["scale"] == 3.0
    joined = torch.cat([part["signals"]["hidden"][4] for part in parts], 1)
    assert torch.equal(joined[:, :11], hidden)
    assert torch.equal(torch.cat([part["signals"]["relations"][0][1] for part in parts], 1), 2 * joined)


def test_packed_rows_keep_their_positions_and_have_the_documents_of_whole_rows():
    batch = PackedRows(BLOCKS, [np.array([1, 2]), np.array([4, 0])]).collate([0, 1], 0)
    parts = cut_all(batch, 2)
    assert torch.equal(join(parts, "position_ids")[:, :13], batch["position_ids"])
    assert torch.equal(parts[1]["row_documents"], join(parts, "documents"))


def test_entries_that_are_not_of_positions_stay_whole():
    part = cut_segment(BLOCKS.collate([0, 1], 0) | {"row_weights": torch.tensor([1.0, 2.0])}, 1, 2)
    assert part["row_weights"].tolist() == [1.0, 2.0]


def test_batches_are_looked_up_whole_and_cut_afterwards():
    queried: list[int] = []

    def look_up(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        queried.append(batch["input_ids"].shape[1])
        return {"logits": batch["input_ids"][loss_mask(batch)][:, None].float()}

    whole = list(TrainBatches(BLOCKS, 2, 0, seed=1, signals=look_up))
    lengths = queried.copy()
    for number in range(2):
        parts = list(TrainBatches(BLOCKS, 2, 0, seed=1, signals=look_up, segment=(number, 2)))
        for part in parts:
            assert part["signals"]["logits"][:, 0].tolist() == part["input_ids"][loss_mask(part)].tolist()
    assert queried == 3 * lengths
    assert sum(len(batch["labels"]) for batch in whole) == len(BLOCKS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_batches_have_every_label_once(ranks):
    labels = []
    for rank in range(ranks):
        for number in range(2):
            for batch in EvalBatches(BLOCKS, 2, 0, rank=rank, ranks=ranks, segment=(number, 2)):
                labels += batch["labels"][batch["labels"] != IGNORED].tolist()
    assert sorted(labels) == sorted(np.concatenate([row[1:] for row in IDS]).tolist())


def test_a_data_module_without_a_trainer_has_whole_rows():
    data = RowsDataModule(BLOCKS, BLOCKS, batch_size=5)
    assert data.find_segment() == (0, 1)
    assert "row_mask" not in next(iter(data.train_dataloader()))
