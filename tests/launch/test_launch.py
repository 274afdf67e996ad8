"""The scripts of launch/ that train on many hosts, executed: the cluster is faked, `mercury train` is not.

Each launcher starts two real processes on this machine, which train together to the last step. What a fake command is
called with is compared with the flags that its documentation names.
"""

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training import jobs

yaml = pytest.importorskip("yaml")

LAUNCH = jobs.ROOT / "launch"
SCRIPTS = [LAUNCH / "slurm/train.sbatch", LAUNCH / "tpu/queued-resources.sh", LAUNCH / "tpu/xpk.sh"]
SKY, JOBSET = LAUNCH / "sky/train.yaml", LAUNCH / "gke/train-jobset.yaml"
SHORT = ("--steps", "4", "--save_every", "4", "--eval_every", "4", "--sample_every", "0")


def write_command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def root(tmp_path) -> Path:
    """The tiny recipe, and bin/ with a `mercury` that is this source tree's."""
    jobs.write_recipe(tmp_path)
    write_command(tmp_path / "bin/mercury", f'#!/bin/bash\nexec {sys.executable} -m mercury_jax "$@"\n')
    return tmp_path


def environment(root: Path, **more: str) -> dict[str, str]:
    return jobs.environment(root) | {"PATH": f"{root / 'bin'}:{os.environ['PATH']}"} | more


def run(root: Path, *argv: object, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*map(str, argv)], cwd=cwd or root, env=environment(root, **more), capture_output=True, text=True, timeout=240
    )  # fmt: skip


def assert_trained_by_two(out: Path) -> None:
    """The run is complete: four updates, each of them logged once, on a mesh of two, and a model."""
    assert [row["step"] for row in jobs.rows(out) if row["kind"] == "train"] == [1, 2, 3, 4]
    config = json.loads((out / "config.json").read_text())
    assert config["mesh"]["data"] == 2 and config["distributed"] and config["resume"]
    assert (out / "model" / "manifest.json").exists()


