"""A line of torchrun for each node."""

from pipelines.launchers.job import ClusterJob, LauncherFiles, ShellWord, quote_words


def write_torchrun(job: ClusterJob) -> LauncherFiles:
    """Returns a script with the line that is started on every node, which is passed the node's number.

    A single node needs no meeting point. torchrun ends with 1 whatever its processes returned.
    """
    config = job.config
    command = ["torchrun", f"--nproc-per-node={config.per_node}", f"--max-restarts={config.restarts}"]
    if config.max_nodes == 1:
        command.append("--standalone")
    else:
        address = config.address or "${ADDRESS:?address of the first node}"
        command += [
            f"--nnodes={config.nodes}", f"--rdzv-id={config.name}", "--rdzv-backend=c10d",
            ShellWord(f"--rdzv-endpoint={address}:{config.port}"),
            ShellWord(f"--rdzv-conf=is_host=$((NODE == 0)),read_timeout={config.timeout}"),
            ShellWord("--local-addr=${LOCAL_ADDRESS:-$(hostname -I | cut -d' ' -f1)}"),
        ]  # fmt: skip
    command += [f"--shutdown-timeout={config.worker_grace}", "-m", job.module, *job.arguments]
    lines = ["#!/bin/sh", "# Start this on every node, with its number: sh torchrun.sh 0, sh torchrun.sh 1, ..."]
    lines += ["NODE=${1:?number of this node, from 0}"] if config.max_nodes > 1 else []
    lines.append(f"exec {quote_words(command)}")
    submit = ("sh", "torchrun.sh") if config.max_nodes == 1 else ()
    return LauncherFiles({"torchrun.sh": "\n".join(lines) + "\n"}, submit)
