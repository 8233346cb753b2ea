"""Applications for Marathon on Apache Mesos, one for each node.

Mesos was retired to the Apache Attic in 2025: this is for clusters that still run. Marathon starts an application again
whenever it ends, so each one sleeps after the command's end until it is deleted.
"""

import json

from pipelines.launchers.job import INVALID_INPUT, ClusterJob, LauncherFiles, quote_words

AFTER = f"code=$?; case $code in 0|{INVALID_INPUT}) echo ended with $code; sleep infinity; esac; exit $code"


def write_marathon(job: ClusterJob) -> LauncherFiles:
    """Returns a list of applications for `PUT /v2/apps`; nodes meet at the first one's name in Mesos-DNS."""
    config = job.config
    address = config.address or f"{config.name}-0.marathon.mesos"
    apps = []
    for rank in range(config.max_nodes):
        line = quote_words(job.node_command(str(rank), address))
        app: dict[str, object] = {
            "id": f"/{config.name}-{rank}",
            "cmd": f"{line}; {AFTER}",
            "cpus": config.cpus,
            "mem": config.memory_bytes // 2**20,
            "gpus": config.gpus,
            "instances": 1,
            "taskKillGracePeriodSeconds": config.grace,
            "maxLaunchDelaySeconds": 60,
            "upgradeStrategy": {"minimumHealthCapacity": 0, "maximumOverCapacity": 0},
            "networks": [{"mode": "host"}],
        }
        container: dict[str, object] = {"type": "MESOS"}
        container |= {"docker": {"image": config.image}} if config.image else {}
        if config.volume:
            container["volumes"] = [{"hostPath": config.volume, "containerPath": config.mount, "mode": "RW"}]
        apps.append(app | {"container": container})
    notes = ("submit it with: curl -X PUT -H 'Content-Type: application/json' -d @apps.json http://MARATHON/v2/apps",)
    return LauncherFiles({"apps.json": json.dumps(apps, indent=2) + "\n"}, (), notes)
