"""What is written for each launcher: checked with the launchers' own schemas, which need no cluster."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from distill.errors import InputError
from pipelines.launch import LAUNCHERS, main, split_launcher
from pipelines.launchers.job import ClusterJob, read_command
from pipelines.settings.commands.launch import LaunchConfig, check_launcher

WORDS = ["python", "-m", "pipelines.distill", "--config", "configs/demo.yaml", "--output", "/shared/runs/it's here"]


def make_job(**changes: object) -> ClusterJob:
    config = LaunchConfig(**{"nodes": "2", "gpus": 8, "image": "registry/stillroom:1", "volume": "claim", **changes})
    return read_command(WORDS, config)


def read_objects(job: ClusterJob) -> list[dict]:
    (text,) = LAUNCHERS["kubernetes"](job).files.values()
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("queue", ["", "team"])
def test_kubernetes_accepts_the_job_and_its_service(queue):
    validate = pytest.importorskip("kubernetes_validate").validate
    service, job = read_objects(make_job(queue=queue, namespace="training"))
    for each in (service, job):
        validate(each, "1.34", strict=True)
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == 2
    assert spec["completionMode"] == "Indexed"  # the schema accepts any word here
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert job["metadata"].get("labels") == ({"kueue.x-k8s.io/queue-name": "team"} if queue else None)


@pytest.mark.parametrize(
    ("output", "volume", "is_warned"),
    [
        (["--output", "runs/demo"], "", True),
        (["--output", "runs/demo"], "claim", False),
        (["--output", "s3://runs/demo"], "", False),
        (["--output=s3://runs/demo"], "", False),
    ],
)
def test_outputs_that_would_end_with_their_pods_are_announced(output, volume, is_warned):
    config = LaunchConfig(nodes="2", image="registry/stillroom:1", volume=volume)
    job = read_command(["stillroom", "distill", "--data", "s3://texts/all", *output], config)
    assert any("outputs are lost when the pods end" in note for note in LAUNCHERS["kubernetes"](job).notes) == is_warned


def test_a_misspelt_field_of_a_job_is_found():
    """The check above would be worth nothing otherwise."""
    package = pytest.importorskip("kubernetes_validate")
    _, job = read_objects(make_job())
    job["spec"]["complitions"] = job["spec"].pop("completions")
    with pytest.raises(package.ValidationError):
        package.validate(job, "1.34", strict=True)


def list_unknown(written: object, read: object, path: str = "") -> list[str]:
    """Returns the fields that a model dropped when it read a manifest."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [
            field
            for key, value in written.items()
            for field in ([f"{path}.{key}"] if key not in read else list_unknown(value, read[key], f"{path}.{key}"))
        ]
    if isinstance(written, list) and isinstance(read, list):
        pairs = enumerate(zip(written, read, strict=True))
        return [field for number, pair in pairs for field in list_unknown(*pair, f"{path}[{number}]")]
    return []


@pytest.mark.parametrize(
    ("form", "module", "name"),
    [
        ("jobset", "jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
        ("trainjob", "trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
    ],
)
@pytest.mark.parametrize("volume", ["", "claim"])
def test_kubeflows_models_know_every_field(form, module, name, volume):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    __import__(f"kubeflow_trainer_api.models.{module}")
    model = getattr(getattr(models, module), name)
    (manifest,) = read_objects(make_job(form=form, volume=volume))
    assert list_unknown(manifest, model.from_dict(manifest).to_dict()) == []
    manifest["spec"]["trainr"] = manifest["spec"].pop("network", {}) or {"numNodes": 1}
    assert list_unknown(manifest, model.from_dict(manifest).to_dict()) == [".spec.trainr"]


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "marathon"])
def test_the_command_arrives_word_for_word(launcher, tmp_path):
    """The scripts run with commands of their own for what they start, which write their arguments to a file."""
    job = make_job(image="", nodes="2") if launcher != "kubernetes" else make_job()
    line = find_line(launcher, job)
    stub = '#!/bin/sh\nprintf "%s\\n" "$@" > "$OUT"\n'
    starts = {"srun": "shift", "ray": 'while [ "$1" != -- ]; do shift; done; shift'}
    for name in ("python", "torchrun", "srun", "ray"):
        text = stub if name not in starts else f'#!/bin/sh\n{starts[name]}\nexec "$@"\n'
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path / "words"), "ADDRESS": "10.0.0.1",
        "LOCAL_ADDRESS": "10.0.0.2", "JOB_COMPLETION_INDEX": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }  # fmt: skip
    subprocess.run(["bash", "-c", line, "torchrun.sh", "1"], env=variables, check=True)
    arguments = (tmp_path / "words").read_text().splitlines()
    first = arguments.index(WORDS[3])
    assert arguments[first : first + 4] == WORDS[3:]
    assert "pipelines.distill" in arguments
    if launcher not in ("torchrun", "ray"):
        assert {"--rank=1", "--nodes=2", "--processes=8"} <= set(arguments)
        address = next(word for word in arguments if word.startswith("--address="))
        assert address == (
            "--address=stillroom-0.stillroom:29400" if launcher == "kubernetes" else "--address=10.0.0.1:29400"
        )


