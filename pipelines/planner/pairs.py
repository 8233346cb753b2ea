"""Pairs of a teacher's and a student's layout: what a process of the run holds at most, and how long the run takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from distill.parallel.layout import Layout
from pipelines.planner.hardware import Hardware, estimate_step
from pipelines.planner.layout_tracer import LayoutCandidate
from pipelines.planner.operator_counter import OperatorWork
from pipelines.planner.trace import StepTrace
from pipelines.planner.workload import Workload

OF_ROWS = ("activations", "logits", "buffers")  # what grows with the rows of a batch


@dataclass(frozen=True)
class LayoutPair:
    """A run with these layouts.

    Args:
        signals: Whether the teacher's signals are cached, or computed in every step.
        teacher: The teacher's layout, and its queries.
        student: The student's layout, and its step.
        peak: Bytes of a process, at most.
        step: Seconds of an optimizer step.
        writing: Seconds of writing the cache.
        training: Seconds of training.
    """

    signals: Literal["cached", "online"]
    teacher: LayoutCandidate
    student: LayoutCandidate
    peak: int
    step: float
    writing: float
    training: float

    @property
    def hours(self) -> float:
        """Hours of the run."""
        return (self.writing + self.training) / 3600


def pair_cached(teacher: LayoutCandidate, student: LayoutCandidate, workload: Workload) -> LayoutPair:
    """Returns the run that writes a cache, and then trains without the teacher."""
    queries = -(-workload.rows // (teacher.rows * teacher.layout.data_parallel))
    step = student.seconds * workload.settings.train.accumulate
    peak = max(teacher.peak, student.peak)
    return LayoutPair("cached", teacher, student, peak, step, queries * teacher.seconds, workload.steps * step)


def pair_online(
    teacher: LayoutCandidate, student: LayoutCandidate, workload: Workload, hardware: Hardware
) -> LayoutPair:
    """Returns the run in which the teacher is queried in every step, before the student computes."""
    assert teacher.trace is not None
    assert student.trace is not None
    query = scale_rows(teacher.trace, student.rows / teacher.rows)
    queried = count_turns(teacher.layout, student.layout) * estimate_step(query, hardware).total
    peak = max(query.peak + student.trace.held_bytes, query.held_bytes + student.peak)
    step = (queried + student.seconds) * workload.settings.train.accumulate
    return LayoutPair("online", teacher, student, peak, step, 0.0, workload.steps * step)


def scale_rows(trace: StepTrace, factor: float) -> StepTrace:
    """Returns the trace for this many times the rows; weights are gathered once for any number."""
    return replace(
        trace,
        memory={name: round(size * (factor if name in OF_ROWS else 1)) for name, size in trace.memory.items()},
        work=replace(OperatorWork().add(trace.work, factor), sharded=trace.work.sharded),
        sent={each: round(size * (factor if each.waits else 1)) for each, size in trace.sent.items()},
    )


def count_turns(teacher: Layout, student: Layout) -> int:
    """Returns how many batches the processes that compute the teacher together ask it for, one after the other."""
    together = teacher.pp * teacher.tp
    return max(1, together // (student.pp * student.tp))


def list_pairs(
    teachers: Sequence[LayoutCandidate],
    cached: Sequence[LayoutCandidate],
    online: Sequence[LayoutCandidate],
    workload: Workload,
    hardware: Hardware,
) -> list[LayoutPair]:
    """Returns all pairs that fit, the fastest first.

    Args:
        teachers: Layouts of the teacher.
        cached: Layouts of the student that reads a cache.
        online: Layouts of the student whose teacher computes in every step.
        workload: What is trained.
        hardware: The machines.
    """

    def pair_all() -> Iterator[LayoutPair]:
        for teacher in teachers:
            if fits(teacher):
                yield from (pair_cached(teacher, student, workload) for student in filter(fits, cached))
            if teacher.trace is not None:  # batches of the student may be smaller than those of a cache
                asking = (each for each in filter(fits, online) if each.layout.cp == teacher.layout.cp)
                yield from (pair_online(teacher, student, workload, hardware) for student in asking)

    fitting = [pair for pair in pair_all() if pair.peak <= hardware.memory]
    # Times are no more exact than this: of pairs that take as long, the one with the least memory comes first.
    return sorted(fitting, key=lambda pair: (float(f"{pair.hours:.3g}"), pair.peak))


def fits(choice: LayoutCandidate) -> bool:
    """Returns whether a layout is possible and fits."""
    return choice.trace is not None and not choice.rejection
