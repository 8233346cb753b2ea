"""Single texts on OpenVINO run at fixed lengths, and give what they give in a batch."""

import json
from pathlib import Path

import numpy as np
import pytest

from compress.export.common.source import Source
from compress.export.common.targets import find_target
from compress.export.openvino.ir import LENGTHS, OpenVinoModel, Padding, find_length
from compress.export.verify import run_singly, run_together
from compress.export.write import write_targets
from support.tiny_models import build_model

pytest.importorskip("openvino")


def draw_texts(lengths: list[int], names: list[str], pad_id: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns texts of these lengths as a padded batch, and its mask."""
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.where(mask == 1, np.random.default_rng(0).integers(5, 60, mask.shape), pad_id)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}
    return {name: inputs[name] for name in names}, mask


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("bert", "ForTokenClassification"),
        pytest.param("bert", "ForSequenceClassification", marks=pytest.mark.slow),
        pytest.param("roberta", "ForSequenceClassification", marks=pytest.mark.slow),
    ],
)
def test_a_single_text_gives_the_logits_of_its_row_in_a_batch(family, head, tokenizer, tmp_path):
    model = build_model(family, head)
    write_targets(Source(model, tokenizer), [find_target("openvino")], tmp_path)
    opened = OpenVinoModel(tmp_path / "openvino", threads=1)
    inputs, mask = draw_texts([3, 8, 9, 20, 30], opened.names, opened.padding.pad_id)
    together, singly = run_together(opened, inputs, mask), run_singly(opened, inputs, mask)
    assert together.shape == singly.shape
    assert np.abs(together - singly).max() < 1e-4
    assert set(opened.fixed) == {8, 16, 24, *({32} & {find_length(30, opened.padding.longest)})}
    assert set(opened.fixed) <= set(LENGTHS)


def test_a_text_as_long_as_the_positions_keeps_its_length(tmp_path):
    padding = read_padding(tmp_path, "roberta", 1, 50)
    assert padding == Padding(1, 48)
    assert [find_length(tokens, padding.longest) for tokens in (1, 41, 48, 49)] == [8, 48, 48, None]
    assert find_length(LENGTHS[-1] + 1, 4096) is None


@pytest.mark.parametrize(
    ("family", "pad_id", "longest"),
    [("bert", 0, 512), ("pruned_roberta", 1, 510), ("modernbert", 50283, 512), ("qwen2", 151643, 512)],
)
def test_only_families_that_count_positions_from_the_padding_id_have_fewer(family, pad_id, longest, tmp_path):
    assert read_padding(tmp_path, family, pad_id, 512) == Padding(pad_id, longest)


def read_padding(folder: Path, family: str, pad_id: int, positions: int) -> Padding:
    config = {"model_type": family, "pad_token_id": pad_id, "max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config))
    return Padding.read(folder)
