"""Key files of links: made, private, read; whatever is wrong with one is said, without a secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from trserve.cli import main
from trserve.edge import curve
from trserve.edge.keys_command import make_files
from trserve.errors import ConfigError


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    server, client = tmp_path / "far.keys", tmp_path / "home.keys"
    make_files(server, client, "laptop")
    return server, client


def test_the_two_sides_of_a_link_know_each_other(files: tuple[Path, Path]) -> None:
    server, client = (curve.read_server_keys(str(files[0])), curve.read_client_keys(str(files[1])))
    assert client.server == server.pair.public
    assert server.clients == {client.pair.public: "laptop"}
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_further_clients_are_added_and_none_is_overwritten(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    before = curve.read_server_keys(str(files[0]))
    done = CliRunner().invoke(main, ["keys", "edge", str(files[0]), str(tmp_path / "phone")])
    assert done.exit_code == 0, done.output
    after = curve.read_server_keys(str(files[0]))
    assert sorted(after.clients.values()) == ["laptop", "phone"]
    assert after.pair == before.pair
    assert after.pair.secret.hex() not in done.output
    again = CliRunner().invoke(main, ["keys", "edge", str(files[0]), str(files[1])])
    assert again.exit_code == 1 and "is there already" in again.output


def test_what_is_wrong_with_a_file_is_said(files: tuple[Path, Path], tmp_path: Path) -> None:
    server, client = files
    with pytest.raises(ConfigError, match="is the client's; this side needs the server's"):
        curve.read_server_keys(str(client))
    with pytest.raises(ConfigError, match="trserve keys edge"):
        curve.read_client_keys("")
    with pytest.raises(ConfigError, match="No such file"):
        curve.read_client_keys(str(tmp_path / "none"))
    secret = curve.read_server_keys(str(server)).pair.secret.hex()
    text = server.read_text()
    for changed, message in (
        (text.replace(secret, "ab" * 31), "64 hexadecimal"),
        (text.replace(secret, "ab" * 32), "two pairs"),
        ("role server\n", "lets nobody in"),
        ("nonsense", "no file of edge keys"),
    ):
        server.write_text(changed)
        with pytest.raises(ConfigError, match=message) as error:
            curve.read_server_keys(str(server))
        assert secret not in str(error.value)
    client.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read it; chmod 600"):
        curve.read_client_keys(str(client))
