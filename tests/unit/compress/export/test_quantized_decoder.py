"""Quantized decoders with a key-value cache compute the products that they were trained with, and generate."""

import numpy as np
import onnx
import pytest
import torch

from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget
from compress.export.onnx.generate import OnnxDecoder
from compress.export.write import check_layers, write_targets
from compress.quantize.calibration import calibrate
from compress.quantize.prepare import convert_quantized, find_lowest_precision, prepare_quantized
from compress.quantize.schemes import resolve_scheme
from support.tiny_families import build

WIDE = {"hidden_size": 64, "intermediate_size": 96}


def draw_batch() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(3).integers(5, 60, (3, 9))
    mask = (np.arange(9) < np.array([9, 4, 7])[:, None]).astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask}


CASES = [(scheme, tied) for scheme in ("int4-groups", "int4-weights", "int8-dynamic") for tied in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "tied"), CASES)
def test_a_decoder_in_few_bits_has_the_products_and_logits_of_its_model(scheme, tied, tokenizer, tmp_path):
    model = build("llama", tie_word_embeddings=tied, **WIDE)
    prepare_quantized(model, resolve_scheme(scheme))
    batch = draw_batch()
    calibrate(model, [{name: torch.from_numpy(value) for name, value in batch.items()}])
    source = Source(model.eval(), tokenizer, convert_quantized(model))
    target = ExportTarget("onnx-decoder", find_lowest_precision(source.quantization))
    write_targets(source, [target], tmp_path)
    assert check_layers(source, target, tmp_path, batch) < 1e-5
    decoder, expected = OnnxDecoder(tmp_path / str(target), threads=1), source.runner(batch)
    inside = batch["attention_mask"] == 1
    # A difference in the last bit can move an activation by one quantization step.
    limit = (1e-4 if scheme == "int4-weights" else 0.05) * np.abs(expected).max()
    assert np.abs(decoder(batch) - expected)[inside].max() <= limit
    assert len(decoder.generate([[5, 6, 7]], new_tokens=4)[0]) > 0
    operators = {node.op_type for node in onnx.load(str(tmp_path / str(target) / "model.onnx")).graph.node}
    assert ("MatMulNBits" in operators) == (scheme == "int4-groups")
