"""The shape of a student that was evaluated as too slow: fewer units, or else other layers or another width."""

import json
from dataclasses import asdict
from pathlib import Path

from compress.prune.search.candidates import allocate_layers
from compress.prune.search.cost import ModelSizes
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import SpeedTarget
from pipelines.stages.prune.shape import MEASURED, ShapeSearch, describe_search, read_correction, write_shape
from pipelines.stages.prune.shape_inputs import LoadedInputs, ShapeInputs
from pipelines.stages.prune.shape_timing import AIM, TooLargeError
from pipelines.stages.train.student_start import SHAPE

VERSION = 8  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def faster_shape_stage(
    run: Run, config: DistillConfig, inputs: ShapeInputs, target: SpeedTarget, previous: Artefact, precision: str
) -> Artefact:
    """Writes `shape.json` of a faster shape than a `previous` one; the target's correction says how much faster.

    It has the same layers and width but fewer units, and no candidate is trained: the one that learned best at nearly
    the same speed is taken again. If no such shape is fast enough, the search is repeated for the corrected target. If
    that finds none either, or files that are too large, the shape stays as it is, and the metric `faster` is false.
    """

    def work(folder: Path) -> JsonObject:
        search = ShapeSearch(LoadedInputs(run, config, inputs), target.corrected, folder, precision)
        stored = json.loads((previous.folder / SHAPE).read_text())
        factor = target.correction / read_correction(previous)
        try:
            faster = shrink_shape(search, stored, factor) or find_other_shape(search)
        except TooLargeError as error:
            run.console.say(f"  shape-{target.name}: {error}")
            faster = None
        return write_shape(folder, faster or stored) | {"faster": faster is not None}

    stages = inputs.by_name() | {"previous": previous}
    settings = describe_search(config, target, precision)
    return run.stage(f"shape-{target.name}", settings, stages, work, version=VERSION)


def find_other_shape(search: ShapeSearch) -> JsonObject | None:
    """Returns `shape.json`'s contents for the shape that a search finds, None if none is fast enough."""
    choice, trials = search.find_shape()
    return None if choice.is_exhausted else search.describe_choice(choice, trials)


def shrink_shape(search: ShapeSearch, stored: JsonObject, factor: float) -> JsonObject | None:
    """Returns `shape.json`'s contents for a shape that is `factor` times as fast as a stored one, measured once.

    Shapes as similar as these deviate from the predictions by the same factor. Returns None if no faster shape has
    the layers and the width of the stored one.
    """
    sizes = ModelSizes.from_dict(stored["sizes"])
    milliseconds = search.space.predict(sizes) / factor / AIM
    candidate = allocate_layers(search.space, sizes.hidden, stored["shape"]["layers"], milliseconds)
    if candidate is None:
        return None
    candidate, model = search.timer.fit_bytes(candidate)
    measured = search.timer.measure(candidate, model)
    measured["pooled_speedup"] = measured["speedup"]
    search.timer.check_bytes(measured)
    search.timer.report_measurement(candidate, measured)
    return stored | {
        "shape": candidate.shape.to_dict(),
        "sizes": asdict(candidate.sizes),
        "label": candidate.label,
        "measurements": [*stored["measurements"], measured],
        **{name: measured[name] for name in MEASURED},
    }