def find_line(launcher: str, job: ClusterJob) -> str:
    """Returns the text that a shell on a node runs."""
    if launcher == "kubernetes":
        return read_objects(job)[1]["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    if launcher == "skypilot":
        job = ClusterJob(job.module, job.arguments, LaunchConfig(nodes="2", gpus=8, accelerator="H100"))
    (text,) = LAUNCHERS[launcher](job).files.values()
    return yaml.safe_load(text)["run"] if launcher == "skypilot" else text


def test_a_single_node_runs_torchrun_alone():
    manifest = LAUNCHERS["torchrun"](read_command(WORDS, LaunchConfig(processes=2)))
    assert "--standalone" in manifest.files["torchrun.sh"]
    assert manifest.submit == ("sh", "torchrun.sh")


def test_slurm_keeps_a_job_that_may_go_on_with_fewer_nodes():
    fixed, elastic = (
        LAUNCHERS["slurm"](make_job(nodes=nodes, image="", volume="")).files["job.sbatch"] for nodes in ("2", "1:4")
    )
    assert "--no-kill" not in fixed
    assert "#SBATCH --no-kill\n" in elastic
    assert "srun --kill-on-bad-exit=0 --no-kill bash" in elastic


def test_slurm_queues_again_what_was_stopped():
    text = LAUNCHERS["slurm"](make_job(nodes="1:4", image="", volume="", queue="gpu", account="me")).files["job.sbatch"]
    for option in ("--nodes=1-4", "--requeue", "--signal=TERM@120", "--partition=gpu", "--account=me"):
        assert f"#SBATCH {option}" in text
    assert '[ "$code" -eq 75 ]' in text
    assert "--nodes=1:$SLURM_NNODES" in text


def test_marathon_has_an_application_for_each_node():
    """Its fields are those of the documentation of Marathon 1.5: no package has a schema."""
    apps = json.loads(LAUNCHERS["marathon"](make_job(address="10.0.0.1")).files["apps.json"])
    known = {
        "id", "cmd", "cpus", "mem", "gpus", "instances", "taskKillGracePeriodSeconds", "maxLaunchDelaySeconds",
        "upgradeStrategy", "networks", "container",
    }  # fmt: skip
    assert [app["id"] for app in apps] == ["/stillroom-0", "/stillroom-1"]
    for rank, app in enumerate(apps):
        assert set(app) == known
        assert app["cpus"] > 0
        assert app["mem"] == 15258
        assert f"--rank={rank}" in app["cmd"]
        assert "--address=10.0.0.1:29400" in app["cmd"]


def test_a_marathon_task_sleeps_after_success_and_ends_after_a_stop(tmp_path):
    (app, *_) = json.loads(LAUNCHERS["marathon"](make_job()).files["apps.json"])
    for code, sleeps in ((0, True), (2, True), (75, False), (1, False)):
        for name, text in (("python", f"exit {code}"), ("sleep", "echo asleep")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        done = subprocess.run(
            ["sh", "-c", app["cmd"]], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
        )
        assert ("asleep" in done.stdout) == sleeps
        assert done.returncode == code


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": "0"}, "nodes"),
        ({"nodes": "4:2"}, "nodes"),
        ({"gpus": -1}, "gpus: expected at least 0, found -1"),
        ({"cpus": 0}, "cpus"),
        ({"memory": "much"}, "memory"),
        ({"name": "My_Job"}, "name"),
        ({"port": 70000}, "port"),
        ({"hours": 0.0}, "hours"),
        ({"grace": 0}, "grace"),
        ({"mount": "shared"}, "mount"),
    ],
)
def test_values_out_of_range_are_rejected(changes, message):
    with pytest.raises(Exception, match=message):
        LaunchConfig(**changes)


