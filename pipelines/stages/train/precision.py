"""The precision stage: the precision that trains fastest on this machine, measured once per output folder."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.measure.latency import limit_torch_threads
from compress.measure.precision_modes import MODES, check_mode, find_unsupported_reason, list_candidate_modes
from compress.measure.precision_speed import choose_fastest_mode, measure_modes, measure_peak_flops
from distill.checkpoint.outputs import find_logits
from distill.data.batches.batches import EncodedRows, TrainBatches
from distill.data.batches.chunks import cut_chunks
from distill.data.batches.packing import find_padding_id
from distill.data.batches.segments import ROW_DOCUMENTS, ROW_MASK
from distill.data.splits.examples import take_rows
from distill.errors import InputError
from distill.models.inputs import build_inputs
from distill.models.short_attention import attend_to_short_texts
from distill.tasks.task import Task
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.strategies.by_layout import choose_device
from pipelines.settings.commands.distill import DistillConfig, MachineConfig
from pipelines.settings.plan import RunPlan
from pipelines.settings.this_machine import describe_machine
from pipelines.settings.tokenizers import build_cross_tokenizer_rows, is_cross_tokenizer
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.train.distill import make_student

VERSION = 2  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
BATCHES = 3  # number of timed batches


def select_precision(run: Run, plan: RunPlan, data: Artefact) -> str:
    """Returns the requested precision, or with `auto` the fastest of those that the machine supports.

    The first run of an output folder measures on the student and batches of the data. Later runs reuse its choice
    regardless of their settings, so that the same command gives bit-identical results.

    Raises:
        CompressError: The machine doesn't support the requested precision.
        InputError: The machine doesn't support the precision that was chosen earlier for this folder.
    """
    machine = plan.settings.machine
    if machine.precision != "auto":
        check_mode(machine.precision, choose_device(machine.accelerator))
        return machine.precision

    def work(folder: Path) -> dict[str, Any]:
        with limit_torch_threads(machine.threads), torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed)
            model, batches = build_student_and_batches(run, plan, data)
            timings = time_precisions(model, batches, machine, list_accepted_modes(plan))
        (folder / "precision.json").write_text(json.dumps(timings, indent=1))
        run.console.say(f"  precision: {timings['chosen']} is chosen here ({describe_timings(timings)})")
        return timings

    # No inputs and no seed, so that there is one choice per output folder.
    stage = run.stage("precision", {}, {}, work, version=VERSION, seeded=False)
    chosen: str = stage.metrics.get("chosen", "32")
    why = find_unsupported_reason(chosen, choose_device(machine.accelerator))
    if why:
        raise InputError(
            f"machine.precision auto: this output folder already uses {chosen} ({str(stage.folder)!r}), which "
            f"{choose_device(machine.accelerator).type} doesn't support: {why}; set --precision, or another --output"
        )
    if stage.skipped:
        run.console.say(f"  precision: {chosen}, as it was chosen for this folder")
    return chosen


def list_accepted_modes(plan: RunPlan) -> list[str]:
    """Returns the modes to measure: those for this device that no rule rejects in the run's layouts."""

    def is_accepted(name: str) -> bool:
        try:
            plan.check_precision(name)
        except InputError:
            return False
        return True

    return [
        name for name in list_candidate_modes(choose_device(plan.settings.machine.accelerator)) if is_accepted(name)
    ]


def describe_timings(timings: Mapping[str, Any]) -> str:
    """Returns the measured speeds as text."""
    shares = timings["share_of_ceiling"]
    listed = [
        f"{name} {seconds * 1e3:.0f} ms" + (f", {shares[name]:.0%} of what products reach" if name in shares else "")
        for name, seconds in timings["seconds_a_step"].items()
    ]
    sizes = ", ".join(f"{rows}x{length}" for rows, length in timings["measured"]["batches"])
    return f"a step of the student on {sizes} tokens: {'; '.join(listed)}"


