"""The precision stage: which precision trains faster here, measured once and kept."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from compress.precision import MODES, candidates, ceiling, check_mode, fastest, measure_precisions
from distill.answers import logits_of
from pipelines.config import MachineConfig
from pipelines.machine import describe
from pipelines.stage import Run

ROWS, LENGTH = 32, 16


def chosen_precision(run: Run, machine: MachineConfig, teacher: str, load: Callable[[], PreTrainedModel]) -> str:
    """The precision asked for, or with `auto` the fastest of those that this machine has.

    `load()` gives the model to time; it is called only when there is something to measure.
    """
    if machine.precision != "auto":
        check_mode(machine.precision, device_of(machine))
        return machine.precision
    settings = {"accelerator": machine.accelerator, "threads": machine.threads, "machine": describe()["processor"]}

    def work(place: Path) -> dict[str, Any]:
        with threads(machine.threads):
            found = time_precisions(load(), machine)
        (place / "precision.json").write_text(json.dumps(found, indent=1))
        listed = ", ".join(
            f"{name} {seconds * 1e3:.0f} ms, {found['share_of_ceiling'][name]:.0%} of what products reach"
            for name, seconds in found["seconds_a_step"].items()
        )
        run.console.say(f"  precision: {found['chosen']} is chosen here (a step: {listed})")
        return found

    return run.stage("precision", settings, {"teacher": teacher}, work).metrics.get("chosen", "32")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """As many CPU threads in the block as the training will have; 0 leaves them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_of(machine: MachineConfig) -> torch.device:
    on_gpu = machine.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


def time_precisions(model: PreTrainedModel, machine: MachineConfig) -> dict[str, Any]:
    """Seconds a step by mode, the fastest, and the share of the largest square product's speed that each reaches."""
    device = device_of(machine)
    model = model.to(device).train()  # type: ignore[arg-type]
    ids = torch.randint(5, model.config.vocab_size, (ROWS, LENGTH), device=device)

    def loss(timed: torch.nn.Module) -> torch.Tensor:
        said = logits_of(timed(input_ids=ids, attention_mask=torch.ones_like(ids)))
        assert said is not None
        return said.float().square().mean()

    seconds = measure_precisions(model, loss, candidates(device))
    with FlopCounterMode(display=False) as counter:
        loss(model).backward()
    model.zero_grad()
    work = counter.get_total_flops()
    shares = {name: work / each / ceiling(device, MODES[name].computes) for name, each in seconds.items()}
    return {"chosen": fastest(seconds), "seconds_a_step": seconds, "share_of_ceiling": shares}
