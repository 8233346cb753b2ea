"""The layout of `report.json`: one dict of plain JSON values."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from pipelines.runs.manifest import JsonObject
from pipelines.runs.training_logs import RankTimes

EVALUATION = "evaluation.json"  # file of the models' entries, which the report reads


class LatencyEntry(TypedDict):
    """Milliseconds per call, see `compress.measure.latency.Latency`."""

    batch: int
    length: int
    threads: int
    repeats: int
    median_ms: float
    p10_ms: float
    p90_ms: float
    best_ms: float


class EstimateEntry(TypedDict):
    """A measured value and its 95 % confidence interval; `high` is None if it is unbounded."""

    value: float
    low: float
    high: float | None


class SpeedupEntry(TypedDict):
    """The teacher's fp32 latency divided by the model's, on PyTorch and on the model's own runtime.

    `same_runtime` has the latter's interval; None for the teacher itself.
    """

    vs_teacher_pytorch: float
    vs_teacher_same_runtime: float | None
    same_runtime: NotRequired[EstimateEntry | None]


class ParityEntry(TypedDict):
    """How an exported file, reloaded in a fresh process, differs from the model that it was made from.

    `layers` is the largest relative difference of a product, for models trained with quantized layers; these also have
    their scores, loading time and peak memory.
    """

    rows: int
    max_difference: float
    mean_difference: float
    agreement: float | None
    weight_bits: NotRequired[int]
    layers: NotRequired[float]
    load_ms: NotRequired[float]
    peak_bytes: NotRequired[float]
    score: NotRequired[float]
    trained_score: NotRequired[float]


class TargetEntry(TypedDict):
    """The requested speed; speedup and latency_ms are 0 if unused, and so is the throughput, in texts per second.

    With a throughput, latency_ms is that of a call.
    """

    name: str
    speedup: float
    latency_ms: float
    texts_per_second: NotRequired[float]


class SpeedMeasurement(TypedDict):
    """A student's speed under the conditions of its budget, on texts of `length` tokens; 0: of their own lengths.

    `share` is the speed relative to the requested one, `control` the latency of the teacher divided by that of a second
    copy of its file. `settled`: the interval of the share is as narrow as requested. `other_load` is the share of the
    machine's processors that other processes used meanwhile; None where the system doesn't say.
    """

    length: int
    teacher: LatencyEntry
    student: LatencyEntry
    speedup: EstimateEntry
    milliseconds: EstimateEntry
    share: EstimateEntry
    control: EstimateEntry
    texts: int
    rounds: int
    settled: bool
    other_load: float | None


class TargetSpeed(SpeedMeasurement):
    """The speed of a student with a requested one, at the length of texts at which it is slowest for it.

    `retries` is how often it was pruned again because it was too slow, `reason` why not again (empty if it isn't).
    """

    target: TargetEntry
    lengths: NotRequired[Sequence[SpeedMeasurement]]
    retries: int
    reason: str


class ModelEntry(TypedDict):
    """A model on a runtime in a precision."""

    name: str
    stage: str
    path: str
    runtime: str
    precision: str
    score: float
    scores: NotRequired[dict[str, float]]
    validation: NotRequired[float]
    params: int
    bytes: int
    code: NotRequired[str]
    latency: LatencyEntry
    latency_batched: LatencyEntry | None
    speedup: SpeedupEntry | None
    speedup_batched: SpeedupEntry | None
    target: NotRequired[TargetSpeed]
    agreement_with_teacher: float | None
    parity: ParityEntry | None


class BaselineEntry(TypedDict):
    """The scores of a constant answer."""

    name: str
    answer: str
    scores: dict[str, float | None]


class StageEntry(TypedDict):
    """What a stage took."""

    name: str
    folder: str
    skipped: bool
    wall_seconds: float
    peak_memory_bytes: int
    resumed: bool
    metrics: JsonObject


class RangeTestEntry(TypedDict):
    """The losses of a range test, step by step, and the learning rate that was chosen after it."""

    rates: Sequence[float]
    losses: Sequence[float]
    chosen: float


class SpikeEntry(TypedDict):
    """A loss that a training went back from, and the factor on its learning rate from there on.

    `loss` is None if it wasn't finite, `usual` if there was no median.
    """

    step: int
    batch: int
    loss: float | None
    usual: float | None
    factor: float


class RateFallEntry(TypedDict):
    """A fall of the learning rate on a plateau: the factor on the peak rate after it."""

    step: int
    factor: float


class TrainingEntry(TypedDict):
    """What happened in a stage's training, beside its curves."""

    range_test: RangeTestEntry | None
    spikes: Sequence[SpikeEntry]
    falls: Sequence[RateFallEntry]
    ranks: NotRequired[Sequence[RankTimes]]  # since several replicas are measured


class RejectedExport(TypedDict):
    """An exported file that failed its verification."""

    stage: str
    target: str
    where: str
    reason: str


class SizesEntry(TypedDict):
    """Width, and heads and feed-forward neurons of each layer; the width is None if it wasn't traced."""

    hidden: int | None
    heads: Sequence[int]
    ffn: Sequence[int]


class TimingConditions(TypedDict):
    """The conditions under which a budget's speed is measured; `length` is 0 for the texts' own lengths.

    With several lengths, it is a list.
    """

    runtime: str
    precision: str
    batch: int
    length: int | Sequence[int]
    threads: int


class ShapeTiming(TypedDict):
    """A measurement of a shape next to the teacher; `pooled_speedup` takes all measurements so far into account.

    `length` is that of the texts on which it is slowest for its target; 0: their own lengths.
    """

    label: str
    length: NotRequired[int]
    teacher_ms: float
    best_ms: float
    bytes: int
    speedup: float
    pooled_speedup: float


class ShapeTrial(TypedDict):
    """A shape that was trained for a short time, and its divergence from the teacher after each round."""

    label: str
    divergences: Sequence[float]


class QuantizedScores(TypedDict):
    """A student's validation scores after calibration and after quantization-aware training."""

    precision: str
    calibrated: float
    score: float


class PrunedStudent(TypedDict):
    """A student that was pruned to a speed."""

    name: str
    target: TargetEntry
    sizes: SizesEntry
    predicted_ms: float
    predicted_speedup: float
    measurements: Sequence[ShapeTiming]
    trials: Sequence[ShapeTrial]
    teacher_score: float | None
    score: float
    quantized: NotRequired[QuantizedScores | None]
    params: int


class PrunedTeacher(TypedDict):
    """The size of the teacher's vocabulary."""

    tokens: int


class PruningStart(TypedDict):
    """The model that is pruned: the teacher or a student, after its vocabulary was pruned."""

    tokens: int
    params: int
    student: str
    sizes: SizesEntry


class PruningSummary(TypedDict):
    """What each stage of a pruning run did to every student."""

    conditions: TimingConditions
    teacher: PrunedTeacher
    start: PruningStart
    students: Sequence[PrunedStudent]


class Results(TypedDict):
    """The scores, sizes and speeds of all models."""

    metric: str
    baseline: NotRequired[BaselineEntry]
    models: Sequence[ModelEntry]


class Report(Results):
    """All that is known of a run."""

    task: str
    seed: int
    license: str | None
    data: JsonObject
    stages: Sequence[StageEntry]
    config: JsonObject
    machine: JsonObject
    versions: dict[str, str]
    commit: str | None
    created: str
    pruning: NotRequired[PruningSummary]
    rejected: NotRequired[Sequence[RejectedExport]]
    trainings: NotRequired[dict[str, TrainingEntry]]
