"""Intermediate shapes of iterative pruning, determined by predicted costs alone."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compress.prune.schedule import cubic
from compress.prune.search.candidates import Candidate, Space, candidates, outline_of
from distill.checkpoint.pruned import load_pruned
from distill.slicing import Shape
from pipelines.runs.files import write_json
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.plan import Target, round_name
from pipelines.stages.distill import SHAPE
from pipelines.stages.prune_inputs import axes_of
from pipelines.stages.shape import Inputs, Search
from pipelines.stages.teacher import MODEL

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def round_stage(run: Run, config: DistillConfig, given: Inputs, target: Target, number: int) -> Artefact:
    """Writes `shape.json`: the units that are kept after round `number`.

    The latency budget of the round follows the cubic schedule from the start model's predicted cost to the target. No
    candidate is trained or measured: the fitting candidate with the least estimated loss is used. If all fitting
    candidates would leave a layer with a single unit of every kind, nothing is pruned in this round.
    """
    rounds = config.prune.rounds
    settings = {"target": asdict(target), "round": number, "rounds": rounds, "uniform": config.budget.uniform}

    def work(folder: Path) -> dict[str, Any]:
        search = Search(run, config, given, target, folder)
        space, whole = search.space, outline_of(axes_of(load_pruned(given.words.folder / MODEL), search.task))
        begin, end = space.costs.predict(whole), target.milliseconds(search.teacher_ms)
        milliseconds = cubic(number, 0, rounds, begin, end)
        chosen = least_lost(space, candidates(space, milliseconds))
        shape = Shape(tuple(space.layers)) if chosen is None else chosen.shape
        outline = outline_of(space.axes) if chosen is None else chosen.outline
        said = {"milliseconds": milliseconds, "predicted_ms": space.costs.predict(outline), "outline": asdict(outline)}
        write_json(folder / SHAPE, {"shape": shape.to_dict()} | said)
        run.console.say(
            f"  shape-{round_name(target, number)}: {milliseconds:.3f} of {begin:.3f} ms left, "
            f"{'nothing to cut' if chosen is None else chosen.label}"
        )
        return said

    return run.stage(f"shape-{round_name(target, number)}", settings, given.named(), work, version=VERSION)


def least_lost(space: Space, found: Sequence[Candidate]) -> Candidate | None:
    """Returns the candidate with the least estimated loss; None if there is no usable candidate."""
    # A layer with one unit of every kind has no axis left, so later rounds couldn't predict its cost.
    usable = [each for each in found if all(max(pair) > 1 for pair in zip(*each.sizes, strict=True))]
    return min(usable, key=lambda each: each.loss, default=None)
