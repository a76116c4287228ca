"""What ``trserve edge`` makes of its flags, without a server."""

import importlib.util
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from tests.edge.onnx.exporting import require_runtime
from trserve import demo
from trserve.cli import main
from trserve.config_sources import gather
from trserve.edge.command import edge_settings
from trserve.errors import ConfigError, ModelUnavailableError

require_runtime()

FAR = "10.0.0.2:9000"
OPENAI = "openai:http://10.0.0.2:8000/v1"
KEYS = {"edge_keys": "edge.keys"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def settings(model="tiny", cloud=OPENAI, environment=None, **flags):
    return edge_settings(model, cloud, gather(flags, None, environment or {}))


def test_only_the_defaults_differ_from_launch():
    found, notes = settings()
    config = found.config()
    assert config.model.models == ("tiny", f"small@{OPENAI}")
    assert (config.placement.device, config.faults.on_peer_loss) == ("onnx", "degrade")
    assert config.router.router == "confidence"
    assert config.model.max_model_len == 1024  # all that the model has
    assert config.endpoint.port == 8000
    assert found.origins["device"] == "trserve edge"
    assert len(notes) == 1 and "exported for ONNX Runtime" in notes[0]


def test_flags_and_the_environment_win():
    environment = {"TRSERVE_ON_PEER_LOSS": "wait", "TRSERVE_MODELS": "a,b"}
    found, _ = settings(environment=environment, max_model_len=256, router="margin", port=1)
    config = found.config()
    assert (config.faults.on_peer_loss, config.model.max_model_len) == ("wait", 256)
    assert (config.router.router, config.endpoint.port) == ("margin", 1)
    assert config.model.models == ("tiny", f"small@{OPENAI}")
    assert found.origins["on_peer_loss"] == "environment TRSERVE_ON_PEER_LOSS"


def test_the_embedded_pair_has_its_router_and_a_threshold_may_be_given():
    pairs = dict(settings()[0].config().router.router_config)
    assert pairs == {"checkpoint": str(demo.router_checkpoint("confidence"))}
    given, _ = settings(router_config=(("threshold", "0.5"),))
    assert dict(given.config().router.router_config) == {**pairs, "threshold": "0.5"}


def test_without_a_trained_router_entropy_decides_and_that_is_said():
    found, notes = settings(cloud=f"big@{OPENAI}")
    assert found.config().router.router == "entropy"
    assert "train-router" in notes[0]
    with pytest.raises(ConfigError, match="checkpoint=FILE"):
        settings(cloud=f"big@{OPENAI}", router="confidence")
    own, notes = settings(cloud=f"big@{OPENAI}", router_config=(("checkpoint", "mine"),))
    assert own.config().router.router == "confidence" and len(notes) == 1


@pytest.mark.parametrize(
    ("cloud", "model"),
    [
        (FAR, f"small@{FAR}"),
        (f"32b@{FAR}", f"32b@{FAR}"),
        ("[::1]:9", "small@[::1]:9"),
        (OPENAI, f"small@{OPENAI}"),
        (f"org/32B@{OPENAI}", f"org/32B@{OPENAI}"),
    ],
)
def test_where_the_cloud_is_and_what_it_is_called(cloud, model):
    assert settings(cloud=cloud, **KEYS)[0].config().model.models[1] == model


@pytest.mark.parametrize("cloud", ["", "host", "host:99999", "a@edge", "openai:host", "http://x"])
def test_what_is_no_address_is_refused(cloud):
    with pytest.raises(ConfigError, match="--cloud"):
        settings(cloud=cloud, **KEYS)


def test_what_is_missing_is_named_before_anything_starts(monkeypatch):
    with pytest.raises(ConfigError, match="trserve keys edge"):
        settings(cloud=FAR)
    with pytest.raises(ConfigError, match="--router r-stitch"):
        settings(router="r-stitch")
    assert settings(cloud=FAR, router="r-stitch", **KEYS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailableError, match=r"pip install 'trserve\[edge\]'"):
        settings()
    assert settings(device="cpu"), "which needs none of it"


def test_a_missing_package_is_exit_code_3_with_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for command in (
        ["edge", "--model", "tiny", "--cloud", OPENAI],
        ["export-onnx", "--model", "tiny", "-o", "out"],
    ):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 3
        assert "pip install 'trserve[edge]'" in done.output


def test_help_shows_these_defaults_and_imports_no_runtime():
    began = time.monotonic()
    script = (
        "import sys; from trserve.cli import main\n"
        "try: main(['edge', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'onnx', 'onnxruntime', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert time.monotonic() - began < 5
    text = " ".join(done.stdout.split())
    assert text.endswith("[]")
    assert "then --on-peer-loss says" in text
    for shown in ("[default: onnx]", "[default: degrade]", "[default: confidence, where there is"):
        assert shown in text
    assert "--edge-listen" not in text.replace("launch --edge-listen", "")
