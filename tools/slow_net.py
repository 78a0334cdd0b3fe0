#!/usr/bin/env python3
"""Makes, uses and removes a slow-link network from a shell; root only, Python alone.

    slow_net.py run --hosts 4 -- COMMAND …     one COMMAND per host, at once; then all is removed
    slow_net.py run --hosts 4 --ranks-per-host 2 -- COMMAND …    two COMMANDs per host
    slow_net.py make --hosts 4                 stays until `remove`, or until the shell that called
    slow_net.py exec --hosts 4 --host 1 -- COMMAND …
    slow_net.py down --hosts 4 --host 1        pulls the cable of host 1; --silent: drops all there
    slow_net.py up --hosts 4 --host 1          mends it
    slow_net.py counters --hosts 4             bytes and packets of every host's card, as JSON
    slow_net.py remove --hosts 4
    slow_net.py clean                          removes what dead owners left

A network belongs to the process that calls this (a shell): call `make` and what uses it from one
shell; behind sudo or timeout give each the same `--owner $$`.

Commands see ZS_HOST, ZS_HOSTS, ZS_RATE, ZS_BURST, MASTER_ADDR and GLOO_SOCKET_IFNAME; those of
`run` also ZS_RANK, RANK, LOCAL_RANK, WORLD_SIZE, MASTER_PORT, and they end with a killed `run`.
What they have started, and the namespaces, stay until the next `make`, `run` or `clean`, which ends
and removes them. The work is done by zensync/lab/slow_net.py of this checkout, built or not.

Exit status: 0, or that of the COMMANDs; 1 if the network cannot be had; 2 for wrong arguments; 130
if interrupted.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

_ACTIONS = ("make", "run", "exec", "down", "up", "counters", "remove", "clean")
_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_LIBRARY = Path(__file__).resolve().parents[1] / "python/zensync/lab/slow_net.py"


def _load() -> Any:
    # By path: importing the package would need its compiled core.
    spec = importlib.util.spec_from_file_location("zensync_slow_net", _LIBRARY)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {_LIBRARY}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=_ACTIONS)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--host", type=int, default=0, help="of `exec`, `down` and `up`")
    parser.add_argument("--silent", action="store_true", help="`down` without loss of carrier")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="commands a host of `run`")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--burst", default="128kb")
    parser.add_argument("--limit", default="8mb")
    parser.add_argument("--label", default="a", help="tells networks of one owner apart")
    parser.add_argument(
        "--owner", type=int, help="process that the network lives as long as (the caller)"
    )
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    args.command = words[at + 1 :]
    return args


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _run_everywhere(net: Any, command: list[str], ranks_per_host: int) -> int:
    places = [(host, local) for host in range(net.hosts) for local in range(ranks_per_host)]
    with net:
        children = [
            subprocess.Popen(
                net.command(host, command),
                env=os.environ | net.rank_environment(host, local, ranks_per_host),
                preexec_fn=_die_with_parent,
            )
            for host, local in places
        ]
        return max(abs(child.wait()) for child in children)


def _act(library: Any, args: argparse.Namespace) -> int:
    if args.action == "clean":
        print(json.dumps(library.remove_stale()))
        return 0
    owner = args.owner
    if owner is None and args.action != "run":
        owner = os.getppid()
    spec = library.LinkSpec(rate=args.rate, burst=args.burst, limit=args.limit)
    net = library.SlowNet(args.hosts, spec, label=args.label, owner=owner)
    hosts = range(net.hosts)
    net.namespace(args.host)  # which refuses a host that is not there
    if args.action == "run":
        return _run_everywhere(net, args.command, args.ranks_per_host)
    if args.action not in ("make", "remove") and not net.is_made():
        raise library.SlowNetError(
            f"process {owner} has no such network of {args.hosts} hosts: `make` it from the same "
            "shell, or give both the same --owner"
        )
    if args.action == "exec":
        environment = os.environ | net.environment(args.host)
        command = net.command(args.host, args.command)
        return subprocess.run(command, env=environment, check=False).returncode
    if args.action == "make":
        net.make()
        print(json.dumps({net.namespace(h): net.address(h) for h in hosts}, indent=1))
    elif args.action == "counters":
        print(json.dumps([asdict(net.counters(h)) for h in hosts], indent=1))
    elif args.action in ("down", "up"):
        net.set_link(args.host, args.action == "up", silent=args.silent)
    else:
        net.remove()
    return 0


def main() -> int:
    """The command; returns the exit status."""
    args = _arguments()
    if args.ranks_per_host < 1:
        print(f"slow_net: --ranks-per-host {args.ranks_per_host}: at least 1", file=sys.stderr)
        return 2
    if args.action in ("run", "exec") and not args.command:
        print("slow_net: what is to run? (… -- COMMAND)", file=sys.stderr)
        return 2
    library = _load()
    try:
        return _act(library, args)
    except library.SlowNetError as error:
        print(f"slow_net: {error}", file=sys.stderr)
        return 2 if isinstance(error, library.ArgumentsError) else 1
    except KeyboardInterrupt:  # processes and network are gone by now
        print("slow_net: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
