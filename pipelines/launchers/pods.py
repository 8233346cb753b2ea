"""The pods of a job on Kubernetes, as its own Job, a JobSet and a TrainJob start them."""

from typing import Any

from pipelines.launchers.job import INVALID_INPUT, RETRY
from pipelines.settings.commands.launch import LaunchConfig

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GPU = "nvidia.com/gpu"
VOLUME, SHARED_MEMORY = "shared", "dev-shm"


def describe_resources(config: LaunchConfig) -> dict[str, Any]:
    """Returns requests and limits of a node's container."""
    amounts: dict[str, str] = {"cpu": str(config.cpus), "memory": f"{config.memory_bytes // 10**6}M"}
    amounts |= {GPU: str(config.gpus)} if config.gpus else {}
    return {"requests": amounts, "limits": amounts}


def list_mounts(config: LaunchConfig) -> list[dict[str, str]]:
    """Returns where the shared volume and the memory of collectives are mounted."""
    shared = [{"name": VOLUME, "mountPath": config.mount}] if config.volume else []
    return [*shared, {"name": SHARED_MEMORY, "mountPath": "/dev/shm"}]  # noqa: S108 - where NCCL and gloo look


def list_volumes(config: LaunchConfig) -> list[dict[str, Any]]:
    """Returns the volumes of a pod."""
    claim = {"name": VOLUME, "persistentVolumeClaim": {"claimName": config.volume}}
    return [*([claim] if config.volume else []), {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]


def describe_pod(config: LaunchConfig, container: str, command: list[str], **more: Any) -> dict[str, Any]:
    """Returns the specification of a node's pod with one container."""
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": config.grace,
        "containers": [
            {
                "name": container,
                "image": config.image,
                "command": command,
                "resources": describe_resources(config),
                "volumeMounts": list_mounts(config),
            }
        ],
        "volumes": list_volumes(config),
        **more,
    }


def describe_failures(container: str) -> dict[str, Any]:
    """Returns the policy for pods that fail: evicted ones don't count, and invalid input ends the job."""
    codes = {"containerName": container, "operator": "In"}
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": {**codes, "values": [INVALID_INPUT]}},
            {"action": "Ignore", "onExitCodes": {**codes, "values": [RETRY]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    }


def describe_metadata(config: LaunchConfig) -> dict[str, Any]:
    """Returns name, namespace and the queue's label."""
    metadata: dict[str, Any] = {"name": config.name}
    metadata |= {"namespace": config.namespace} if config.namespace else {}
    return metadata | ({"labels": {QUEUE_LABEL: config.queue}} if config.queue else {})
