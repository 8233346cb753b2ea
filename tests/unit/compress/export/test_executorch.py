"""Programs of ExecuTorch leave everything that covers pairs of tokens to XNNPACK."""

import numpy as np
import pytest

from compress.export.common.huggingface import TorchModel
from compress.export.common.source import Source
from compress.export.common.targets import find_target
from compress.export.executorch.program import ExecutorchModel
from compress.export.write import write_targets
from support.tiny_models import build_model

pytest.importorskip("executorch")


@pytest.mark.slow
def test_attention_has_no_portable_kernels(tokenizer, tmp_path):
    model = build_model("bert")
    write_targets(Source(model, tokenizer), [find_target("executorch")], tmp_path)
    assert model.config._attn_implementation == "sdpa", "the model itself stays as it was"
    program = (tmp_path / "executorch" / "model.pte").read_bytes()
    assert b"aten::native_layer_norm" in program, "names of portable kernels are in the file"
    for kernel in (b"aten::any", b"aten::logical_not", b"aten::_softmax", b"aten::eq"):
        assert kernel not in program
    opened, batch = ExecutorchModel(tmp_path / "executorch", threads=1), np.array([[2, 7, 9, 3], [2, 8, 3, 0]])
    inputs = {"input_ids": batch, "attention_mask": (batch > 0).astype(np.int64), "token_type_ids": 0 * batch}
    assert np.abs(opened(inputs) - TorchModel.of(model)(inputs)).max() < 1e-5