@pytest.mark.parametrize(
    ("launcher", "changes", "message"),
    [
        ("kubernetes", {}, "image"),
        ("skypilot", {"gpus": 8}, "accelerator"),
        ("skypilot", {"nodes": "1:4"}, "fixed number"),
        ("kubernetes", {"image": "x", "form": "trainjob", "nodes": "1:2"}, "a trainjob"),
        ("slurm", {"image": "x"}, "image: expected only for ray and kubernetes and marathon"),
        ("torchrun", {"spot": True}, "spot"),
    ],
)
def test_settings_that_a_launcher_lacks_or_ignores_are_named(launcher, changes, message):
    with pytest.raises(InputError, match=message):
        check_launcher(launcher, LaunchConfig(**changes))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "found none"),
        (["python", "train.py"], "found python train.py"),
        (["stillroom", "report", "runs/x"], "found stillroom report"),
        (["distill", "--devices", "2"], "found --devices"),
        (["distill", "--devices=2"], "found --devices=2"),
    ],
)
def test_commands_that_nodes_cannot_share_are_rejected(command, message):
    with pytest.raises(InputError, match=message):
        read_command(command, LaunchConfig())


def test_unknown_engines_are_answered_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'kubernetes'"):
        split_launcher(["kubernets", "--", *WORDS])


def test_files_are_written_once_and_edits_are_kept(tmp_path, capsys):
    arguments = ["slurm", "--nodes", "2", f"--output={tmp_path / 'job'}"]
    main([*arguments, "--", *WORDS])
    script = tmp_path / "job" / "job.sbatch"
    assert f"submit it with: sbatch {script}" in capsys.readouterr().out.replace("\n", "")
    subprocess.run(["bash", "-n", str(script)], check=True)
    main([*arguments, "--", *WORDS])
    script.write_text(script.read_text() + "# mine\n")
    with pytest.raises(InputError, match="may have been edited; nothing was overwritten"):
        main([*arguments, "--", *WORDS])
    assert script.read_text().endswith("# mine\n")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_output_that_is_no_folder_is_rejected(place, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="expected a folder, found a file"):
        main(["slurm", f"--output={tmp_path / place}", "--", *WORDS])
    assert (tmp_path / "file").read_text() == "mine"


def test_submission_needs_the_engines_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="expected sbatch on this machine"):
        main(["slurm", f"--output={tmp_path / 'job'}", "--submit", "--", *WORDS])
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(InputError, match="ended with 3"):
        main(["slurm", f"--output={tmp_path / 'job'}", "--submit", "--", *WORDS])
    (tmp_path / "sbatch").write_text('#!/bin/sh\nread first < "$1"\necho "$first" > submitted\n')
    monkeypatch.chdir(tmp_path)  # relative paths of the command are those of the folder it is launched from
    main(["slurm", "--output=job", "--submit", "--", *WORDS])
    assert Path("submitted").read_text() == "#!/bin/bash\n"


# Fields of ray.io/v1 in KubeRay's Go types (Apache-2.0), as far as they may occur here.
RAY_JOB = {
    "entrypoint", "backoffLimit", "activeDeadlineSeconds", "shutdownAfterJobFinishes", "rayClusterSpec",
    "submissionMode", "ttlSecondsAfterFinished", "runtimeEnvYAML", "suspend", "jobId", "metadata",
}  # fmt: skip
RAY_CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling"}
RAY_GROUP = {"rayStartParams", "template"}
RAY_WORKERS = RAY_GROUP | {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts"}


def test_a_rayjob_has_the_fields_of_kuberay_and_pods_of_kubernetes():
    validate = pytest.importorskip("kubernetes_validate").validate
    job = yaml.safe_load(LAUNCHERS["ray"](make_job(queue="team")).files["rayjob.yaml"])
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"].keys() <= RAY_JOB
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster.keys() <= RAY_CLUSTER
    (group,) = cluster["workerGroupSpecs"]
    assert cluster["headGroupSpec"].keys() == RAY_GROUP
    assert group.keys() <= RAY_WORKERS
    assert group["replicas"] == 2
    for each in (cluster["headGroupSpec"], group):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": each["template"]["spec"]}
        validate(pod, "1.34", strict=True)
        assert all(isinstance(value, str) for value in each["rayStartParams"].values())
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_ray_runs_the_command_with_as_many_workers_as_processes():
    text = LAUNCHERS["ray"](make_job(image="")).files["submit.sh"]
    assert "ray job submit --submission-id=stillroom --working-dir=. -- python -m pipelines.distill" in text
    assert "--launcher=ray --devices=16 --machine.restarts=10" in text
    assert "'/shared/runs/it'\"'\"'s here'" in text


def test_ray_starts_a_fixed_number_of_workers():
    with pytest.raises(InputError, match="nodes: expected one number with launcher ray, found 1:4"):
        LAUNCHERS["ray"](make_job(nodes="1:4"))
