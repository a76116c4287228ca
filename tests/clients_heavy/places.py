"""Where a client is installed and run: a folder of its own, which nothing else is in.

Installs by package name, with the pins that a client names; what is there already with the same
pins is used again. Knows no client and no server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2] / ".clients"
"""Git-ignored; to remove it is to install everything anew."""
INSTALL_TIMEOUT_S = 900
RUN_TIMEOUT_S = 300
_SHOWN = 600


class Unavailable(Exception):
    """The client cannot be had here; says why."""


class Place:
    """The folder of one client."""

    def __init__(self, name: str) -> None:
        self.folder = ROOT / name
        self.work = self.folder / "work"

    def clear(self) -> None:
        """An empty folder for what a run writes."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)

    def run(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        timeout_s: float = RUN_TIMEOUT_S,
    ) -> str:
        """What the command writes; AssertionError with its end if it fails or hangs."""
        words = [str(word) for word in command]
        try:
            done = subprocess.run(
                words,
                cwd=self.work,
                env={**_clean_environment(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{words[0]} did not end within {timeout_s:.0f} s") from None
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-_SHOWN:]}"
        return done.stdout


class PythonPlace(Place):
    """A virtual environment with what ``requirements`` name."""

    def install(self, *requirements: str) -> None:
        """Raises Unavailable where the package index has none for this Python."""
        stamp = self.folder / "requirements.txt"
        wanted = "\n".join(requirements) + "\n"
        if stamp.exists() and stamp.read_text() == wanted:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._install([sys.executable, "-m", "venv", str(self.folder)])
        self._install([*self.pip, "install", "--quiet", *requirements])
        stamp.write_text(wanted)

    def download(self, requirement: str) -> Path:
        """The wheel of ``requirement`` alone."""
        wheels = self.folder / "wheels"
        if not (found := sorted(wheels.glob("*.whl"))):
            options = ["--quiet", "--no-deps", "--dest", str(wheels)]
            self._install([*self.pip, "download", *options, requirement])
            found = sorted(wheels.glob("*.whl"))
        return found[0]

    @property
    def pip(self) -> list[str]:
        """The command."""
        return [str(self.program("python")), "-m", "pip"]

    def program(self, name: str) -> Path:
        """A command of the environment."""
        return self.folder / "bin" / name

    def _install(self, command: list[str]) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise Unavailable((lines or ["it could not be installed"])[-1][:200])


class NodePlace(Place):
    """A folder with Node packages."""

    def install(self, *packages: str) -> str:
        """Raises Unavailable where there is no Node 20 or newer; returns its version."""
        node, npm = shutil.which("node"), shutil.which("npm")
        if node is None or npm is None:
            raise Unavailable("needs Node 20 or newer, with npm")
        version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout.strip()
        if int(version.removeprefix("v").partition(".")[0]) < 20:
            raise Unavailable(f"needs Node 20 or newer; this is {version}")
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = self.folder / "packages.txt"
        wanted = "\n".join(packages) + "\n"
        if not stamp.exists() or stamp.read_text() != wanted:
            (self.folder / "package.json").write_text('{"private": true}\n')
            command = [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", *packages]
            done = subprocess.run(
                command,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise Unavailable("npm could not install it")
            stamp.write_text(wanted)
        return version


def _clean_environment() -> dict[str, str]:
    """Ours without what is meant for this project, and without a hub to ask."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRSERVE_", "PYTEST_"))}
    kept.pop("PYTHONPATH", None)
    return {**kept, "HF_HUB_DISABLE_TELEMETRY": "1", "OPENAI_API_KEY": "any", "NO_COLOR": "1"}
