"""The manifests of launch/gke that serve agree with the server; tests/launch has the one that trains."""

import itertools
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[1]
GKE = ROOT / "launch" / "gke"
FILES = [GKE / f"{name}.yaml" for name in ("deployment", "service", "autoscale")]
PATCH = GKE / "patches" / "26b-on-eight-gpus.yaml"


def documents() -> dict[str, dict]:
    found = itertools.chain.from_iterable(yaml.safe_load_all(file.read_text()) for file in FILES)
    return {one["kind"]: one for one in found}


@pytest.fixture(scope="module")
def kinds() -> dict[str, dict]:
    return documents()


@pytest.fixture(scope="module")
def pod(kinds) -> dict:
    return kinds["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod) -> dict:
    (one,) = pod["containers"]
    return one


@pytest.fixture(scope="module")
def words(container):
    """The arguments, read as the command reads them; an unknown one fails the test."""
    from mercury_jax.cli import arguments
    from mercury_jax.cli.serve import Serve

    command, *rest = container["args"]
    assert command == "serve"
    return arguments.read(Serve, rest, "mercury serve")


def test_every_part_is_there(kinds):
    wanted = {
        "Deployment", "Service", "BackendConfig", "PodDisruptionBudget", "PodMonitoring",
        "HorizontalPodAutoscaler",
    }  # fmt: skip
    assert set(kinds) == wanted
    assert {one["metadata"]["name"] for one in kinds.values()} == {"mercury"}


def test_probes_use_routes_without_key_on_the_servers_port(container, words, kinds):
    pytest.importorskip("starlette")
    from mercury_jax.serve.app import PUBLIC_ROUTES

    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = {
        name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health",
    }  # fmt: skip
    for probe in probes.values():
        assert probe["path"] in PUBLIC_ROUTES and ports[probe["port"]] == words.port
    balanced = kinds["BackendConfig"]["spec"]["healthCheck"]
    assert balanced["requestPath"] in PUBLIC_ROUTES and balanced["port"] == words.port
    (port,) = kinds["Service"]["spec"]["ports"]
    assert ports[port["targetPort"]] == words.port


def test_the_grace_period_covers_draining(pod, container, words, kinds):
    pytest.importorskip("uvicorn")
    from mercury_jax.serve.server import FLUSH_SECONDS, NOTICE_SECONDS

    waited = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = waited + NOTICE_SECONDS + words.drain + FLUSH_SECONDS
    assert needed < pod["terminationGracePeriodSeconds"]
    assert kinds["BackendConfig"]["spec"]["connectionDraining"]["drainingTimeoutSec"] >= words.drain


def test_it_asks_for_a_key(container, words, kinds):
    from mercury_jax.cli.serve import KEYS

    secrets = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in container["env"] if "valueFrom" in e}
    assert (
        words.host == "0.0.0.0"
        and not words.api_key
        and secrets[KEYS] == {"name": "mercury", "key": "api-keys"}
    )
    (endpoint,) = kinds["PodMonitoring"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"]["secret"] == {"name": "mercury", "key": "metrics-key"}
    told = (GKE / "README.md").read_text()
    assert all(f"--from-literal={key}=" in told for key in ("api-keys", "metrics-key"))


def test_the_autoscaler_watches_a_metric_of_the_server(kinds):
    pytest.importorskip("prometheus_client")
    from mercury_jax.serve.app import GET_ROUTES
    from mercury_jax.serve.metrics import ENGINE_GAUGES

    (metric,) = kinds["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = re.fullmatch(
        r"prometheus\.googleapis\.com\|mercury_(\w+)\|gauge", metric["pods"]["metric"]["name"]
    )
    assert name is not None and name[1] in ENGINE_GAUGES
    (endpoint,) = kinds["PodMonitoring"]["spec"]["endpoints"]
    assert endpoint["path"] in GET_ROUTES


def test_all_selectors_match_the_same_pods(kinds, container, pod):
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        kinds["Service"]["spec"]["selector"],
        *(
            kinds[kind]["spec"]["selector"]["matchLabels"]
            for kind in ("Deployment", "PodDisruptionBudget", "PodMonitoring")
        ),
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    aim = kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (aim["kind"], aim["name"]) == ("Deployment", kinds["Deployment"]["metadata"]["name"])
    assert "replicas" not in kinds["Deployment"]["spec"]
    mounts = {m["name"] for m in container["volumeMounts"]}
    assert mounts == {v["name"] for v in pod["volumes"]}


def test_the_kernels_are_checked_before_the_server_starts(container, pod):
    (check,) = pod["initContainers"]
    for key in ("image", "securityContext"):
        assert check[key] == container[key]
    assert check["command"] == ["/app/check-kernels.sh"]
    assert check["resources"]["limits"] == container["resources"]["limits"]
    assert check["env"] == [e for e in container["env"] if e["name"] == "MERCURY_CACHE"]
    assert all(mount in container["volumeMounts"] for mount in check["volumeMounts"])


def test_what_a_server_writes_lies_on_a_volume(container, pod):
    """The root file system is read-only: caches are on the claim, which several pods write."""
    assert container["securityContext"]["readOnlyRootFilesystem"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "cache"]
    env = {e["name"]: e.get("value") for e in container["env"]}
    assert all(env[name].startswith(f"{mount['mountPath']}/") for name in ("MERCURY_CACHE", "HF_HOME"))
    claim = yaml.safe_load((GKE / "volume-cache.yaml").read_text())
    (name,) = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if v["name"] == "cache"]
    assert (claim["metadata"]["name"], claim["spec"]["accessModes"]) == (name, ["ReadWriteMany"])


def test_the_patch_for_eight_gpus_changes_what_the_deployment_has(container, pod):
    """A strategic merge finds containers and volumes by their names; the words replace all others."""
    from mercury_jax.cli import arguments
    from mercury_jax.cli.serve import Serve

    change = yaml.safe_load(PATCH.read_text())["spec"]["template"]["spec"]
    assert change.keys() <= pod.keys()
    for part in ("containers", "initContainers", "volumes"):
        assert {one["name"] for one in change[part]} <= {one["name"] for one in pod[part]}
    (server,), (check,) = change["containers"], change["initContainers"]
    assert server.keys() <= container.keys() and check["resources"] == server["resources"]
    command, *rest = server["args"]
    read = arguments.read(Serve, rest, "mercury serve")
    assert command == "serve" and (read.host, read.drain) == ("0.0.0.0", 90)
    assert read.mesh == f"tensor={server['resources']['limits']['nvidia.com/gpu']}"
    gpu = "nvidia.com/gpu"
    assert container["resources"]["requests"][gpu] == container["resources"]["limits"][gpu]


def test_the_image_is_built_from_nothing_but_what_the_dockerfile_copies():
    copied = re.findall(r"^COPY (.+) \./\S*$", (GKE / "Dockerfile").read_text(), re.MULTILINE)
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines and {line[1:] for line in lines if line.startswith("!")} == set(
        " ".join(copied).split()
    )
    assert all((ROOT / path).exists() for path in " ".join(copied).split())


def test_an_edit_of_the_source_does_not_install_the_dependencies_again():
    """A layer is built again when what it copies has changed, and so are all behind it."""
    text = (GKE / "Dockerfile").read_text()
    install, source = text.index("--require-hashes"), text.index("COPY mercury_jax")
    assert text.index("COPY constraints") < install < source
    assert "--require-hashes" not in text[source:] and "--no-deps" in text[source:]
