"""Runs a command's processes as the workers of a Ray Train job, on the nodes of a Ray cluster.

The workers do what the processes of `pipelines.runs.launch` do: the same command with a rank. When one dies, Ray
starts all of them again, and they resume from the stages and checkpoints in the output folder, which all nodes share.
Ray's own checkpoints aren't used: it counts a checkpoint only some seconds after it was written.
"""

import importlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.runs.background import run_in_background
from pipelines.runs.cli import describe_error
from pipelines.runs.console import print_error
from pipelines.runs.files import write_json
from pipelines.runs.processes import is_first_process

FAILURE = "failure.json"  # the message of an error that the user can fix
OUTPUT = "output.txt"  # what the first worker prints
FOLLOW_SECONDS = 0.2
HEALTH_SECONDS = "1"  # between two looks of Ray at the workers


@dataclass(frozen=True)
class Workers:
    """The workers of a job.

    Args:
        count: Their number.
        restarts: How often all are started again after one died.
        threads: CPU threads of each, which Ray reserves; 0: one.
        timeout: Seconds that one waits for the others in a collective operation.
        accelerator: Device that they use: cpu, gpu (or cuda), or auto.
    """

    count: int
    restarts: int = 0
    threads: int = 0
    timeout: float = 1800.0
    accelerator: str = "auto"


def launch_on_ray(module: str, argv: Sequence[str], workers: Workers, output: Path) -> None:
    """Runs `python -m module argv` as workers, on the cluster of RAY_ADDRESS or else on one of this machine.

    Args:
        module: Name of the command's module, with a `main(argv)`.
        argv: Its arguments.
        workers: How many, and what each has.
        output: Folder that the command writes to.
    """
    # Read by Ray when it is imported. A cluster of this machine listens there alone, and needs no token in the home.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", HEALTH_SECONDS)
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    storage = name_storage(output)
    storage.mkdir(parents=True, exist_ok=True)
    failure = storage / FAILURE
    for file in (failure, storage / OUTPUT):
        file.unlink(missing_ok=True)
    if not ray.is_initialized():  # a notebook or a job of Ray may have joined its cluster already
        ray.init(
            address=address or None,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    try:
        wants_gpu = uses_gpus(workers.accelerator)
        trainer = TorchTrainer(
            run_worker,
            train_loop_config={
                "module": module, "argv": list(argv), "folder": str(Path.cwd()), "storage": str(storage),
                "path": [each for each in sys.path if each],
            },
            scaling_config=ScalingConfig(
                num_workers=workers.count, use_gpu=wants_gpu, resources_per_worker={"CPU": max(1, workers.threads)}
            ),
            torch_config=TorchConfig(
                backend="cpu:gloo,cuda:nccl" if wants_gpu else "gloo", timeout_s=max(1, round(workers.timeout))
            ),
            run_config=RunConfig(
                name="stillroom", storage_path=str(storage),
                failure_config=FailureConfig(max_failures=workers.restarts),
            ),
        )  # fmt: skip
        with print_file(storage / OUTPUT):
            trainer.fit()
        shutil.rmtree(storage, ignore_errors=True)
    except TrainingFailedError as error:
        exit_with_message(failure, error, workers.restarts)
    finally:
        ray.shutdown()


def name_storage(output: Path) -> Path:
    """Returns the folder for Ray's record of the job, beside the output: on a disk that all nodes share, as that is."""
    path = output.absolute()
    return path.with_name(f".{path.name}-ray")


@contextmanager
def print_file(file: Path) -> Iterator[None]:
    """Prints what is written to a file, line by line as it grows, until the end of the block."""

    def follow(is_over: threading.Event) -> None:
        position = 0
        while True:
            ends = is_over.is_set()  # before the last look
            if file.exists():
                with file.open(encoding="utf-8") as lines:
                    lines.seek(position)
                    while (line := lines.readline()).endswith("\n") or (ends and line):
                        print(line, end="", flush=True)
                        position = lines.tell()
            if ends:
                return
            time.sleep(FOLLOW_SECONDS)

    with run_in_background(follow, "ray output"):
        yield


def uses_gpus(accelerator: str) -> bool:
    """Returns whether each worker needs a GPU of the cluster."""
    import ray

    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def exit_with_message(failure: Path, error: Exception, restarts: int) -> None:
    """Ends this process with the message of the worker that failed.

    Raises:
        SystemExit: Always; with code 2 for an error that the user can fix, otherwise with 1.
    """
    if failure.exists():
        print_error(json.loads(failure.read_text())["message"])
        failure.unlink()
        sys.exit(2)
    print_error(
        f"the workers failed {restarts + 1} times, the last one with: {error}; run the same command again to resume "
        "from the checkpoint"
    )
    sys.exit(1)


def run_worker(config: dict[str, Any]) -> None:
    """Runs in a Ray worker, whose process group Ray has made: the command, as one of several processes."""
    os.chdir(config["folder"])
    sys.path[:] = list(dict.fromkeys([*config["path"], *sys.path]))
    os.environ["GROUP_RANK"] = os.environ["NODE_RANK"]  # by which Lightning knows processes that it didn't start
    storage = Path(config["storage"])
    with ExitStack() as stack:
        if is_first_process():  # Ray's own way to the terminal adds names of processes and messages of its own
            lines = stack.enter_context((storage / OUTPUT).open("a", buffering=1, encoding="utf-8"))
            stack.enter_context(redirect_stdout(lines))
        try:
            importlib.import_module(config["module"]).main(config["argv"])
        except Exception as error:
            message = describe_error(error)
            if message is not None:
                write_json(storage / FAILURE, {"message": message})
            raise
