"""The Python blocks of README.md and docs/: they run, or, where they read a finished run, what they import exists."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.batches.data_module import TextDataModule
from distill.data.splits.examples import Examples, Splits
from real.documents import DOCUMENTS, ROOT
from support.tiny_models import LABELS, build_model

SHIPPED = "reader"  # a module in the exported folder
RUN_ALONE = ("docs/howto/augment.md", "docs/howto/select.md")
# They read files of a run, or continue the cells of a notebook, which has a test of its own.
IMPORTED = (
    "docs/howto/cascade.md", "docs/howto/clean.md", "docs/howto/export.md", "docs/tutorials/classifier.md",
    "docs/tutorials/notebook.md",
)  # fmt: skip


def read_blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.S)


BLOCKS = [(str(path.relative_to(ROOT)), block) for path in DOCUMENTS for block in read_blocks(path)]


def run_block(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, "block", "exec"), names)  # noqa: S102 - what the documents say
    return names


def blocks_of(page: str) -> list[str]:
    return [block for name, block in BLOCKS if name == page]


@pytest.mark.parametrize("page", RUN_ALONE)
def test_a_block_without_inputs_runs(page):
    for block in blocks_of(page):
        run_block(block, {})


def test_the_module_of_the_readme_trains_a_student_with_two_layers(tokenizer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where the trainer writes its logs
    (block,) = blocks_of("README.md")
    train = Examples(["one text", "another text"] * 8, None, [0, 1] * 8)
    data = TextDataModule(Splits(LABELS, train, train, train, Examples([], None, []), {}), tokenizer, batch_size=8)
    names = run_block(block, {"teacher": build_model("bert"), "data": data})
    assert names["module"].student.config.num_hidden_layers == 2
    assert names["module"].global_step == 3 * 2


def test_the_pruned_model_has_the_layers_and_heads_that_are_named():
    block = next(block for block in blocks_of("docs/howto/prune.md") if "find_axes(model)" in block)
    model = build_model("bert", num_hidden_layers=6, hidden_size=40, num_attention_heads=5)
    student = run_block(block, {"model": model, "torch": torch})["student"]
    assert len(student.bert.encoder.layer) == 3
    assert student.bert.encoder.layer[1].attention.self.query.out_features == 2 * 8


@pytest.mark.slow
def test_the_quantized_model_is_exported(tokenizer: PreTrainedTokenizerBase, token_batch: dict[str, Tensor], tmp_path):
    (block,) = blocks_of("docs/howto/quantize.md")
    names = {"model": build_model("bert"), "tokenizer": tokenizer, "batches": [token_batch], "folder": tmp_path / "x"}
    run_block(block, names)
    assert (tmp_path / "x" / "config.json").exists()


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_what_a_block_imports_exists(page, block):
    found = [node for node in ast.parse(block).body if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = [node for node in found if getattr(node, "module", "") != SHIPPED]
    run_block(ast.unparse(ast.Module(imports, [])), {})


def test_every_page_with_a_block_is_listed():
    run = {*RUN_ALONE, "README.md", "docs/howto/prune.md", "docs/howto/quantize.md"}
    assert {page for page, _ in BLOCKS} == run | {*IMPORTED}
