"""The command line: `zensync info | demo | bench | observe`, or `--version`.

Each loads only its own.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from . import _core, _settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zensync {_core.__version__}")
        raise typer.Exit


VersionFlag = Annotated[
    bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
]


@app.callback()
def commands(version: VersionFlag = False) -> None:
    """Lossless sparse gradient synchronisation for PyTorch."""


def collect_info() -> dict[str, Any]:
    """What this installation can do, and what is active: versions, kernels, drivers, settings.

    problems: what the environment asks for and cannot be had; a State would refuse it.
    """
    facts: dict[str, Any] = dict(_core.info())
    facts["python"] = platform.python_version()
    facts["torch"] = _torch_version()
    facts["environment"] = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("ZENSYNC_")
    }
    facts["driver_active"] = None if _settings.transport_problem() else _settings.transport()
    facts["disabled"] = _settings.is_disabled()
    facts["problems"] = _settings.problems()
    return facts


def active_line(facts: dict[str, Any]) -> str:
    """One line: what a State here would use."""
    if facts["disabled"]:
        return "zensync: switched off by ZENSYNC_DISABLE=1; the group's own all-reduce is used"
    driver = facts["driver_active"] or "none"
    kernels = facts["kernels_active"] or "none"
    return f"zensync {facts['version']}: driver {driver} (CPU tensors), kernels {kernels}"


def _torch_version() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return str(torch.__version__)


@app.command()
def info(as_json: JsonFlag = False) -> None:
    """Shows the version, the kernels in use, the drivers built in, and what is set.

    Exit status 2 where the environment asks for what is not there.
    """
    facts = collect_info()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print_info(facts)
    for problem in facts["problems"]:
        typer.echo(f"zensync: {problem}", err=True)
    if facts["problems"]:
        raise typer.Exit(2)


def _print_info(facts: dict[str, Any]) -> None:
    active = facts["kernels_active"] or "none"
    driver = facts["driver_active"] or "none"
    typer.echo(active_line(facts))
    typer.echo(f"python    {facts['python']}")
    typer.echo(f"torch     {facts['torch'] or 'not installed'}")
    typer.echo(f"kernels   {active} (usable: {', '.join(facts['kernels'])})")
    typer.echo(f"SIMD      {'built in' if facts['simd'] else 'not built in'}")
    typer.echo(f"drivers   {driver} (built in: {', '.join(facts['drivers'])})")
    for name, value in facts["environment"].items():
        typer.echo(f"{name}={value}")


# Their own parsers read their options, so that there is one definition of each.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASS_ON)
def demo(context: typer.Context) -> None:
    """Trains a model on real text three ways and compares them (`zensync demo --help`)."""
    from .demo.__main__ import main as run

    _run(run, "demo", context.args)


@app.command(context_settings=_PASS_ON)
def bench(context: typer.Context) -> None:
    """Measures synchronisations beside torch's, and parts of them (`zensync bench --help`)."""
    from .bench import main as run

    _run(run, "bench", context.args)


@app.command(context_settings=_PASS_ON)
def observe(context: typer.Context) -> None:
    """Runs a training script as it is, and says what zensync would change (`--help`)."""
    try:
        from ._observe_script import main as run
    except ImportError as why:
        typer.echo(f"zensync observe: PyTorch cannot be imported here ({why})", err=True)
        raise typer.Exit(2) from why

    _run(run, "observe", context.args)


def _run(run: Callable[[], int | None], command: str, arguments: list[str]) -> None:
    sys.argv = [f"zensync {command}", *arguments]
    raise typer.Exit(run() or 0)


def main() -> None:
    """Runs the command line; errors of zensync become one line and exit status 2."""
    from .errors import Error

    try:
        app()
    except Error as why:
        typer.echo(f"zensync: {why}", err=True)
        sys.exit(2)
