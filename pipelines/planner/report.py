"""What a plan prints, and the files that it writes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from distill.data.config import DataConfig
from distill.teacher.config import TeacherConfig
from pipelines.planner.hardware import Hardware
from pipelines.planner.layout_tracer import LayoutCandidate
from pipelines.planner.pairs import LayoutPair
from pipelines.planner.plan import ClusterPlan
from pipelines.runs.console import Console
from pipelines.runs.output import write_unedited
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.commands.plan import UNKNOWN_DATA, UNKNOWN_OUTPUT

SHOWN = 15  # pairs on the terminal; all are in the file
MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
SETTINGS_FILE, PAIRS_FILE = "distill.yaml", "pairs.json"


def print_plan(plan: ClusterPlan, console: Console) -> None:
    """Prints the machines, the layouts of each model, the pairs, and why one is chosen."""
    workload, hardware = plan.workload, plan.hardware
    console.table(
        "Plan",
        ("what", "assumed"),
        [
            ("machines", f"{hardware.nodes} x {hardware.devices} devices of {hardware.memory / 1e9:,.1f} GB"),
            ("products", f"{hardware.flops / 1e12:,.2f} TFLOP/s each, in {workload.settings.machine.precision}"),
            ("links", f"{hardware.links / 1e9:,.1f} GB/s in a node, {hardware.bandwidth / 1e9:,.1f} between nodes"),
            *describe_operator_rates(hardware),
            ("teacher", f"{workload.teacher_parameters / 1e6:,.1f}M parameters"),
            ("student", f"{workload.student_parameters / 1e6:,.1f}M parameters, {workload.settings.student.spec}"),
            ("data", f"{workload.rows:,} rows of {workload.length} tokens, {workload.settings.train.epochs} epochs"),
            ("batch", f"{workload.settings.train.rows} rows in all, {workload.steps:,} steps"),
            ("cache", f"at most {workload.cache_bytes / 1e9:,.2f} GB"),
        ],
    )
    print_choices("Teacher: a query of a process, in GB", plan.teachers, console)
    print_choices("Student: a step of a process, in GB, with signals from a cache", plan.cached, console)
    if not plan.online:
        console.say("  no layout of the student fits beside the teacher's weights: a cache is needed")
    elif list(plan.online) != list(plan.cached):
        print_choices("Student: with a teacher in every step", plan.online, console)
    print_pairs(plan, console)
    for reason in explain_choice(plan):
        console.say(f"  {reason}")


def describe_operator_rates(hardware: Hardware) -> list[tuple[str, str]]:
    """Returns the rows of what operators other than products take, for a CPU; a GPU's `flops` include it."""
    if hardware.can_overlap:
        return []
    return [
        ("memory", f"{hardware.memory_bandwidth / 1e9:,.1f} GB/s"),
        ("dropout", f"{hardware.draws / 1e6:,.0f}M random numbers a second"),
        ("collectives", f"{hardware.latency * 1e6:,.0f} us each"),
        ("sharded operators", f"{hardware.dispatch * 1e6:,.0f} us each"),
    ]


def print_choices(title: str, choices: Sequence[LayoutCandidate], console: Console) -> None:
    """Prints the layouts that were traced, and why the others weren't."""
    traced = [choice for choice in choices if choice.trace is not None]
    header = ("layout", "rows", *MEMORY_KINDS, "peak GB", "rows/s (total)", "computing", "sending", "idle", "")
    console.table(title, header, [describe_choice(choice) for choice in traced])
    for choice in choices:
        if choice.trace is None:
            console.say(f"  skipped {describe_layout(choice)}: {choice.rejection}")


def describe_choice(choice: LayoutCandidate) -> tuple[str, ...]:
    """Returns the table row of a layout; shares of the time are of a step."""
    assert choice.trace is not None
    assert choice.time is not None
    memory, time = choice.trace.memory, choice.time
    shares = time.compute, time.waited + time.exposed, time.idle
    return (
        describe_layout(choice),
        str(choice.rows),
        *(f"{memory.get(kind, 0) / 1e9:,.2f}" for kind in MEMORY_KINDS),
        f"{choice.peak / 1e9:,.2f}",
        f"{choice.rows * choice.layout.data_parallel / max(time.total, 1e-12):,.4g}",
        *(f"{share / max(time.total, 1e-12):.0%}" for share in shares),
        choice.rejection,
    )


def describe_layout(choice: LayoutCandidate) -> str:
    """Returns a layout with its memory settings."""
    if choice.train is None:
        return str(choice.layout)
    names = [choice.train.optimizer] if choice.train.optimizer != "adamw" else []
    names += [choice.train.checkpointing] if choice.train.checkpointing != "none" else []
    names += [f"{choice.offloaded / 1e9:,.1f} GB in the CPU's memory"] if choice.offloaded else []
    return ", ".join([str(choice.layout), *names])