@pytest.mark.parametrize("script", [*SCRIPTS, SKY], ids=lambda path: path.name)
def test_a_script_is_valid_bash(script, tmp_path):
    if script.suffix == ".yaml":
        about = yaml.safe_load(script.read_text())
        (tmp_path / script.name).write_text("#!/bin/bash\n" + about["setup"] + about["run"])
        script = tmp_path / script.name
    subprocess.run(["bash", "-n", script], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, "--exclude=SC2086", script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_without_a_recipe_a_script_says_its_usage(script, root):
    found = run(root, "bash", script, SLURM_SUBMIT_DIR=str(root))
    assert found.returncode == 2 and found.stderr.startswith("usage: ")


# Slurm's own variables inside a step; JAX reads them.
SRUN = """#!/bin/bash
echo "$@" > srun.argv
shift
for i in 0 1; do
  SLURM_JOB_ID=$JOB SLURM_STEP_NODELIST=localhost,otherhost SLURM_NTASKS=2 SLURM_PROCID=$i SLURM_LOCALID=0 \\
    SLURM_STEP_NUM_NODES=2 "$@" & pids[i]=$!
done
for i in 0 1; do wait "${pids[i]}" || exit $?; done
"""


@pytest.mark.slow
def test_slurm_trains_on_two_nodes(root):
    write_command(root / "bin/srun", SRUN)
    (root / "bin/activate").write_text(f"export PATH={root / 'bin'}:$PATH\n")
    found = run(
        root, "bash", SCRIPTS[0], "recipe.py", "--out", "out", "--mesh.data", "2", *SHORT,
        SLURM_SUBMIT_DIR=str(root), SLURM_GPUS_ON_NODE="1", VENV=str(root), JOB=str(os.getpid()),
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert_trained_by_two(root / "out")
    assert (root / "srun.argv").read_text().startswith("--kill-on-bad-exit=1 mercury train recipe.py")
    # Options of sbatch, in its documentation.
    options = re.findall(r"^#SBATCH --([a-z-]+)", SCRIPTS[0].read_text(), re.MULTILINE)
    known = {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "mem", "time", "requeue",
        "signal",
    }  # fmt: skip
    assert set(options) == known | {"output"}


def test_the_jobset_has_what_its_api_requires():
    about = yaml.safe_load(JOBSET.read_text())
    assert (about["apiVersion"], about["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(about["spec"]) == {"network", "failurePolicy", "replicatedJobs"}
    for rule in about["spec"]["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    (hosts,) = about["spec"]["replicatedJobs"]
    job, pod = hosts["template"]["spec"], hosts["template"]["spec"]["template"]["spec"]
    assert job["parallelism"] == job["completions"] and job["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never"  # a podFailurePolicy needs it
    (container,) = pod["containers"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (
        rule["onExitCodes"]["containerName"] == container["name"] and 0 not in rule["onExitCodes"]["values"]
    )
    gpus = "nvidia.com/gpu"
    assert container["resources"]["requests"][gpus] == container["resources"]["limits"][gpus]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    # A pod's name in the network of the JobSet is <jobset>-<job>-<number of the job>-<index of the pod>.<jobset>.
    env = {e["name"]: e.get("value") for e in container["env"]}
    name = about["metadata"]["name"]
    port = {p["name"]: p["containerPort"] for p in container["ports"]}["coordinator"]
    assert env["JAX_COORDINATOR_ADDRESS"] == f"{name}-{hosts['name']}-0-0.{name}:{port}"
    assert env["JAX_NUM_PROCESSES"] == str(job["parallelism"])


@pytest.mark.slow
def test_the_pods_of_the_jobset_train_together(root):
    """Each pod's command and variables, with this machine's address for the headless service."""
    job = yaml.safe_load(JOBSET.read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    index = {"metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    address, pods = jobs.free_address(), []
    here = {"nano": str(root / "recipe.py"), "--mesh.fsdp=8": "--mesh.fsdp=1"}  # a device a pod
    words = [str(here.get(word, word)).replace("/runs", str(root)) for word in container["args"]]
    for number in range(job["completions"]):
        env = dict[str, str]()
        for entry in container["env"]:
            if "valueFrom" in entry:
                assert entry["valueFrom"]["fieldRef"]["fieldPath"] in index
            env[entry["name"]] = str(entry.get("value", number)).replace("/runs", str(root))
        env["JAX_COORDINATOR_ADDRESS"] = address
        command = [str(root / "bin/mercury"), *words, *SHORT]
        pods.append(subprocess.Popen(command, env=environment(root, **env), stderr=subprocess.DEVNULL))
    assert jobs.codes(pods) == [0, 0]
    assert_trained_by_two(root / "nano")


@pytest.mark.slow
def test_skypilot_trains_on_two_nodes(root):
    """The `run` section on two nodes, with the variables that SkyPilot documents for it."""
    about = yaml.safe_load(SKY.read_text())
    fields = {"name", "num_nodes", "resources", "volumes", "workdir", "envs", "setup", "run"}
    assert set(about) == fields and set(about["resources"]) == {"accelerators", "infra"}
    assert all(isinstance(value, str) for value in about["envs"].values())
    port = jobs.free_address().split(":")[1]
    envs = about["envs"] | {
        "RECIPE": "recipe.py",
        "OVERRIDES": "--mesh.data 2 " + " ".join(SHORT),
        "PORT": port,
    }
    nodes = [
        subprocess.Popen(
            ["bash", "-c", about["run"].replace("/runs/", f"{root}/")], cwd=root, stderr=subprocess.DEVNULL,
            env=environment(
                root, **envs, SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2", SKYPILOT_NUM_NODES=str(about["num_nodes"]),
                SKYPILOT_NODE_RANK=str(rank),
            ),
        )
        for rank in range(about["num_nodes"])
    ]  # fmt: skip
    assert jobs.codes(nodes) == [0, 0]
    assert_trained_by_two(root / "recipe")


# Records its words. A slice of two hosts, each a folder: what is sent there by scp lies in it, and ssh runs in it.
GCLOUD = """#!/usr/bin/env python3
import json, os, pathlib, shutil, subprocess, sys
root, words = pathlib.Path(os.environ["FAKE"]), sys.argv[1:]
with (root / "gcloud.jsonl").open("a") as log:
    log.write(json.dumps(words) + "\\n")
hosts = [root / f"host{i}" for i in range(2)]
command = words[:4]
if command == ["compute", "tpus", "queued-resources", "describe"]:
    asked = (root / "gcloud.jsonl").read_text().count('"describe"')
    print(["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"][min(asked - 1, 2)])
elif command == ["compute", "tpus", "tpu-vm", "scp"]:
    name, _, path = words[5].partition(":")
    for host in hosts:
        host.mkdir(exist_ok=True)
        shutil.copy(words[4], host / path)
elif command == ["compute", "tpus", "tpu-vm", "ssh"]:
    (line,) = [w.partition("=")[2] for w in words if w.startswith("--command=")]
    slice = os.environ | {"JAX_COORDINATOR_ADDRESS": os.environ["PLACE"], "JAX_NUM_PROCESSES": "2"}
    job = lambda i: slice | {"JAX_PROCESS_ID": str(i)}
    runs = [subprocess.Popen(["bash", "-c", line], cwd=host, env=job(i)) for i, host in enumerate(hosts)]
    sys.exit(max(run.wait() for run in runs))
"""
# What `gcloud compute tpus ... --help` lists, of what the script uses.
GCLOUD_FLAGS = {
    "create": {"zone", "node-id", "accelerator-type", "runtime-version", "spot"},
    "describe": {"zone", "format"},
    "delete": {"zone", "force", "quiet"},
    "scp": {"zone", "worker"},
    "ssh": {"zone", "worker", "command"},
}


@pytest.mark.slow
def test_a_tpu_slice_is_made_used_by_all_hosts_and_deleted(root):
    """`make setup` on a host is faked by a link to this environment."""
    if not (jobs.ROOT / ".git").exists():
        pytest.skip("the script sends `git archive HEAD`: it needs a clone")
    write_command(root / "bin/gcloud", GCLOUD)
    setup = f"mkdir -p .venv/bin && cp {root}/bin/mercury .venv/bin/ && ln -sf /bin/true .venv/bin/pip"
    write_command(root / "bin/make", f'#!/bin/bash\ntest "$1" = setup && {setup}\n')
    write_command(root / "bin/sudo", '#!/bin/bash\necho "$@" >> "$FAKE/sudo"\n')
    write_command(root / "bin/mountpoint", "#!/bin/bash\nexit 1\n")
    found = run(
        root, SCRIPTS[1], root / "recipe.py", "--name", "my-run", "--out", root / "out", "--mesh.data", "2", *SHORT,
        FAKE=str(root), PLACE=jobs.free_address(), ZONE="us-east5-a", TYPE="v5p-16", NFS="10.0.0.2:/share", SPOT="1",
        POLL="0",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    assert_trained_by_two(root / "out")
    assert all((root / f"host{i}" / "mercury/pyproject.toml").exists() for i in (0, 1))
    assert "mount -t nfs -o vers=3 10.0.0.2:/share /runs" in (root / "sudo").read_text()
    calls = [json.loads(line) for line in (root / "gcloud.jsonl").read_text().splitlines()]
    for words in calls:
        flags = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= GCLOUD_FLAGS[words[3]], words
    names = [words[3] for words in calls]
    assert names == ["create", "describe", "describe", "describe", "scp", "ssh", "ssh", "ssh", "delete"]
    assert "--worker=all" in calls[-2] and "--spot" in calls[0]


# Of `xpk workload create --help`.
XPK_FLAGS = {
    *(
        "workload", "cluster", "zone", "project", "tpu-type", "num-slices", "docker-image", "storage",
        "max-restarts",
    ),
    *("restart-on-exit-codes", "termination-grace-period-seconds", "command"),
}  # fmt: skip


def test_xpk_gets_the_command_as_it_was_typed(root):
    write_command(root / "bin/xpk", '#!/bin/bash\nprintf "%s\\n" "$@" > xpk.argv\n')
    place = {"CLUSTER": "c", "ZONE": "z", "PROJECT": "p", "TYPE": "v5p-32", "IMAGE": "i", "STORAGE": "s"}
    found = run(root, SCRIPTS[2], "nano", "--sample_prompts", "two words", "it's", **place)
    assert found.returncode == 0, found.stderr
    words = (root / "xpk.argv").read_text().splitlines()
    assert words[:2] == ["workload", "create"]
    flags = dict(word.removeprefix("--").partition("=")[::2] for word in words[2:])
    assert set(flags) == XPK_FLAGS and flags["num-slices"] == "1" and flags["tpu-type"] == "v5p-32"
    command = shlex.split(flags["command"])
    assert command == [
        "mercury", "train", "nano", "--sample_prompts", "two words", "it's", "--distributed", "--resume"
    ]  # fmt: skip
    for missing in place:
        assert run(root, SCRIPTS[2], "nano", **{**place, missing: ""}).returncode != 0
