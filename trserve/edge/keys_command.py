"""``trserve keys edge``: the key files of a link between two hosts. Knows no sockets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from trserve.errors import StartupError


def edge_command() -> click.Command:
    """The command."""
    path = click.Path(dir_okay=False, path_type=Path)
    return click.Command(
        "edge",
        params=[
            click.Argument(["server_file"], type=path),
            click.Argument(["client_file"], type=path),
            click.Option(
                ["--name"],
                default="",
                help="What the server's log calls the client.  [CLIENT_FILE]",
            ),
        ],
        callback=_make,
        help="Make a client's key file for a link between hosts, and let it in at the server's.\n\n"
        "SERVER_FILE is for the side that listens (`launch --edge-listen --edge-keys`) and is made "
        "if it is not there; CLIENT_FILE is for the side that dials. Both are secret, and readable "
        "by you only. Bring CLIENT_FILE to the other host; a server that runs knows of a further "
        "client once it is started again.",
        short_help="Make the key files of a link between two hosts.",
    )


def _make(server_file: Path, client_file: Path, name: str) -> None:
    try:
        click.echo(make_files(server_file, client_file, name or client_file.stem))
    except StartupError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None


def make_files(server_file: Path, client_file: Path, name: str) -> str:
    """Write both files; returns what to tell.

    Raises ConfigError if SERVER_FILE is there and is none, FileExistsError if CLIENT_FILE is there.
    """
    from trserve.edge import curve

    if client_file.exists():
        raise FileExistsError(17, "is there already", str(client_file))
    label = " ".join(name.split()).encode("ascii", "replace").decode()[:64]
    client = curve.KeyPair.new()
    made = not server_file.exists()
    if made:
        keys = curve.ServerKeys(curve.KeyPair.new(), {})
    else:
        keys = curve.read_server_keys(str(server_file))
    keys = replace(keys, clients={**keys.clients, client.public: label})
    curve.write_server_keys(server_file, keys)
    curve.write_client_keys(client_file, curve.ClientKeys(client, keys.pair.public))
    verb = "made" if made else "now lets it in"
    return (
        f"{client_file} is the key of {label} ({curve.fingerprint(client.public)}); "
        f"{server_file} {verb} ({curve.fingerprint(keys.pair.public)})"
    )