def print_pairs(plan: ClusterPlan, console: Console) -> None:
    """Prints the fastest pairs."""
    fastest = plan.chosen.step
    rows = [
        (
            pair.signals, str(pair.teacher.layout), describe_layout(pair.student), f"{pair.peak / 1e9:,.2f}",
            f"{pair.step / fastest:.2f}", f"{pair.writing / 3600:,.2f}", f"{pair.training / 3600:,.2f}",
            f"{pair.hours:,.2f}", f"{pair.hours * plan.hardware.processes:,.1f}",
        )
        for pair in plan.pairs[:SHOWN]
    ]  # fmt: skip
    hidden = len(plan.pairs) - len(rows)
    console.table(
        f"Pairs that fit, the fastest first{f'; {hidden} more are in {PAIRS_FILE}' if hidden else ''}",
        (
            "signals",
            "teacher",
            "student",
            "peak GB",
            "step",
            "cache hours",
            "training hours",
            "total hours",
            "GPU-hours",
        ),
        rows,
    )


def explain_choice(plan: ClusterPlan) -> list[str]:
    """Returns why the fastest pair was chosen, in sentences."""
    pair, memory = plan.chosen, plan.hardware.memory
    lines = [
        f"chosen: teacher {pair.teacher.layout}, student {describe_layout(pair.student)}, {pair.signals} signals: the "
        f"fastest of {len(plan.pairs)} pairs that fit, {pair.hours:,.2f} hours; {(memory - pair.peak) / 1e9:,.1f} of "
        f"{memory / 1e9:,.1f} GB stay free"
    ]
    other = plan.find_fastest("online" if pair.signals == "cached" else "cached")
    if other is not None:
        lines.append(
            f"with {other.signals} signals the fastest pair takes {other.hours:,.2f} hours (teacher "
            f"{other.teacher.layout}, student {describe_layout(other.student)}), {other.hours / pair.hours:.2f} times "
            "as long"
        )
    second = next((each for each in plan.pairs if each.student.layout != pair.student.layout), None)
    if second is not None:
        lines.append(f"the next layout of the student, {second.student.layout}, takes {compare_steps(pair, second)}")
    return lines


def compare_steps(first: LayoutPair, second: LayoutPair) -> str:
    """Says how much longer the second pair's run takes, and of what."""
    time = second.student.time
    assert time is not None
    parts = {"computing": time.compute, "sending": time.waited + time.exposed, "waiting for stages": time.idle}
    shares = ", ".join(f"{name} {value / time.total:.0%}" for name, value in parts.items() if value > 0)
    return f"{second.hours / first.hours:.2f} times as long (a step is {shares})"


def write_plan(plan: ClusterPlan, folder: Path) -> dict[str, Path]:
    """Writes the settings of the chosen pair, and all pairs; returns what each file is.

    Raises:
        InputError: The folder has other settings, perhaps edited by hand.
    """
    write_unedited(folder, {SETTINGS_FILE: yaml.safe_dump(list_chosen_settings(plan), sort_keys=False)})
    (folder / PAIRS_FILE).write_text(json.dumps([record_pair(pair) for pair in plan.pairs], indent=1))
    return {"settings for pipelines.distill --config": folder / SETTINGS_FILE, "all pairs": folder / PAIRS_FILE}


def list_chosen_settings(plan: ClusterPlan) -> dict[str, Any]:
    """Returns the settings of the chosen pair's run that differ from the defaults, in groups."""
    run, pair = plan.requested, plan.chosen
    train = pair.student.train
    assert train is not None
    chosen = replace(
        run,
        teacher=replace(run.teacher, layout=str(pair.teacher.layout), online=pair.signals == "online"),
        student=replace(run.student, layout=str(pair.student.layout), offload=pair.student.offloaded > 0),
        train=replace(run.train, checkpointing=train.checkpointing, optimizer=train.optimizer),
        machine=replace(run.machine, precision=plan.workload.settings.machine.precision),
    )
    return select_changes(asdict(chosen), asdict(DEFAULTS))


DEFAULTS = DistillConfig(output=UNKNOWN_OUTPUT, teacher=TeacherConfig(model="-"), data=DataConfig(path=UNKNOWN_DATA))


def select_changes(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that differ from the defaults, of groups too."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(defaults[name], Mapping) and defaults[name]:
            group = select_changes(value, defaults[name])
            changed |= {name: group} if group else {}
        elif value != defaults[name]:
            changed[name] = list(value) if isinstance(value, tuple) else value
    return changed


def record_pair(pair: LayoutPair) -> dict[str, Any]:
    """Returns a pair as JSON."""
    assert pair.student.trace is not None
    assert pair.teacher.trace is not None
    return {
        "signals": pair.signals,
        "teacher": {"layout": str(pair.teacher.layout), "memory": dict(pair.teacher.trace.memory)},
        "student": {"layout": describe_layout(pair.student), "memory": dict(pair.student.trace.memory)},
        "peak_bytes": pair.peak,
        "step_seconds": pair.step,
        "writing_seconds": pair.writing,
        "training_seconds": pair.training,
    }
