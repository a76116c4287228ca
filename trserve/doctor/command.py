"""``trserve doctor``: every check, in the order in which a start would meet what is wrong.

Starts no server. Knows how a report is printed, not what a finding means.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import click
import orjson

from trserve.config import LaunchConfig, config_from_flags
from trserve.config_sources import gather
from trserve.doctor import findings, limits, software
from trserve.doctor.checks import Diagnosed
from trserve.doctor.findings import Finding, Level
from trserve.errors import StartupError
from trserve.gpus.torch_build import find_torch
from trserve.launch_options import settings_of

_COLOURS = {Level.WARNING: "yellow", Level.FAULT: "red"}


def doctor(values: dict[str, Any], *, as_json: bool) -> int:
    """Print what is found of the settings that ``values`` of flags give; returns the exit code."""
    found = list(diagnose(values))
    if as_json:
        click.echo(orjson.dumps(findings.to_json(found), option=orjson.OPT_INDENT_2))
        return findings.exit_code(found)
    for finding in found:
        for line in findings.lines(finding):
            click.echo(click.style(line, fg=_COLOURS.get(finding.level)) if _coloured() else line)
    click.echo(findings.summary(found))
    return findings.exit_code(found)


def _coloured() -> bool:
    return "NO_COLOR" not in os.environ  # and click strips colours where there is no terminal


def diagnose(values: dict[str, Any]) -> Iterator[Finding]:
    """All findings."""
    yield software.check_python()
    config, told = _configuration(values)
    yield from told
    build = find_torch()
    yield software.check_torch(build, config.placement.device)
    yield software.check_kernels()
    diagnosed = Diagnosed(config, build.cuda if build else None)
    diagnosed.run()
    yield from software.check_optional(config.placement.device, diagnosed.gpu_count)
    yield from diagnosed.findings
    yield from _limits(diagnosed, diagnosed.gpu_count)


def _limits(diagnosed: Diagnosed, gpu_count: int) -> Iterator[Finding]:
    config = diagnosed.config
    yield limits.check_port(config.endpoint.host, config.endpoint.port)
    yield limits.check_files(config)
    yield limits.check_shm(gpu_count)
    if diagnosed.plan is not None:
        yield limits.check_slab(diagnosed.plan.layout)
    if needs := diagnosed.needs:
        yield limits.check_address_space(needs)
        yield limits.check_memory_limit(needs)


def _configuration(values: dict[str, Any]) -> tuple[LaunchConfig, list[Finding]]:
    """The configuration, or, where it is wrong, what of it can be looked at all the same."""
    try:
        settings = settings_of(values)
        config = settings.config()
    except StartupError as error:
        fix = "correct it; `trserve config show --origin` tells where each value comes from"
        fault = Finding.of_error("configuration", error, "--config, TRSERVE_*, flags", fix)
        return _what_is_left(values), [fault]
    notes = [Finding("configuration", Level.WARNING, *_note(note)) for note in settings.notes]
    return config, notes or [Finding("configuration", Level.OK, "no unknown keys")]


def _note(note: str) -> tuple[str, str, str]:
    what, _, fix = note.partition("; ")
    return what, what.partition(" ")[0], fix


def _what_is_left(values: dict[str, Any]) -> LaunchConfig:
    """The flags alone; where they are wrong too, the defaults."""
    given = {name: value for name, value in values.items() if value is not None and value != ()}
    given = {name: value for name, value in given.items() if name not in _STRUCTURED}
    try:
        return gather(given, None, {}).config()
    except StartupError:
        return config_from_flags({})


_STRUCTURED = ("config_file", "router_config", "api_key")
