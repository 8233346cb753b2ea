"""Memory and time of each layout of a teacher and of a student, on given machines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from distill.checkpoint.config import in_one_line
from distill.errors import InputError
from distill.parallel.layout import Layout
from distill.tasks.logit_rows import OutputRows
from distill.train.config import AUTO, TrainConfig
from pipelines.planner.depth_extrapolation import ExtrapolatedTrace, add_difference, extrapolate_depth, trace_exactly
from pipelines.planner.fake_process_group import simulate_world
from pipelines.planner.hardware import Hardware, StepTime, estimate_offload, estimate_step
from pipelines.planner.layouts import list_layouts
from pipelines.planner.parallel_traces import map_in_processes
from pipelines.planner.stage_trace import count_micro_batches, trace_stages
from pipelines.planner.trace import StepTrace, trace_query, trace_step
from pipelines.planner.workload import Workload
from pipelines.runs.memory.plan import LOW_BIT_STATES
from pipelines.settings.facts import Facts
from pipelines.settings.rules.table import check_rules

CHECKPOINTING = ("none", "selective", "full")  # each takes less memory and more time than the one before
SMALLER = {"adamw": "adamw-8bit"}  # an optimizer with smaller states, for when nothing else fits
# Optimizer -> bytes of its states over those of AdamW, as measured (docs/benchmarks/training.md). Their first step is
# compiled, which needs data, so they are traced as AdamW.
STATES = {name: size / 8 for name, size in LOW_BIT_STATES.items()} | {"adamw-fp8": 2.06 / 8}
QUERY_TOKENS = 2048  # of a batch whose signals are cached


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout and what belongs to it.

    Args:
        layout: The layout.
        train: Settings of the student's training; None for a teacher.
        rows: Rows of a process's batch.
        deep: What a step takes, and what it takes with fewer layers; None if it isn't possible.
        time: Seconds of a step; None likewise.
        rejection: Why it isn't possible, or doesn't fit; empty if it is and does.
        failed: Whether tracing failed, so that it is unknown what the layout takes.
        offloaded: Bytes of weights, gradients and states of a process that FSDP keeps in the CPU's memory.
    """

    layout: Layout
    train: TrainConfig | None = None
    rows: int = 0
    deep: ExtrapolatedTrace | None = None
    time: StepTime | None = None
    rejection: str = ""
    failed: bool = False
    offloaded: int = 0

    @property
    def trace(self) -> StepTrace | None:
        """What a step takes; None if it isn't possible."""
        return None if self.deep is None else self.deep.whole

    @property
    def peak(self) -> int:
        """Bytes of a process, at most."""
        assert self.trace is not None
        return self.trace.peak

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        assert self.time is not None
        return self.time.total


