"""Sentences of a report on a training: its range test, its spikes, the falls of its learning rate, its replicas."""

from collections.abc import Sequence

from pipelines.reports.schema import RangeTestEntry, SpikeEntry, TrainingEntry
from pipelines.runs.training_logs import RankTimes


def write_training_notes(training: TrainingEntry) -> list[str]:
    """Returns sentences about the range test, each spike, all reductions of the learning rate, and replicas."""
    test, falls = training["range_test"], training["falls"]
    notes = [_describe_range_test(test)] if test is not None else []
    notes += [_describe_spike(spike) for spike in training["spikes"]]
    if falls:
        listed = ", ".join(f"{_format_factor(fall['factor'])} in step {fall['step']:,}" for fall in falls)
        notes.append(f"The validation stopped improving: the learning rate was reduced to {listed} of its schedule.")
    ranks = training.get("ranks", ())
    return [*notes, _describe_ranks(ranks)] if ranks else notes


def _describe_range_test(test: RangeTestEntry) -> str:
    rates = test["rates"]
    return (
        f"Range test: learning rate {test['chosen']:.2g} of {min(rates):.2g} to {max(rates):.2g}, a tenth of the rate "
        f"with the lowest loss ({min(test['losses']):.3g})."
    )


def _describe_spike(spike: SpikeEntry) -> str:
    loss = "a loss that isn't finite" if spike["loss"] is None else f"loss {spike['loss']:.3g}"
    usual = "" if spike["usual"] is None else f", usual {spike['usual']:.3g}"
    return (
        f"Spike in step {spike['step']:,}: {loss}{usual}; back to the checkpoint before it, without batch "
        f"{spike['batch']:,}, at {_format_factor(spike['factor'])} of the learning rate."
    )


def _describe_ranks(ranks: Sequence[RankTimes]) -> str:
    idle = ", ".join(f"{each['idle_share']:.0%}" for each in ranks)
    speeds = [each["speed"] for each in ranks]
    uneven = max(speeds) > min(speeds)
    divided = f", with rows divided as {' : '.join(f'{speed:.2f}' for speed in speeds)}" if uneven else ""
    return f"Share of each step that the replicas waited for the slowest: {idle}{divided}."


def _format_factor(factor: float) -> str:
    return f"{factor * 100:.3g} %"
