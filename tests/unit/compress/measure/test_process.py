"""Tests timing in a fresh process: what is timed there, what it has loaded, and what happens if it fails."""

import os
from functools import partial
from operator import attrgetter, methodcaller

import numpy as np
import pytest
import torch

from compress.errors import TimingError
from compress.export.common.targets import find_target
from compress.export.runtimes import build_opener
from compress.measure.latency import TEXTS_PER_TURN
from compress.measure.process import open_timing_process
from distill.checkpoint.custom_models import save_model_folder
from distill.checkpoint.readers import CHECKPOINT_READERS
from support.tiny_models import build_model

TEXTS = [{"input_ids": np.full((1, length), length)} for length in range(1, TEXTS_PER_TURN + 3)]
COPY = partial(methodcaller, "copy")  # opens a function that copies its inputs


def test_the_models_that_have_inputs_are_timed_and_their_calls_counted():
    counts: list[int] = []
    with open_timing_process({"one": COPY, "two": COPY, "three": COPY}, threads=1) as process:
        times = process.time_rounds(dict.fromkeys(("one", "three"), TEXTS), rounds=3, on_calls=counts.append)
        again = process.time_rounds({"two": TEXTS[:2]}, rounds=1, warmup=0)
    assert {name: each.shape for name, each in times.items()} == {"one": (3, len(TEXTS)), "three": (3, len(TEXTS))}
    assert all((each > 0).all() for each in times.values())
    assert sorted(counts) == 8 * [2] + 8 * [TEXTS_PER_TURN], "two turns of two models in a warm-up and three rounds"
    assert {name: each.shape for name, each in again.items()} == {"two": (1, 2)}


def test_the_process_ends_with_the_block():
    with open_timing_process({"one": COPY}, threads=1) as timing:
        assert timing.process.poll() is None
    assert timing.process.poll() is not None


def test_a_runtime_without_pytorch_is_timed_in_a_process_without_it():
    look_up = partial(eval, "lambda inputs: __import__('sys').modules['torch']")
    with open_timing_process({"one": look_up}, threads=1) as process:
        with pytest.raises(TimingError, match="latency is unknown:\n(.|\n)*KeyError: 'torch'"):
            process.time_rounds({"one": TEXTS}, rounds=1)


def test_a_checkpoint_is_timed_silently_with_the_requested_threads(tmp_path, capfd):
    save_model_folder(build_model("bert"), tmp_path / "huggingface")
    threads = torch.get_num_threads() + 1
    read_threads = partial(eval, f"lambda inputs: 1 / (__import__('torch').get_num_threads() == {threads})")
    read_setting = partial(
        eval, f"lambda inputs: 1 / (__import__('os').environ['OPENBLAS_NUM_THREADS'] == '{threads}')"
    )
    texts = [{"input_ids": np.ones((1, 4), np.int64), "attention_mask": np.ones((1, 4), np.int64)}]
    texts[0]["token_type_ids"] = texts[0]["input_ids"] * 0
    model = build_opener(find_target("huggingface"), tmp_path / "huggingface", threads)
    openers = {"model": model, "threads": read_threads, "setting": read_setting}
    capfd.readouterr()  # what libraries printed when this process imported them
    with open_timing_process(openers, threads) as process:
        times = process.time_rounds(dict.fromkeys(openers, texts), rounds=1)
    assert set(times) == set(openers)
    assert "".join(capfd.readouterr()) == ""


def test_readers_of_checkpoints_that_this_process_registered_are_known_there(tmp_path, monkeypatch):
    save_model_folder(build_model("bert"), tmp_path / "huggingface")
    (tmp_path / "huggingface" / "marker.json").write_text("{}")
    monkeypatch.setitem(CHECKPOINT_READERS, "marker.json", "no_such_module:Reader")
    opener = build_opener(find_target("huggingface"), tmp_path / "huggingface", 1)
    with pytest.raises(TimingError, match="No module named 'no_such_module'"):
        with open_timing_process({"model": opener}, threads=1):
            pass


def test_models_are_opened_again_while_that_takes_little_of_the_time():
    """A sleep of 0.3 s stands for the opening of a model."""
    opener = partial(eval, "(__import__('time').sleep(0.3), __import__('time').sleep)[1]")
    with open_timing_process({"sleep": opener}, threads=1) as process:
        once = process.opening
        process.time_rounds({"sleep": [0.1]}, rounds=1, warmup=0)
        process.reopen_models()
        assert process.opening == once
        process.time_rounds({"sleep": [0.1] * 12}, rounds=1, warmup=0)
        process.reopen_models()
    assert process.opening > once + 0.3


def test_a_model_that_fails_is_reported_with_its_error():
    with open_timing_process({"one": partial(attrgetter, "no_such_attribute")}, threads=1) as process:
        with pytest.raises(TimingError, match="no attribute 'no_such_attribute'"):
            process.time_rounds({"one": TEXTS}, rounds=1)


@pytest.mark.parametrize(
    ("opener", "end"),
    [(os.abort, "was killed by SIGABRT; run the same command again"), (partial(os._exit, 3), "ended with exit code 3")],
    ids=["killed", "ended"],
)
def test_a_process_that_ends_is_reported(opener, end):
    with pytest.raises(TimingError, match=f"the process that timed models {end}"):
        with open_timing_process({"one": opener}, threads=1):
            pass