def build_student_and_batches(
    run: Run, plan: RunPlan, data: Artefact
) -> tuple[PreTrainedModel, list[dict[str, Tensor]]]:
    """Returns the unsharded student at the start of its training, and batches of the size each process gets.

    A segment of positions is measured as a row of its own.
    """
    config, source = plan.settings, plan.teacher.folder
    task, teacher_tokenizer = read_task(data), plan.teacher.load_tokenizer()
    tokenizer = teacher_tokenizer if plan.student is None else plan.student.load_tokenizer()
    task.configure_tokenizer(tokenizer, source)
    other = is_cross_tokenizer(config, teacher_tokenizer, tokenizer)
    if not other:  # as in the student stage
        tokenizer.model_max_length = teacher_tokenizer.model_max_length
    teacher = task.load_to_train(source, plan.teacher.config, run.seed)
    student = make_student(plan, teacher, teacher_tokenizer, task, run.seed, own_tokenizer=other)
    rows = draw_rows(config, read_data(data).train, task, tokenizer, teacher_tokenizer if other else None, run.seed)
    size, layout = config.train.rows, plan.layouts.student
    batches = TrainBatches(
        rows, size, find_padding_id(tokenizer), seed=run.seed, ranks=layout.data_parallel, segment=(0, layout.cp)
    )
    window, of_rows = config.train.backward_window, (ROW_MASK, ROW_DOCUMENTS)
    measured = [{name: batch[name] for name in batch if name not in of_rows} for batch in islice(batches, BATCHES)]
    return student.float(), [next(cut_chunks(batch, window)).batch for batch in measured] if window else measured


def draw_rows(
    config: DistillConfig,
    part: Any,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
) -> EncodedRows:
    """Returns enough training samples for the timed batches, drawn by the seed.

    If several texts make up a row and the drawn texts yield too few rows, 64 times as many texts are drawn.
    """
    length = config.data.max_length
    wanted = BATCHES * config.train.rows

    def encoded(numbers: np.ndarray) -> EncodedRows:
        few = take_rows(part, numbers)
        if teacher_tokenizer is not None:
            return build_cross_tokenizer_rows(config, tokenizer, teacher_tokenizer, few.texts, length)
        result: EncodedRows = task.encode_train(tokenizer, few, length)
        return result

    order = np.random.default_rng(seed).permutation(len(part))
    rows = encoded(np.sort(order[:wanted]))
    return rows if len(rows) >= wanted or len(part) <= wanted else encoded(np.sort(order[: 64 * wanted]))


def time_precisions(
    model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]], machine: MachineConfig, modes: Sequence[str]
) -> dict[str, Any]:
    """Returns seconds per step by mode, the fastest mode, each mode's share of the peak speed, and what was timed.

    The peak is the speed of the largest square matrix product.
    """
    device = choose_device(machine.accelerator)
    model = model.to(device).train()  # type: ignore[arg-type]
    losses = [make_loss(batch, device) for batch in batches]
    with attend_to_short_texts():  # as in training
        seconds = measure_modes(model, losses, modes)
    with FlopCounterMode(display=False) as counter:
        for loss in losses:
            loss(model).backward()
    model.zero_grad()
    work = counter.get_total_flops() / len(losses)
    shares = {
        name: work / each / measure_peak_flops(device, MODES[name].product_dtype) for name, each in seconds.items()
    }
    return {
        "chosen": choose_fastest_mode(seconds),
        "seconds_a_step": seconds,
        # Above 1 the square product isn't the fastest, and the share is meaningless.
        "share_of_ceiling": {name: share for name, share in shares.items() if share <= 1},
        "measured": {
            "student": f"{type(model).__name__}, {model.num_parameters():,} parameters",
            "batches": [list(batch["input_ids"].shape) for batch in batches],
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else describe_machine()["processor"],
            "threads": torch.get_num_threads(),
        },
    }


def make_loss(batch: Mapping[str, Tensor], device: torch.device) -> Callable[[Any], Tensor]:
    """Returns a function that computes a scalar to backpropagate from: the mean square of a model's logits."""
    on_device = {name: each.to(device) for name, each in batch.items() if isinstance(each, Tensor)}

    def loss(model: Any) -> Tensor:
        logits = find_logits(model(**build_inputs(model, on_device)))
        assert logits is not None
        return logits.float().square().mean()

    return loss
