"""A job for Ray: submitted to a cluster that runs, or with a cluster of its own by KubeRay."""

from typing import Any

import yaml

from pipelines.launchers.job import ClusterJob, EngineFiles, quote_words
from pipelines.launchers.pods import describe_metadata, describe_pod

RAY_VERSION = "2.60.0"


def write_ray(job: ClusterJob) -> EngineFiles:
    """Returns a script with the line that submits the job, and a RayJob if there is an image for its pods."""
    config = job.config
    entry = [*job.command, "--engine=ray", f"--devices={config.most * config.per_node}"]
    words = ["ray", "job", "submit", f"--submission-id={config.name}", "--working-dir=.", "--", *entry]
    files = {"submit.sh": f"#!/bin/sh\nexec {quote_words(words)}\n"}
    if not config.image:
        return EngineFiles(files, ("sh", "submit.sh"))
    files["rayjob.yaml"] = yaml.safe_dump(build_rayjob(job, quote_words(entry)), sort_keys=False, width=10**6)
    return EngineFiles(files, ("kubectl", "apply", "-f", "rayjob.yaml"))


def build_rayjob(job: ClusterJob, entry: str) -> dict[str, Any]:
    """Returns a RayJob with a head and a worker for each node; the head runs no training."""
    config = job.config
    worker, head = (_describe_ray_pod(job, name) for name in ("worker", "head"))
    head["containers"][0]["resources"] = {"requests": {"cpu": "1", "memory": "4G"}, "limits": {"memory": "4G"}}
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
                "workerGroupSpecs": [
                    {
                        "groupName": "nodes",
                        "replicas": config.most,
                        "minReplicas": config.fewest,
                        "maxReplicas": config.most,
                        "rayStartParams": {},
                        "template": {"spec": worker},
                    }
                ],
            },
        },
    }


def _describe_ray_pod(job: ClusterJob, name: str) -> dict[str, Any]:
    pod = describe_pod(job.config, name, [])
    del pod["restartPolicy"], pod["containers"][0]["command"]  # both are KubeRay's
    return pod
