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
SERVE, SETUP, CHECK = LAUNCH / "slurm/serve.sbatch", LAUNCH / "setup.sh", LAUNCH / "check-kernels.sh"
SHELL = [*SCRIPTS, SERVE, SETUP, CHECK, LAUNCH / "slurm/environment.sh"]
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


@pytest.mark.parametrize("script", [*SHELL, SKY], ids=lambda path: path.name)
def test_a_script_is_valid_bash(script, tmp_path):
    if script.suffix == ".yaml":
        about = yaml.safe_load(script.read_text())
        (tmp_path / script.name).write_text("#!/bin/bash\n" + about["setup"] + about["run"])
        script = tmp_path / script.name
    subprocess.run(["bash", "-n", script], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, "-x", "--exclude=SC2086", script], check=True)


@pytest.mark.parametrize("script", [*SCRIPTS, SERVE, SETUP], ids=lambda path: path.name)
def test_without_arguments_a_script_says_its_usage(script, root):
    found = run(root, "bash", script, SLURM_SUBMIT_DIR=str(root))
    assert found.returncode == 2 and found.stderr.startswith("usage: ")


@pytest.mark.parametrize(
    "kernels, checks",
    [
        (dict(chip=None, file=None, on=[], off={}), False),  # no kernel is written for the device
        (dict(chip="sm_90a", file=None, on=[], off={}), False),  # MERCURY_CACHE is empty: nowhere to write to
        (dict(chip="sm_90a", file="f", on=[], off={}), True),
        (dict(chip="sm_90a", file="f", on=["norm"], off={"heads": "heads did not pass here: error 3%"}), False),
        (
            dict(
                chip="sm_90a", file="f", on=["norm"],
                off={"heads": "heads did not pass here: its check was not completed"},
            ),
            True,
        ),
    ],
)  # fmt: skip
def test_kernels_are_checked_where_they_were_not(kernels, checks, tmp_path):
    about = json.dumps({"kernels": kernels})
    lines = f'#!/bin/bash\necho "$@" >> called\nif [ "$1" = info ]; then echo {shlex.quote(about)}; else exit 1; fi\n'
    write_command(tmp_path / "bin/mercury", lines)
    found = run(tmp_path, CHECK)
    assert found.returncode == 0, found.stderr  # also where a kernel is wrong
    called = (tmp_path / "called").read_text().splitlines()
    assert called == ["info --json", *["bench gpu check --budget 1800"] * checks]


def test_the_kernel_check_reads_what_mercury_info_prints(root):
    """On a CPU no kernel is written, so that nothing is checked."""
    found = run(root, CHECK, JAX_PLATFORMS="cpu")
    assert (found.returncode, found.stderr) == (0, "check-kernels: nothing to check here\n")


def test_setup_installs_by_hash_into_an_environment_of_python_3_12(tmp_path):
    clone = tmp_path / "clone"
    (clone / "launch").mkdir(parents=True)
    shutil.copy(SETUP, clone / "launch")
    write_command(tmp_path / "bin/uv", '#!/bin/bash\necho "$PWD: $@" >> "$FAKE/uv"\n')
    found = run(tmp_path, clone / "launch/setup.sh", "tpu", FAKE=str(tmp_path))
    assert found.returncode == 0, found.stderr
    lines = [line.removeprefix(f"{clone}: ") for line in (tmp_path / "uv").read_text().splitlines()]
    lists = ("constraints/hashed.txt", "constraints/hashed-tpu.txt")
    assert lines == [
        "venv --quiet --allow-existing --python 3.12 .venv",
        f"pip install --quiet --python .venv/bin/python --require-hashes -r {' -r '.join(lists)}",
        "pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .",
    ]
    assert all((jobs.ROOT / one).exists() for one in (*lists, "constraints/hashed-cuda12.txt"))
    assert run(tmp_path, clone / "launch/setup.sh", "cuda").returncode == 2


