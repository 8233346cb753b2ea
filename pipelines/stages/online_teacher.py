"""Teachers that compute signals while the student trains, on the student's processes or on separate ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from compress.prune.slicing.checkpoint import auto_class_of
from distill.checkpoint.folder import checkpoint_folder
from distill.losses.config import LayerPairs, LossConfig, match_layers
from distill.parallel.layout import Layout
from distill.parallel.mesh import mesh_of
from distill.parallel.pipeline import PipelineForward
from distill.student.build import student_config
from distill.student.spec import is_relative
from distill.teacher.online import OnlineTeacher
from distill.teacher.remote import RemoteTeacher, serve
from distill.teacher.shard import Ask, SharedTeacher
from distill.train.module import sizes_of
from pipelines.runs import stops
from pipelines.runs.placement import device_type, laid_out
from pipelines.runs.processes import World
from pipelines.runs.strategies import device_of
from pipelines.settings.distill_config import DistillConfig
from pipelines.stages.cache_writing import load_teacher

TEACHER = "teacher"  # store key under which the students publish the path of its weights


def load_online_teacher(
    source: Path, loss: LossConfig, layout: Layout, *, offload: bool = False, prefetch: int = 1
) -> Ask:
    """Loads the teacher in its layout, to be queried by every process in every step."""
    device = device_of("auto")
    if not layout.sharded:
        model = load_teacher(source)
        return OnlineTeacher(model.to(device), loss.teacher_answers, device=device)  # type: ignore[arg-type]
    mesh = mesh_of(layout, device_type())
    auto = getattr(transformers, auto_class_of(json.loads((source / "config.json").read_text())))
    model = laid_out(source, auto, layout, mesh, frozen=True, offload=offload, prefetch=prefetch)
    if layout.pp > 1:
        layers = range(model.config.num_hidden_layers + 1) if loss.hidden else ()
        return SharedTeacher(PipelineForward(model, mesh.get_group("pp"), hidden=layers), mesh)
    return SharedTeacher(OnlineTeacher(model, loss.teacher_answers, device=device), mesh)


def load_configured_teacher(config: DistillConfig, source: Path, layout: Layout) -> Ask:
    """Calls `load_online_teacher` with the settings of a run."""
    return load_online_teacher(
        source, config.loss, layout, offload=config.teacher.offload, prefetch=config.machine.prefetch
    )


def call_teacher(world: World, source: Path) -> RemoteTeacher:
    """Publishes the path of the teacher's weights to the teacher's processes and returns their remote interface."""
    if world.is_rank_zero:
        world.everyone.store.set(TEACHER, str(source))
    return world.bridge.teacher()


def dismiss_teacher(world: World) -> None:
    """Releases the teacher's processes if they were never called."""
    if world.bridge is not None and world.is_rank_zero and not world.everyone.store.check([TEACHER]):
        world.everyone.store.set(TEACHER, "")


def serve_teacher(world: World, config: DistillConfig, layout: Layout) -> None:
    """Runs a process of a separate teacher: waits for the call, then serves requests until the students have finished.

    Replies contain only the layers that the loss uses.
    """
    source = world.everyone.get(TEACHER)
    if not source:
        return
    world.everyone.note("answering as the teacher")
    teacher, wanted = load_configured_teacher(config, Path(source), layout), lessons_of(config, Path(source))

    def answer(batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        found = dict(teacher(batch))
        for name, layers in (("hidden", wanted.hidden_layers), ("relations", wanted.vector_layers)):
            if layers:
                found[name] = {layer: found[name][layer] for layer in layers}
        return found

    stops.hold(world.everyone.ask_to_stop)  # keep serving until the students have saved their checkpoint
    serve(world.bridge, answer)
    stops.release()
    stops.check()
    if isinstance(teacher, SharedTeacher):
        teacher.finish()


def lessons_of(config: DistillConfig, source: Path) -> LayerPairs:
    """Returns the layers of the teacher that the loss terms use."""
    own = sizes_of(config_of_student(config, source))
    return match_layers(config.loss, own, sizes_of(AutoConfig.from_pretrained(source)))


def config_of_student(config: DistillConfig, source: Path) -> PretrainedConfig:
    """Returns the configuration of the student that will be built or loaded."""
    if is_relative(config.student.spec):
        return student_config(AutoConfig.from_pretrained(source), config.student.spec)
    return AutoConfig.from_pretrained(checkpoint_folder(config.student.spec, "student"))
