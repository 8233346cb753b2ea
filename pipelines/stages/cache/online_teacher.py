"""Teachers that compute signals while the student trains, on the student's processes or on separate ones."""

import json
from collections.abc import Mapping
from pathlib import Path

import transformers
from torch import Tensor

from distill.checkpoint.custom_models import choose_auto_class
from distill.losses.config import LossConfig, match_layers
from distill.losses.teacher_signals import SignalSource, TeacherSignals
from distill.parallel.layout import Layout
from distill.parallel.mesh import build_mesh
from distill.parallel.pipeline import PipelineForward
from distill.teacher.online import OnlineTeacher
from distill.teacher.remote import Bridge, RemoteTeacher, serve_students
from distill.teacher.shard import ShardedTeacher
from pipelines.runs import stops
from pipelines.runs.placement import detect_device_type, load_in_layout
from pipelines.runs.processes import World
from pipelines.runs.strategies.by_layout import choose_device
from pipelines.settings.plan import RunPlan
from pipelines.stages.cache.writing import load_teacher

TEACHER = "teacher"  # store key under which the students publish the path of its weights


def load_online_teacher(
    source: Path,
    loss: LossConfig,
    layout: Layout,
    *,
    accelerator: str = "auto",
    precision: str = "32",
    offload: bool = False,
    prefetch: int = 1,
) -> SignalSource:
    """Loads the teacher in its layout, to be queried by every process in every step.

    Args:
        source: Its checkpoint.
        loss: The terms, which determine what it computes.
        layout: Layout on the processes that call this.
        accelerator: Kind of device, see `choose_device`.
        precision: Precision of the training that queries it, see `find_gather_policy`.
        offload, prefetch: See `apply_layout`.
    """
    device = choose_device(accelerator)
    if not layout.sharded and layout.cp == 1:
        model = load_teacher(source)
        return OnlineTeacher(model.to(device), loss.teacher_outputs, device=device)  # type: ignore[arg-type]
    mesh = build_mesh(layout, detect_device_type())
    auto = getattr(transformers, choose_auto_class(json.loads((source / "config.json").read_text())))
    model = load_in_layout(
        source, auto, layout, mesh, frozen=True, precision=precision, offload=offload, prefetch=prefetch
    )
    if not layout.sharded:
        return OnlineTeacher(model, loss.teacher_outputs, device=device)
    if layout.pp > 1:
        layers = range(model.config.num_hidden_layers + 1) if loss.computes("hidden") else ()
        return ShardedTeacher(PipelineForward(model, mesh.get_group("pp"), hidden=layers), mesh)
    return ShardedTeacher(OnlineTeacher(model, loss.teacher_outputs, device=device), mesh)


def load_configured_teacher(plan: RunPlan, source: Path, precision: str = "32") -> SignalSource:
    """Calls `load_online_teacher` with the settings of a run.

    On processes of its own a teacher computes in float32, on those of the student in the precision of its training.
    """
    config, layout = plan.settings, plan.layouts.teacher
    return load_online_teacher(
        source,
        config.loss,
        layout,
        accelerator=config.machine.accelerator,
        precision=precision,
        offload=config.teacher.offload,
        prefetch=config.machine.prefetch,
    )


def call_teacher(world: World, source: Path) -> RemoteTeacher:
    """Publishes the path of the teacher's weights to the teacher's processes and returns their remote interface."""
    if world.is_rank_zero:
        world.everyone.shared_store.set(TEACHER, str(source))
    return _find_bridge(world).connect_teacher()


def _find_bridge(world: World) -> Bridge:
    if world.bridge is None:
        raise ValueError("teacher: expected processes of its own, found none: set teacher.processes")
    return world.bridge


def dismiss_teacher(world: World) -> None:
    """Releases the teacher's processes if they were never called."""
    if world.bridge is not None and world.is_rank_zero and not world.everyone.shared_store.check([TEACHER]):
        world.everyone.shared_store.set(TEACHER, "")


def serve_teacher(world: World, plan: RunPlan) -> None:
    """Runs a process of a separate teacher: waits for the call, then serves requests until the students have finished.

    Replies contain only the layers that the loss uses.
    """
    source = world.everyone.wait_for(TEACHER)
    if not source:
        return
    world.everyone.record_position("answering as the teacher")
    teacher = load_configured_teacher(plan, Path(source))
    wanted = match_layers(plan.settings.loss, plan.student_sizes, plan.teacher_sizes)

    def answer(batch: Mapping[str, Tensor]) -> TeacherSignals:
        signals = teacher(batch).copy()
        if wanted.hidden_layers:
            signals["hidden"] = {layer: signals["hidden"][layer] for layer in wanted.hidden_layers}
        if wanted.attention_layers:
            signals["relations"] = {layer: signals["relations"][layer] for layer in wanted.attention_layers}
        return signals

    stops.defer_stop(world.everyone.request_stop)  # keep serving until the students have saved their checkpoint
    serve_students(_find_bridge(world), answer)
    stops.allow_stop()
    stops.raise_if_requested()
    if isinstance(teacher, ShardedTeacher):
        teacher.finish()