# Slurm's own variables inside a step; JAX reads them. A step of one task is the kernel check.
SRUN = """#!/bin/bash
echo "$@" >> srun.argv
case $* in *check-kernels.sh) exit ;; esac
while [ "${1#--}" != "$1" ]; do shift; done
for i in 0 1; do
  SLURM_JOB_ID=$JOB SLURM_STEP_NODELIST=localhost,otherhost SLURM_NTASKS=2 SLURM_PROCID=$i SLURM_LOCALID=0 \\
    SLURM_STEP_NUM_NODES=2 "$@" & pids[i]=$!
done
for i in 0 1; do wait "${pids[i]}" || exit $?; done
"""


def slurm(root: Path, srun: str, **more: str) -> dict[str, str]:
    """A clone in `root` with an environment, and the variables of a job."""
    write_command(root / "bin/srun", srun)
    (root / "bin/activate").write_text(f"export PATH={root / 'bin'}:$PATH\n")
    (root / "launch").symlink_to(LAUNCH)
    job = {"SLURM_SUBMIT_DIR": str(root), "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_ON_NODE": "96"}
    return (
        job | {"VENV": str(root), "HF_HOME": str(root / "hub"), "MERCURY_CACHE": str(root / "cache")} | more
    )


@pytest.mark.slow
def test_slurm_trains_on_two_nodes(root):
    found = run(
        root, "bash", SCRIPTS[0], "recipe.py", "--out", "out", "--mesh.data", "2", *SHORT,
        **slurm(root, SRUN, JOB=str(os.getpid())),
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert_trained_by_two(root / "out")
    check, train = (root / "srun.argv").read_text().splitlines()
    assert check == "--nodes=1 --ntasks=1 --cpus-per-task=96 launch/check-kernels.sh"
    assert train.startswith("--kill-on-bad-exit=1 --cpus-per-task=96 mercury train recipe.py")


@pytest.mark.parametrize("script", [SCRIPTS[0], SERVE], ids=lambda path: path.name)
def test_sbatch_gets_options_of_its_documentation(script):
    options = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(), re.MULTILINE)
    known = {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "mem", "time", "requeue",
        "signal", "output",
    }  # fmt: skip
    assert set(options) == known - ({"requeue"} if script == SERVE else set())


RECORD = """#!/bin/bash
echo "$@" >> srun.argv
"""


def test_slurm_serves_one_model_on_one_node(root):
    words = ("--model", "nano", "--mesh", "tensor=8")
    job = slurm(root, RECORD, MERCURY_API_KEYS="12345678", SLURM_CPUS_PER_TASK="16")
    found = run(root, "bash", SERVE, *words, **job)
    assert found.returncode == 0, found.stderr
    _, serve = (root / "srun.argv").read_text().splitlines()
    step, _, command = serve.partition(" mercury serve ")
    assert step == "--cpus-per-task=16"  # of the job, where it says so
    from mercury_jax.cli import arguments
    from mercury_jax.cli.serve import Serve

    read = arguments.read(Serve, command.split(), "mercury serve")
    assert (read.host, read.port, read.mesh, read.model) == ("0.0.0.0", 8000, "tensor=8", ("nano",))
    seconds = int(re.findall(r"--signal=TERM@(\d+)", SERVE.read_text())[0])
    assert read.drain < seconds
    assert f":{read.port}/v1" in found.stdout
    # A server for the whole network of the cluster has a key.
    assert run(root, "bash", SERVE, *words, **job | {"MERCURY_API_KEYS": ""}).returncode != 0


def test_slurm_runs_in_a_container_of_pyxis(root):
    """Options of `srun --help` where Pyxis is installed. The image has values of its own for two variables."""
    job = slurm(root, RECORD, IMAGE="host#project/mercury:0.1.0", BINDS="/data")
    assert run(root, "bash", SCRIPTS[0], "recipe.py", **job).returncode == 0
    for step in (root / "srun.argv").read_text().splitlines():
        options = dict(word[2:].split("=", 1) for word in step.split() if re.match("--[a-z-]+=", word))
        assert options["container-image"] == "host#project/mercury:0.1.0"
        assert options["container-env"] == "MERCURY_CACHE,HF_HOME"
        folders = [pair.split(":") for pair in options["container-mounts"].split(",")]
        assert folders == [[path, path] for path in (str(root), f"{root}/cache", f"{root}/hub", "/data")]
        assert options["container-workdir"] == str(root) and "--no-container-entrypoint" in step


