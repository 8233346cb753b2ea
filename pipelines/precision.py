"""The precision stage: which precision trains faster here, measured once and kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from compress.precision import candidates, fastest, measure_precisions
from pipelines.config import MachineConfig
from pipelines.machine import describe
from pipelines.stage import Run

ROWS, LENGTH = 8, 16


def chosen_precision(run: Run, machine: MachineConfig, teacher: str, load: Callable[[], PreTrainedModel]) -> str:
    """The precision asked for, or with `auto` the fastest of those that this machine has.

    `load()` gives the model to time; it is called only when there is something to measure.
    """
    if machine.precision != "auto":
        return machine.precision
    settings = {"accelerator": machine.accelerator, "threads": machine.threads, "machine": describe()["processor"]}

    def work(place: Path) -> dict[str, Any]:
        seconds = time_precisions(load(), machine)
        best = fastest(seconds)
        (place / "precision.json").write_text(json.dumps({"chosen": best, "seconds_a_step": seconds}, indent=1))
        listed = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in seconds.items())
        run.console.say(f"  precision: {best} is chosen here ({listed} a step)")
        return {"chosen": best, "seconds_a_step": seconds}

    return run.stage("precision", settings, {"teacher": teacher}, work).metrics.get("chosen", "32")


def time_precisions(model: PreTrainedModel, machine: MachineConfig) -> dict[str, float]:
    on_gpu = machine.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model = model.to(device).train()  # type: ignore[arg-type]
    ids = torch.randint(5, model.config.vocab_size, (ROWS, LENGTH), device=device)

    def loss(timed: torch.nn.Module) -> torch.Tensor:
        return timed(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().square().mean()

    return measure_precisions(model, loss, candidates(device))
