"""Files under deploy/: they parse, name what there is, and give a drain the time that it takes.

No image is built and nothing is applied to a cluster here; what a tool on this machine can check
without a daemon or a cluster, it checks, and a skipped test says which tool is missing.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from trserve.children import KILL_AFTER_S
from trserve.cli import main
from trserve.config import LaunchConfig
from trserve.config_sources import gather
from trserve.gateway.access import PROBES
from trserve.launch_options import settings_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
IMAGES = [DEPLOY / "docker" / name for name in ("Dockerfile", "Dockerfile.cuda")]
UNIT = DEPLOY / "systemd" / "trserve.service"
KUBERNETES = DEPLOY / "kubernetes"
INSTRUCTIONS = {
    *("FROM", "RUN", "ARG", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "STOPSIGNAL"),
    *("HEALTHCHECK", "ENTRYPOINT", "CMD"),
}


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def config_of(arguments: list[str]) -> LaunchConfig:
    """What `trserve launch` would make of them."""
    command = main.commands["launch"]
    assert arguments[0] == "launch"
    context = command.make_context("launch", list(arguments[1:]))
    context.params.pop("config_file")
    return settings_of(dict(context.params)).config()


def instructions(path: Path) -> list[tuple[str, str]]:
    """Each with its words; comments are gone and continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
def test_all_yaml_parses(path):
    assert list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_images(path):
    found = instructions(path)
    assert {name for name, _ in found} <= INSTRUCTIONS
    said = dict(found)  # the last of each, so the last stage's
    for name in ("ENTRYPOINT", "CMD"):
        assert isinstance(yaml.safe_load(said[name]), list), "no shell between signals and launcher"
    assert said["ENTRYPOINT"] == '["trserve"]'
    config_of(yaml.safe_load(said["CMD"]))
    assert said["STOPSIGNAL"] == "SIGTERM"
    assert int(said["USER"]) > 0
    assert "/readyz" in said["HEALTHCHECK"]
    assert "TRSERVE_HOST=0.0.0.0" in said["ENV"]
    for name, words in found:
        if name == "COPY" and not words.startswith("--from"):
            assert all((ROOT / word).exists() for word in words.split()[:-1])
    wanted = re.search(r'"\.\[(.*)\]"', path.read_text())
    extras = ConfigParser()
    extras.read(ROOT / "setup.cfg")
    assert wanted is not None
    assert set(wanted[1].split(",")) <= set(extras["options.extras_require"])
    ignored = path.with_name(path.name + ".dockerignore").read_text().splitlines()
    copied = " ".join(words for name, words in found if name == "COPY")
    assert ignored[0] == "*"
    assert all(line[1:] in copied for line in ignored if line.startswith("!"))


def test_compose():
    content = parsed(DEPLOY / "docker" / "compose.yaml")
    for service in content["services"].values():
        config = config_of(service["command"])
        environment = {
            name: re.sub(r"\$\{\w+:[-?](.*)\}", r"\1", text)
            for name, text in service["environment"].items()
        }
        assert gather({}, None, environment).notes == ()
        drain = gather({}, None, environment).config().faults.drain_timeout
        assert config.placement.device in ("cpu", "cuda")
        assert drain + KILL_AFTER_S < int(service["stop_grace_period"].removesuffix("s"))
        assert service["stop_signal"] == "SIGTERM"
        build = service["build"]
        folder = (DEPLOY / "docker" / build["context"]).resolve()
        assert (folder / build["dockerfile"]) in IMAGES


def unit() -> ConfigParser:
    found = ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read(UNIT)
    return found


def test_systemd_unit():
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert service["KillMode"] == "mixed"
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.startswith("/")
    assert config_of(arguments).faults.drain_timeout + KILL_AFTER_S < int(service["TimeoutStopSec"])
    assert set(service["RestartPreventExitStatus"].split()) == {"2", "3", "4"}
    assert int(service["LimitNOFILE"]) >= 1344


def test_kubernetes():
    deployment, service, config = (
        parsed(KUBERNETES / f"{name}.yaml") for name in ("deployment", "service", "config")
    )
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in PROBES, "a probe has no key"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert labels.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["selector"] == labels
    (port,) = container["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert pod["enableServiceLinks"] is False
    file = next(v for v in pod["volumes"] if "configMap" in v)
    assert file["configMap"]["name"] == config["metadata"]["name"]
    assert set(parsed(KUBERNETES / "kustomization.yaml")["resources"]) == {
        path.name for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml"
    }


def test_the_settings_of_kubernetes_and_its_grace_period(tmp_path):
    pod = parsed(KUBERNETES / "deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    file = tmp_path / "server.yaml"
    file.write_text(parsed(KUBERNETES / "config.yaml")["data"]["server.yaml"])
    config = gather({}, file, {}).config()
    assert config.endpoint.host == "0.0.0.0"
    assert config.endpoint.port == container["ports"][0]["containerPort"]
    wait_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    taken_s = wait_s + config.faults.drain_timeout + KILL_AFTER_S
    assert taken_s < pod["terminationGracePeriodSeconds"]
    shown = [*container["args"][:-1], str(file)]
    done = CliRunner().invoke(main, ["config", "show", *shown[1:]])
    assert done.exit_code == 0, done.output


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_systemd_takes_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing: the unit was parsed, not verified")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/trserve/bin/trserve", sys.executable))
    done = run("systemd-analyze", "verify", str(copy))
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, ours) == (0, [])


def test_kustomize_takes_the_manifests():
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is missing: the manifests were parsed, not put together")
    done = run("kubectl", "kustomize", str(KUBERNETES))
    assert done.returncode == 0, done.stderr
    kinds = {each["kind"] for each in yaml.safe_load_all(done.stdout)}
    assert kinds == {"ConfigMap", "Deployment", "Service"}


def test_docker_takes_compose():
    if shutil.which("docker") is None or run("docker", "compose", "version").returncode:
        pytest.skip("docker compose is missing: the file was parsed, and no image was built")
    done = run("docker", "compose", "-f", str(DEPLOY / "docker" / "compose.yaml"), "config", "-q")
    assert done.returncode == 0, done.stderr