def test_slurm_runs_in_a_container_of_apptainer(root):
    job = slurm(root, RECORD, SIF="mercury.sif")
    assert run(root, "bash", SCRIPTS[0], "recipe.py", **job).returncode == 0
    for step in (root / "srun.argv").read_text().splitlines():
        inside = step[step.index("apptainer") :]
        assert inside.startswith(
            f"apptainer exec --nv --bind {root},{root}/cache,{root}/hub --pwd {root} --env "
            f"MERCURY_CACHE={root}/cache,HF_HOME={root}/hub mercury.sif "
        )


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
    claim = yaml.safe_load((LAUNCH / "gke/volume-runs.yaml").read_text())
    (volume,) = [v for v in pod["volumes"] if v["name"] == "runs"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    # The kernels are checked first, with the devices and the cache of the training.
    (check,) = pod["initContainers"]
    assert (check["image"], check["resources"]) == (container["image"], container["resources"])
    assert check["command"] == ["/app/check-kernels.sh"]
    assert check["env"] == [e for e in container["env"] if e["name"] == "MERCURY_CACHE"]
    assert all(mount in container["volumeMounts"] for mount in check["volumeMounts"])
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
            if "secretKeyRef" in entry.get("valueFrom", ()):
                assert entry["valueFrom"]["secretKeyRef"]["optional"]
                continue
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
    """`uv` on a host is faked: it makes an environment with this one's command."""
    if not (jobs.ROOT / ".git").exists():
        pytest.skip("the script sends `git archive HEAD`: it needs a clone")
    write_command(root / "bin/gcloud", GCLOUD)
    write_command(root / "bin/uv", f"#!/bin/bash\nmkdir -p .venv/bin && cp {root}/bin/mercury .venv/bin/\n")
    write_command(root / "bin/sudo", '#!/bin/bash\necho "$@" >> "$FAKE/sudo"\n')
    write_command(root / "bin/mountpoint", "#!/bin/bash\nexit 1\n")
    found = run(
        root, SCRIPTS[1], root / "recipe.py", "--name", "my-run", "--out", root / "out", "--mesh.data", "2", *SHORT,
        FAKE=str(root), PLACE=jobs.free_address(), ZONE="us-east5-a", TYPE="v5p-16", NFS="10.0.0.2:/share", SPOT="1",
        POLL="0", HF_TOKEN="hf_secret",
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
    assert names == [
        "create",
        "describe",
        "describe",
        "describe",
        "scp",
        "scp",
        "ssh",
        "ssh",
        "ssh",
        "delete",
    ]
    assert "--worker=all" in calls[-2] and "--spot" in calls[0]
    # The token is a file on the hosts, and in no command.
    assert "hf_secret" not in str(calls) and (root / "host1/hf-token").read_text() == "hf_secret"
    assert (root / "host1/hf-token").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "kind, runtime",
    [
        ("v6e-64", "v2-alpha-tpuv6e"), ("v5p-32", "v2-alpha-tpuv5"), ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v4-32", "tpu-ubuntu2204-base"),
    ],
)  # fmt: skip
def test_a_tpu_has_the_software_of_its_generation(kind, runtime, tmp_path):
    write_command(tmp_path / "bin/gcloud", '#!/bin/bash\necho "$@" >> "$FAKE"\necho FAILED\n')
    place = dict(FAKE=str(tmp_path / "calls"), ZONE="us-east5-a", TYPE=kind, NFS="10.0.0.2:/share")
    assert run(tmp_path, SCRIPTS[1], "nano", **place).returncode == 1
    assert f"--runtime-version={runtime} " in (tmp_path / "calls").read_text().splitlines()[0] + " "


# Of `xpk workload create --help`.
XPK_FLAGS = {
    *(
        "workload", "cluster", "zone", "project", "tpu-type", "num-slices", "docker-image", "storage",
        "max-restarts",
    ),
    *("restart-on-exit-codes", "termination-grace-period-seconds", "command", "env"),
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
