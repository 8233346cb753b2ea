"""A task for SkyPilot, which finds machines in clouds and clusters and brings them back after a loss."""

import yaml

from pipelines.launchers.job import RETRY, ClusterJob, LauncherFiles, quote_words


def write_skypilot(job: ClusterJob) -> LauncherFiles:
    """Returns the task as YAML. Managed jobs start again when a machine is lost, and after the code for a stop."""
    config = job.config
    resources: dict[str, object] = {
        "cpus": f"{config.cpus}+",
        "memory": f"{config.memory_bytes / 2**30:.0f}+",
        "job_recovery": {"max_restarts_on_errors": config.restarts, "recover_on_exit_codes": [RETRY]},
    }
    resources |= {"accelerators": f"{config.accelerator}:{config.gpus}"} if config.gpus else {}
    resources |= {"use_spot": True} if config.spot else {}
    command = job.node_command("$SKYPILOT_NODE_RANK", '$(echo "$SKYPILOT_NODE_IPS" | head -n1)')
    task: dict[str, object] = {
        "name": config.name,
        "num_nodes": config.max_nodes,
        "resources": resources,
        "workdir": ".",
    }
    task |= {"file_mounts": {config.mount: {"source": config.volume, "mode": "MOUNT"}}} if config.volume else {}
    task |= {"setup": "pip install -c constraints.txt .", "run": f"exec {quote_words(command)}\n"}
    text = yaml.safe_dump(task, sort_keys=False, width=10**6)
    return LauncherFiles({"task.yaml": text}, ("sky", "jobs", "launch", "--yes", "task.yaml"))
