"""Checks of combinations of a run's settings, once its layouts and its precision are known."""

from distill.errors import InputError
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.layouts import Layouts

STOCK = ("32", "bf16-mixed", "16-mixed")  # precisions that Lightning implements


def check_together(config: DistillConfig, precision: str, layouts: Layouts) -> None:
    """Checks that the settings, precision and layouts of a run can be combined.

    Raises:
        InputError: The schedule needs more epochs; gradual pruning is combined with several processes or fp16; or a
            feature that works on one process only is combined with several.
    """
    if config.quantize.scheme:
        check_one_process(
            "quantize", "several were never tried; train without --devices, or leave the scheme out", config, layouts
        )
    if config.sparsity.asked:
        check_one_process("sparsity", "each would choose zeros of its own; leave --devices out", config, layouts)
        if precision == "16-mixed" and config.sparsity.score == "movement":
            raise InputError(
                "sparsity.score movement: expected precision 32 or bf16-mixed, found 16-mixed: gradients that are "
                "scaled anew in every step can't be summed into scores"
            )
    if config.loss.attention or config.loss.relations:
        for whose, layout in (("student", layouts.student), ("teacher", layouts.teacher)):
            if layout.tp > 1 or layout.pp > 1:
                raise InputError(
                    f"loss.attention, loss.relations: expected a {whose} with all heads on each process, found "
                    f"{layout}: a process would compare its own part only; use fsdp"
                )
    if config.general.data and (layouts.student.sharded or layouts.student.pp > 1 or config.machine.strategy):
        raise InputError(
            "general.data: expected a student whose weights are whole on each process, found "
            f"{config.machine.strategy or layouts.student}; use replicated or zero1"
        )
    if config.general.data and config.general.progressive:
        check_one_process("general.progressive", "layers that don't learn have no gradients to send", config, layouts)
    if config.loss.balance and (layouts.student.sharded or layouts.student.pp > 1 or config.machine.strategy):
        raise InputError(
            "loss.balance: expected a student whose weights are whole on each process, found "
            f"{config.machine.strategy or layouts.student}: the gradient of one term alone isn't known there"
        )
    if precision not in STOCK:
        check_one_process(f"machine.precision {precision}", "several were never tried", config, layouts)
    if not config.budget.asked:
        return
    schedule, epochs = config.prune.schedule, config.train.epochs
    least = {"oneshot": 1, "iterative": config.prune.rounds, "gradual": 2}[schedule]
    if epochs < least:
        raise InputError(
            f"train.epochs {epochs}: expected at least {least} with prune.schedule {schedule}, for each part of it "
            "trains for one or more"
        )
    if schedule != "gradual":
        return
    why = "each would close units of its own; use iterative or oneshot"
    check_one_process("prune.schedule gradual", why, config, layouts)
    if precision == "16-mixed":
        raise InputError(
            "prune.schedule gradual: expected precision 32 or bf16-mixed, found 16-mixed: gradients that are scaled "
            "anew in every step can't be summed into scores"
        )


def check_one_process(name: str, why: str, config: DistillConfig, layouts: Layouts) -> None:
    """Checks that the student is trained by one process.

    Raises:
        InputError: The student is trained by several processes, or by DeepSpeed.
    """
    if layouts.student.processes > 1 or config.machine.strategy:
        raise InputError(
            f"{name}: expected one process, found {layouts.student.processes}"
            f"{' and ' + config.machine.strategy if config.machine.strategy else ''}: {why}"
        )
