"""Intermediate shapes of iterative pruning, determined by predicted costs alone."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from compress.prune.schedule import interpolate_cubic
from compress.prune.search.candidates import Candidate, SearchSpace, get_sizes, list_candidates
from distill.checkpoint.custom_models import load_model_folder
from distill.slicing import Shape
from pipelines.runs.files import write_json
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import SpeedTarget, round_name
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prune.shape_inputs import LoadedInputs, ShapeInputs
from pipelines.stages.prune.shape_timing import build_space, ffn_settings, list_allowed_ms
from pipelines.stages.prune.start import find_prunable_axes
from pipelines.stages.train.student_start import SHAPE

VERSION = 6  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def round_stage(run: Run, config: DistillConfig, inputs: ShapeInputs, target: SpeedTarget, number: int) -> Artefact:
    """Writes `shape.json`: the units that are kept after round `number`.

    The latency budget of the round follows the cubic schedule from the start model's predicted cost to the target. No
    candidate is trained or measured: the fitting candidate with the least estimated loss is used. If all fitting
    candidates would leave a layer with a single unit of every kind, nothing is pruned in this round.
    """
    rounds = config.prune.rounds
    settings = {"target": asdict(target), "round": number, "rounds": rounds, "uniform": config.budget.uniform}
    settings |= ffn_settings(config)

    def work(folder: Path) -> JsonObject:
        loaded = LoadedInputs(run, config, inputs)
        space = build_space(loaded, target)
        whole = get_sizes(find_prunable_axes(load_model_folder(inputs.tokens.folder / MODEL), loaded.task))
        begin, end = space.predict(whole), list_allowed_ms(loaded, target)[0]
        milliseconds = interpolate_cubic(number, 0, rounds, begin, end)
        chosen = choose_candidate(space, list_candidates(space, milliseconds))
        shape = Shape(tuple(space.layers)) if chosen is None else chosen.shape
        sizes = get_sizes(space.axes) if chosen is None else chosen.sizes
        predicted_ms = space.predict(sizes)
        metrics = {"milliseconds": milliseconds, "predicted_ms": predicted_ms, "sizes": asdict(sizes)}
        write_json(folder / SHAPE, {"shape": shape.to_dict()} | metrics)
        run.console.say(
            f"  shape-{round_name(target, number)}: {milliseconds:.3f} of {begin:.3f} ms left, "
            f"{'nothing to prune' if chosen is None else chosen.label}"
        )
        return metrics

    return run.stage(f"shape-{round_name(target, number)}", settings, inputs.by_name(), work, version=VERSION)


def choose_candidate(space: SearchSpace, candidates: Sequence[Candidate]) -> Candidate | None:
    """Returns the candidate with the least estimated loss; None if there is no usable candidate."""
    # A layer with one unit of every kind has no axis left, so later rounds couldn't predict its cost.
    usable = [each for each in candidates if all(max(pair) > 1 for pair in zip(*each.unit_counts, strict=True))]
    return min(usable, key=lambda each: each.loss, default=None)
