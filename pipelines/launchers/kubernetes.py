"""Manifests for Kubernetes: an indexed Job with a headless service, a JobSet, or a TrainJob of Kubeflow's Trainer.

Sources of the fields: the API reference of batch/v1 Jobs; JobSet v1alpha2; Kubeflow Trainer v1alpha1.
"""

from typing import Any

import yaml

from pipelines.launchers.job import ClusterJob, LauncherFiles, quote_words
from pipelines.launchers.pods import (
    describe_failures,
    describe_metadata,
    describe_pod,
    describe_resources,
    list_mounts,
    list_volumes,
)

CONTAINER = "node"  # also the name that Kubeflow's runtimes expect


def write_kubernetes(job: ClusterJob) -> LauncherFiles:
    """Returns a file with the objects of the chosen form, separated as YAML documents."""
    objects = {"job": build_job, "jobset": build_jobset, "trainjob": build_trainjob}[job.config.form](job)
    name = f"{job.config.form}.yaml"
    note = "no volume is mounted: outputs are lost when the pods end; name a claim as --volume, or a URL as --output"
    notes = [] if job.config.volume or job.is_kept_at_url else [note]
    text = yaml.safe_dump_all(objects, sort_keys=False, width=120)
    return LauncherFiles({name: text}, ("kubectl", "apply", "-f", name), tuple(notes))


def build_job(job: ClusterJob) -> list[dict[str, Any]]:
    """Returns a headless service, by which pods find the first one, and an indexed Job."""
    config, metadata = job.config, describe_metadata(job.config)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {key: value for key, value in metadata.items() if key != "labels"},
        "spec": {
            "clusterIP": "None",
            "selector": {"job-name": config.name},
            "publishNotReadyAddresses": True,  # pods meet before they are ready
            "ports": [{"name": "meeting", "port": config.port}],
        },
    }
    spec = describe_job(job, f"{config.name}-0.{config.name}", subdomain=config.name)
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]


def describe_job(job: ClusterJob, address: str, **pod: Any) -> dict[str, Any]:
    """Returns the specification of an indexed Job with a pod for each node; `pod` are more of its fields."""
    config = job.config
    command = ["sh", "-c", f"exec {quote_words(job.node_command('$JOB_COMPLETION_INDEX', address))}"]
    return {
        "completions": config.max_nodes,
        "parallelism": config.max_nodes,
        "completionMode": "Indexed",
        "backoffLimit": config.restarts * config.max_nodes,
        "activeDeadlineSeconds": round(3600 * config.hours),
        "podFailurePolicy": describe_failures(CONTAINER),
        "template": {"spec": describe_pod(config, CONTAINER, command, **pod)},
    }


def build_jobset(job: ClusterJob) -> list[dict[str, Any]]:
    """Returns a JobSet, which makes the service itself and restarts all pods together."""
    config = job.config
    spec = describe_job(job, f"{config.name}-{CONTAINER}-0-0.{config.name}")  # JobSet sets the subdomain
    replicated = {"name": CONTAINER, "replicas": 1, "template": {"spec": spec}}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": describe_metadata(config),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": config.name, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": config.restarts},
                "replicatedJobs": [replicated],
            },
        }
    ]


def build_trainjob(job: ClusterJob) -> list[dict[str, Any]]:
    """Returns a TrainJob on the runtime `torch-distributed`, which passes torchrun's options in PET_ variables."""
    config = job.config
    patch = {"volumes": list_volumes(config), "containers": [{"name": CONTAINER, "volumeMounts": list_mounts(config)}]}
    replicated = {"name": CONTAINER, "template": {"spec": {"template": {"spec": patch}}}}
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": describe_metadata(config),
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "activeDeadlineSeconds": round(3600 * config.hours),
                "trainer": {
                    "image": config.image,
                    "command": ["torchrun", f"--max-restarts={config.restarts}", "-m", job.module, *job.arguments],
                    "numNodes": config.max_nodes,
                    "numProcPerNode": config.per_node,
                    "resourcesPerNode": describe_resources(config),
                },
                "runtimePatches": [
                    {
                        "manager": "stillroom.io/launch",
                        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                    }
                ],
            },
        }
    ]