class LayoutTracer:
    """Traces the layouts of both models, each once.

    Args:
        workload: What is to be trained.
        hardware: The machines.
        on_layout: Called with the name of every layout when it is done, to show progress.
        workers: Number of processes that trace; they are forked from this one.
    """

    def __init__(
        self,
        workload: Workload,
        hardware: Hardware,
        on_layout: Callable[[str], None] = lambda name: None,
        *,
        workers: int = 1,
    ):
        self.workload, self.hardware, self.on_layout, self.workers = workload, hardware, on_layout, workers
        self._traced: set[tuple[object, ...]] = set()

    def trace_teachers(self, layouts: Sequence[Layout] = ()) -> list[LayoutCandidate]:
        """Returns the layouts of the teacher, these or all, with its queries while a cache is written."""
        layouts = layouts or list_layouts(self.hardware, self.workload.teacher, trained=False)
        return self._trace_all(self._trace_teacher, layouts)

    def trace_students(self, layouts: Sequence[Layout] = (), *, online: bool = False) -> list[LayoutCandidate]:
        """Returns the layouts of the student, these or all, each with the least checkpointing with which it fits.

        Where none fits, they are tried again with smaller optimizer states, and then, on GPUs, with FSDP's shards in
        the CPU's memory.
        """
        segments = self.workload.predicts_tokens
        layouts = layouts or list_layouts(self.hardware, self.workload.student, trained=True, segments=segments)
        train = self.workload.settings.train
        candidates = self._trace_all(partial(self._trace_student, train=train, online=online), layouts)
        if train.optimizer in SMALLER and all(choice.rejection for choice in candidates):
            smaller = replace(train, optimizer=SMALLER[train.optimizer])
            candidates += self._trace_all(partial(self._trace_student, train=smaller, online=online), layouts)
        if self.hardware.can_overlap and train.optimizer == "adamw" and all(choice.rejection for choice in candidates):
            shards = [layout for layout in layouts if layout.fsdp > 1 and layout.tp == layout.pp == 1]
            candidates += self._trace_all(
                partial(self._trace_student, train=train, online=online, offloads=True), shards
            )
        return candidates

    def trace_online_students(
        self, cached: Sequence[LayoutCandidate], teachers: Sequence[LayoutCandidate]
    ) -> list[LayoutCandidate]:
        """Returns the layouts of the student whose teacher computes in every step.

        Its signals take no less memory than those of a cache, so that only layouts are tried that fit with these and
        beside the teacher's weights. What differs doesn't depend on the number of layers, so a shallow model is traced.
        """
        if self.workload.choose_signals(online=True) == self.workload.choose_signals(online=False):
            return list(cached)
        teacher_bytes = min((teacher.trace.held_bytes for teacher in teachers if teacher.trace is not None), default=0)
        room = self.hardware.memory - teacher_bytes
        tried = {each.layout: each for each in cached if each.train and not each.rejection and each.peak <= room}
        return self._trace_all(lambda layout: self._exchange_signals(tried[layout]), list(tried))

    def _trace_all(
        self, trace: Callable[[Layout], LayoutCandidate], layouts: Sequence[Layout]
    ) -> list[LayoutCandidate]:
        """Returns what `trace` returns for each layout."""
        return list(map_in_processes(trace, layouts, self.workers, lambda layout: self.on_layout(str(layout))))

    def _trace_teacher(self, layout: Layout) -> LayoutCandidate:
        rows = max(1, QUERY_TOKENS // self.workload.length)
        return self._plan(layout, lambda layout: self._query(layout, rows), rows)

    def _trace_student(
        self, layout: Layout, train: TrainConfig, *, online: bool, offloads: bool = False
    ) -> LayoutCandidate:
        """Returns a layout with the first kind of checkpointing that fits, from the given one on.

        The last kind, which takes the least memory, is tried second: with it most layouts fit, or none does.
        """
        rows, rest = divmod(train.rows, layout.data_parallel)
        if rest:
            reason = f"a batch of {train.rows} rows can't be divided among {layout.data_parallel} processes"
            return LayoutCandidate(layout, train, rejection=reason)
        first = "none" if train.checkpointing == AUTO else train.checkpointing
        modes = CHECKPOINTING[CHECKPOINTING.index(first) :] if first in CHECKPOINTING else (first,)

        def plan(mode: str) -> LayoutCandidate:
            tried = replace(train, checkpointing=mode)
            step = partial(self._step, train=tried, rows=rows, online=online)
            return self._plan(layout, step, rows, tried, offloads=offloads)

        candidate = plan(first)
        never_fits = candidate.trace is None or candidate.trace.held_bytes > self.hardware.memory
        if not candidate.rejection or never_fits or len(modes) == 1:
            return candidate
        smallest = plan(modes[-1])
        if smallest.rejection:
            return smallest
        between = map(plan, modes[1:-1])
        return next((each for each in between if not each.rejection), smallest)

    def _exchange_signals(self, cached: LayoutCandidate) -> LayoutCandidate:
        """Returns a student's layout whose teacher computes in every step, from the one that reads a cache."""
        train, deep = cached.train, cached.deep
        assert train is not None
        assert deep is not None

        def trace(layout: Layout) -> ExtrapolatedTrace:
            before = deep.shallow
            after = self._trace_training(layout, train, cached.rows, deep.layers, online=True)
            return ExtrapolatedTrace(add_difference(deep.whole, before, after), after, deep.layers)

        return self._plan(cached.layout, trace, cached.rows, train)

    def _plan(
        self,
        layout: Layout,
        trace: Callable[[Layout], ExtrapolatedTrace],
        rows: int,
        train: TrainConfig | None = None,
        *,
        offloads: bool = False,
    ) -> LayoutCandidate:
        """Returns a layout with its trace, or with the reason why it isn't possible."""
        facts = Facts(self.workload.settings, layout.processes, self.workload.task.name)
        named = replace(facts, teacher_layout=layout) if train is None else replace(facts, student_layout=layout)
        if layout.pp > 1 and train is not None and type(self.workload.task.output_rows) is not OutputRows:
            return LayoutCandidate(layout, train, rows, rejection="rows of outputs that stages don't exchange")
        smallest = self._count_least(layout, train)
        if smallest > self.hardware.memory and not offloads:
            return LayoutCandidate(
                layout, train, rows, rejection=f"weights and states alone take {smallest / 1e9:,.0f} GB"
            )
        try:
            check_rules(named, about=("teacher_layout", "student_layout"))
            with simulate_world(self.hardware.processes):
                extrapolated = trace(layout)
        except InputError as error:
            return LayoutCandidate(layout, train, rows, rejection=str(error))
        except Exception as error:  # noqa: BLE001 - of a family whose code needs data, which may raise anything
            reason = f"a step without data failed: {type(error).__name__}: {in_one_line(error)}"
            return LayoutCandidate(layout, train, rows, rejection=reason, failed=True)
        time, offloaded = estimate_step(extrapolated.whole, self.hardware), 0
        if offloads:
            offloaded = extrapolated.whole.held_bytes
            seconds = estimate_offload(extrapolated.whole, self.hardware)
            extrapolated = ExtrapolatedTrace(
                offload_states(extrapolated.whole), offload_states(extrapolated.shallow), extrapolated.layers
            )
            time = replace(time, waited=time.waited + seconds)
        rejection = "" if extrapolated.whole.peak <= self.hardware.memory else "doesn't fit"
        return LayoutCandidate(layout, train, rows, extrapolated, time, rejection, offloaded=offloaded)

    def _count_least(self, layout: Layout, train: TrainConfig | None) -> int:
        """Returns the bytes of weights and states on a process, without a trace."""
        workload = self.workload
        parameters = workload.teacher_parameters if train is None else workload.student_parameters
        states = 8 if train is not None and train.optimizer == "adamw" else 0  # others may have any size
        shards = layout.processes if layout.zero == 2 else layout.shards
        return round(parameters * (4 / shards + states / (layout.processes if layout.zero else layout.shards)))

    def _is_new(self, *shapes: object) -> bool:
        """Returns whether this is the first trace of its shapes."""
        is_new = shapes not in self._traced
        self._traced.add(shapes)
        return is_new

    def _query(self, layout: Layout, rows: int) -> ExtrapolatedTrace:
        micro_batches, size = count_micro_batches(rows) if layout.pp > 1 else (1, rows)

        def trace(layers: int) -> StepTrace:
            query = self.workload.describe_query(size, layers, layout.cp)
            if layout.pp > 1:
                return trace_stages(query, layout, micro_batches, self.hardware.memory)
            return trace_query(query, layout, is_new=self._is_new("query", layout, size))

        layers = self.workload.teacher.get_text_config().num_hidden_layers
        return trace_exactly(trace, layers) if layout.pp > 1 else extrapolate_depth(trace, layers, layout)

    def _step(self, layout: Layout, train: TrainConfig, rows: int, *, online: bool) -> ExtrapolatedTrace:
        def trace(layers: int) -> StepTrace:
            return self._trace_training(layout, train, rows, layers, online=online)

        layers, is_whole = self.workload.student.get_text_config().num_hidden_layers, self.workload.is_traced_whole
        return trace_exactly(trace, layers) if layout.pp > 1 or is_whole else extrapolate_depth(trace, layers, layout)

    def _trace_training(self, layout: Layout, train: TrainConfig, rows: int, layers: int, *, online: bool) -> StepTrace:
        """Returns what a step of the student with this number of layers takes."""
        micro_batches, size = count_micro_batches(rows) if layout.pp > 1 else (1, rows)
        traced = replace(train, optimizer="adamw") if train.optimizer in STATES else train
        training = self.workload.describe_training(size, layers, traced, online=online, segments=layout.cp)
        training = replace(training, backend=self.hardware.backend)
        if layout.pp > 1:
            step_trace = trace_stages(training, layout, micro_batches, self.hardware.memory)
        else:
            step_trace = trace_step(
                training, layout, is_new=self._is_new("step", layout, size, train.optimizer, online)
            )
        return scale_states(step_trace, STATES.get(train.optimizer, 1.0))


def scale_states(trace: StepTrace, factor: float) -> StepTrace:
    """Returns the trace with optimizer states of this many times the size."""
    states = trace.memory.get("optimizer", 0)
    smaller = round(factor * states)
    return replace(trace, memory={**trace.memory, "optimizer": smaller}, held_bytes=trace.held_bytes - states + smaller)


def offload_states(trace: StepTrace) -> StepTrace:
    """Returns the trace without the shards of weights, gradients and states, which FSDP keeps in the CPU's memory.

    What is gathered for a layer stays.
    """
    states = trace.memory.get("optimizer", 0)
    shards = trace.held_bytes - states
    smaller = {"optimizer": 0}
    smaller |= {name: max(0, trace.memory.get(name, 0) - shards) for name in ("weights", "gradients")}
    return replace(trace, memory={**trace.memory, **smaller}, held_bytes=0)
