"""A job for Ray: submitted to a cluster that runs, or with a cluster of its own by KubeRay."""

from typing import Any

import yaml

from distill.errors import InputError
from pipelines.launchers.job import ClusterJob, LauncherFiles, quote_words
from pipelines.launchers.pods import describe_metadata, describe_pod
from pipelines.settings.commands.launch import LaunchConfig

RAY_VERSION = "2.60.0"


def write_ray(job: ClusterJob) -> LauncherFiles:
    """Returns a script with the line that submits the job, and a RayJob if there is an image for its pods.

    Raises:
        InputError: The number of nodes may change; Ray Train starts a fixed number of workers.
    """
    config = job.config
    if config.min_nodes != config.max_nodes:
        raise InputError(
            f"nodes: expected one number with launcher ray, found {config.nodes}: Ray Train's workers have a "
            "fixed number"
        )
    workers = config.max_nodes * config.per_node
    entry = ["python", "-m", job.module, *job.arguments, "--launcher=ray", f"--devices={workers}"]
    if job.module != "pipelines.cache":
        entry.append(f"--machine.restarts={config.restarts}")
    command = ["ray", "job", "submit", f"--submission-id={config.name}", "--working-dir=.", "--", *entry]
    files = {"submit.sh": f"#!/bin/sh\nexec {quote_words(command)}\n"}
    if not config.image:
        return LauncherFiles(files, ("sh", "submit.sh"))
    files["rayjob.yaml"] = yaml.safe_dump(build_rayjob(job, quote_words(entry)), sort_keys=False, width=10**6)
    return LauncherFiles(files, ("kubectl", "apply", "-f", "rayjob.yaml"))


def build_rayjob(job: ClusterJob, entry: str) -> dict[str, Any]:
    """Returns a RayJob with a head, which runs no training, and a worker for each node.

    Source: the types of ray.io/v1 in KubeRay (Apache-2.0).
    """
    config = job.config
    worker, head = (describe_ray_pod(config, name) for name in ("worker", "head"))
    head["containers"][0]["resources"] = {"requests": {"cpu": "1", "memory": "4G"}, "limits": {"memory": "4G"}}
    group = {
        "groupName": "nodes",
        "replicas": config.max_nodes,
        "minReplicas": config.max_nodes,
        "maxReplicas": config.max_nodes,
        "rayStartParams": {},
        "template": {"spec": worker},
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": describe_metadata(config),
        "spec": {
            "entrypoint": entry,
            "backoffLimit": config.restarts,
            "activeDeadlineSeconds": round(3600 * config.hours),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": head}},
                "workerGroupSpecs": [group],
            },
        },
    }


def describe_ray_pod(config: LaunchConfig, name: str) -> dict[str, Any]:
    """Returns the specification of a pod, whose command and restarts are KubeRay's."""
    pod = describe_pod(config, name, [])
    return {key: value for key, value in pod.items() if key != "restartPolicy"} | {
        "containers": [{key: value for key, value in pod["containers"][0].items() if key != "command"}]
    }
