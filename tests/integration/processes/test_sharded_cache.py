"""A teacher sharded across processes writes the same cache as an unsharded teacher."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.processes.cache_ranks import write
from support.processes.ranks import run_ranks
from support.tiny_models import saved


@pytest.fixture(scope="module", params=["encoder", "decoder"])
def teacher(request, tmp_path_factory, tokenizer, tiny_model) -> tuple[Path, bool]:
    folder, is_decoder = tmp_path_factory.mktemp("teacher") / "model", request.param == "decoder"
    if not is_decoder:
        return saved(tiny_model("bert", num_hidden_layers=4), tokenizer, folder), is_decoder
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=600, **sizes)).save_pretrained(folder)
    return folder, is_decoder


@pytest.fixture(scope="module")
def expected_cache(teacher, tmp_path_factory) -> tuple[str, dict[str, bytes]]:
    folder, is_decoder = teacher
    cache = tmp_path_factory.mktemp("whole") / "cache"
    return write(0, 1, folder, cache, "replicated", is_decoder), read_contents(cache)


def read_contents(cache: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(cache)): file.read_bytes()
        for file in cache.rglob("*")
        if file.is_file() and file.name != "cache.lock"
    }


LAYOUTS = [(2, "replicated"), (2, "fsdp=2"), (2, "tp=2"), (2, "pp=2")]
LAYOUTS += [pytest.param(4, layout, marks=pytest.mark.slow) for layout in ("hsdp=2x2", "fsdp=2,tp=2", "dp=2,pp=2")]


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS)
def test_a_sharded_teacher_writes_the_same_cache_as_an_unsharded_one(
    processes, layout, teacher, expected_cache, tmp_path
):
    folder, is_decoder = teacher
    name, expected = expected_cache
    assert len(expected) > 6, "there is one shard alone, for one process"
    names = run_ranks(write, processes, processes, folder, tmp_path / "cache", layout, is_decoder, limit=120)
    assert names == [name] * processes, "the teacher has another fingerprint in parts"
    found = read_contents(tmp_path / "cache")
    assert found.keys() == expected.keys()
    assert [file for file in found if found[file] != expected[file]] == []
