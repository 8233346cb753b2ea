"""Measures the time of a model's parts, by which it is divided into pipeline stages."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from distill.checkpoint.auto_class import AutoClass
from distill.models.depth import set_depth
from distill.parallel.pipeline_stage import PartTimes, find_parts

_LEAST = 1e-9  # seconds of a layer: noise may make two layers seem as fast as one


def measure_part_times(
    config: PretrainedConfig, auto_class: AutoClass, rows: int, length: int, device: torch.device, rounds: int = 7
) -> PartTimes:
    """Returns the seconds of a forward and backward pass through the parts of a model, as medians over the rounds.

    A layer is the difference of models with two layers and with one, of random weights; what is left of the latter is
    divided between the modules before and after the layers by their forward passes.

    Args:
        config: Of the model; its layers are taken to be alike.
        auto_class: A transformers auto class that fits it.
        rows: Rows of a micro-batch.
        length: Their tokens.
        device: Where the stages will be.
        rounds: Passes that are timed; one more comes before them.
    """
    models = [_build(set_depth(config, layers), auto_class, device) for layers in (1, 2)]
    ids = torch.randint(config.get_text_config().vocab_size, (rows, length), device=device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    passes: list[list[float]] = [[], []]
    ends: list[list[float]] = [[], []]
    parts = find_parts(models[0])
    for _ in range(rounds + 1):
        with (
            _time_modules(models[0], parts.before, device) as before,
            _time_modules(models[0], parts.after, device) as after,
        ):
            passes[0].append(_time_step(models[0], batch, device))
        passes[1].append(_time_step(models[1], batch, device))
        for durations, seconds in zip(ends, (before, after), strict=True):
            durations.append(sum(seconds))
    one, two = (statistics.median(each[1:]) for each in passes)
    start, end = (statistics.median(each[1:]) for each in ends)
    layer = max(_LEAST, two - one)
    rest = max(0.0, one - layer)
    share = start / (start + end) if start + end else 0.0
    return PartTimes(rest * share, layer, rest * (1 - share))


def _build(config: PretrainedConfig, auto_class: AutoClass, device: torch.device) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), device:
        model: PreTrainedModel = auto_class.from_config(config)
    model.train()
    return model


def _time_step(model: PreTrainedModel, batch: dict[str, Tensor], device: torch.device) -> float:
    model.zero_grad()
    start = _read_clock(device)
    output = model(**batch)
    next(value for value in output.values() if isinstance(value, Tensor)).float().mean().backward()
    return _read_clock(device) - start


@contextmanager
def _time_modules(model: nn.Module, names: Sequence[str], device: torch.device) -> Iterator[list[float]]:
    """Yields a list that gets the seconds of each call of the modules in the block."""
    seconds: list[float] = []
    starts: list[float] = []
    hooks = []
    for module in map(model.get_submodule, names):
        hooks.append(module.register_forward_pre_hook(lambda *_: starts.append(_read_clock(device))))
        hooks.append(module.register_forward_hook(lambda *_: seconds.append(_read_clock(device) - starts.pop())))
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def _read_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
