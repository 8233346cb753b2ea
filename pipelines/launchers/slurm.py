"""A script for Slurm's sbatch, which is queued again when it is stopped before its end."""

import shlex

from pipelines.launchers.job import RETRY, ClusterJob, LauncherFiles, ShellWord, quote_words


def write_slurm(job: ClusterJob) -> LauncherFiles:
    """Returns the script; the node that srun starts first is where the others meet."""
    config = job.config
    minutes = max(1, round(60 * config.hours))
    options = [
        f"--job-name={config.name}", f"--nodes={config.min_nodes}-{config.max_nodes}", "--ntasks-per-node=1",
        f"--cpus-per-task={config.cpus}", f"--mem={config.memory_bytes // 2**20}M", f"--time={minutes}",
        f"--signal=TERM@{config.grace}", "--requeue", "--open-mode=append",
    ]  # fmt: skip
    options += [f"--gpus-per-node={config.gpus}"] if config.gpus else []
    options += [f"--partition={config.queue}"] if config.queue else []
    options += [f"--account={config.account}"] if config.account else []
    no_kill = ["--no-kill"] if config.min_nodes < config.max_nodes else []  # Slurm would end the job of a lost node
    command = job.node_command("$SLURM_NODEID", "$SLURM_LAUNCH_NODE_IPADDR")
    minimum = f"{config.min_nodes}:" if config.min_nodes < config.max_nodes else ""
    command[command.index(f"--nodes={config.nodes}")] = ShellWord(f"--nodes={minimum}$SLURM_NNODES")
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in (*options, *no_kill)),
        "",
        f"{' '.join(['srun', '--kill-on-bad-exit=0', *no_kill])} bash -c {shlex.quote(f'exec {quote_words(command)}')}",
        "code=$?",
        'echo "ended with $code"',
        f'if [ "$code" -eq {RETRY} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {config.restarts} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
    return LauncherFiles({"job.sbatch": "\n".join(lines) + "\n"}, ("sbatch", "job.sbatch"))
