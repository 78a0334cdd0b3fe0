#!/usr/bin/env python3
"""Runs the tests that the support matrix names and writes docs/support_matrix.md from what comes of
them: `make matrix`.

The claims are data, in tests/python/coverage_cases.py and coverage_options.py. A claim holds if
every test that it names was run and passed; one that is missing, was skipped or failed makes it
red. Exit status: 0; 1 if a claim does not hold; 2 for wrong arguments. Runs with the Python that
has zensync and torch.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "tests/python"
PAGE = ROOT / "docs/support_matrix.md"
GREEN, STATED, FAILED = "works", "refused or limited, as stated", "FAILED"
TIMEOUT_S = 900  # for the tests of one file
WRONG_NAME = 4  # exit status of pytest

Outcomes = Mapping[str, str]  # "file::function[parameters]" → "passed", "failed", "skipped"


@dataclass(frozen=True)
class Row:
    """A claim and what became of it. why: of a failure."""

    case: str
    way: str
    says: str
    tests: tuple[str, ...]
    result: str
    why: str = ""


def outcomes_of(report: Path) -> dict[str, str]:
    """Outcomes of a JUnit report of pytest."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.attrib["classname"].rpartition(".")[2] + ".py::" + case.attrib["name"]
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in kinds and outcome == "passed" else outcome
        if found.get(name, "passed") == "passed":
            found[name] = outcome
    return found


def merged(parts: Iterable[Outcomes]) -> dict[str, str]:
    """All outcomes; of a test that ran more than once, one that did not pass."""
    found: dict[str, str] = {}
    for part in parts:
        for name, outcome in part.items():
            if found.get(name, "passed") == "passed":
                found[name] = outcome
    return found


def judge(tests: Iterable[str], outcomes: Outcomes) -> str:
    """Why a claim does not hold; "" if all its tests passed. No tests: it does not hold."""
    wanted = list(tests)
    if not wanted:
        return "no test is named"
    for test in wanted:
        mine = [
            outcome
            for name, outcome in outcomes.items()
            if name == test or ("[" not in test and name.startswith(test + "["))
        ]
        if not mine:
            return f"{test} did not run"
        bad = sorted({outcome for outcome in mine if outcome != "passed"})
        if bad:
            return f"{test} {', '.join(bad)}"
    return ""


def row_of(
    case: str, way: str, claim: tuple[str, bool], tests: tuple[str, ...], seen: Outcomes
) -> Row:
    """claim: its words, and whether it says that it works."""
    why = judge(tests, seen)
    result = FAILED if why else GREEN if claim[1] else STATED
    return Row(case, way, claim[0], tests, result, why)


def case_rows(cases: Iterable[Any], outcomes: Outcomes) -> list[Row]:
    """A row for each case."""
    return [
        row_of(
            f"{case.name}: {case.seen}",
            ", ".join(case.ways),
            (case.does, case.works),
            case.tests,
            outcomes,
        )
        for case in cases
    ]


def option_rows(data: Any, outcomes: Outcomes) -> list[list[Row]]:
    """For each option a row for each way."""
    table = []
    for option, entries in data.OPTIONS.items():
        line = []
        for way in data.WAYS:
            entry = entries.get(way, "–")
            if isinstance(entry, str):
                line.append(Row(option, way, entry, (), "–"))
            elif isinstance(entry, tuple):
                line.append(row_of(option, way, (GREEN, True), entry, outcomes))
            else:
                line.append(row_of(option, way, (entry.words, False), entry.tests, outcomes))
        table.append(line)
    return table


def tests_named(cases: Iterable[Any], data: Any) -> list[str]:
    """All tests of the claims, each once."""
    found = dict.fromkeys(test for case in cases for test in case.tests)
    for entries in data.OPTIONS.values():
        for entry in entries.values():
            if not isinstance(entry, str):
                found.update(dict.fromkeys(entry if isinstance(entry, tuple) else entry.tests))
    return list(found)


def run_tests(tests: Iterable[str], jobs: int = 1) -> dict[str, str]:
    """Outcomes of the tests, file by file, `jobs` of them at once."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.split("::")[0], []).append(f"{FOLDER}/{test}")
    with ThreadPoolExecutor(jobs) as pool:
        return merged(pool.map(_run_file, by_file.values()))


def _run_file(names: list[str]) -> dict[str, str]:
    """Outcomes of tests of one file: a test that does not exist must not hide others."""
    print(f"== {names[0].split('::')[0]}: {len(names)} named", flush=True)
    outcomes, status = _run(names)
    if status == WRONG_NAME and len(names) > 1:  # pytest ran none of them
        for name in names:
            outcomes.update(_run([name])[0])
    return outcomes


def _run(names: list[str]) -> tuple[dict[str, str], int]:
    """Outcomes, and pytest's exit status; 124 if it had to be stopped."""
    with tempfile.TemporaryDirectory(prefix="zensync-matrix-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", f"--junitxml={report}", *names]
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"stopped after {TIMEOUT_S} s", flush=True)
            status = 124
        return (outcomes_of(report) if report.exists() else {}), status


def _tests_cell(tests: Iterable[str]) -> str:
    return "<br>".join(f"`{test.replace('|', '/')}`" for test in tests)


def _case_lines(title: str, rows: Iterable[Row]) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield "| case | way | what zensync does | result | tests |"
    yield "|---|---|---|---|---|"
    for row in rows:
        result = f"**{FAILED}**: {row.why}" if row.result == FAILED else row.result
        yield f"| {row.case} | {row.way} | {row.says} | {result} | {_tests_cell(row.tests)} |"


def _option_lines(table: list[list[Row]]) -> Iterator[str]:
    yield "\n## Options and ways\n"
    yield "| option | " + " | ".join(row.way for row in table[0]) + " | tests |"
    yield "|---" * (len(table[0]) + 2) + "|"
    for line in table:
        cells = [f"**{FAILED}**: {row.why}" if row.result == FAILED else row.says for row in line]
        tests = dict.fromkeys(test for row in line for test in row.tests)
        yield f"| {line[0].case} | " + " | ".join(cells) + f" | {_tests_cell(tests)} |"


def page(symptoms: list[Row], habits: list[Row], table: list[list[Row]], about: str) -> str:
    """The whole of docs/support_matrix.md."""
    rows = [*symptoms, *habits, *(row for line in table for row in line)]
    count = {word: sum(row.result == word for row in rows) for word in (GREEN, STATED, FAILED)}
    head = [
        "# Support matrix\n",
        "Written by `make matrix` from the outcomes of the tests that it names, which are in",
        "`tests/python` and run real processes: do not edit. The claims are in its files",
        "`coverage_cases.py` and `coverage_options.py`; one whose tests did not run has failed.\n",
        about + "\n",
        f"{count[GREEN]} work, {count[STATED]} are refused or limited as stated, "
        f"{count[FAILED]} failed.",
    ]
    lines = [
        *head,
        *_case_lines("What people run into", symptoms),
        *_case_lines("What torch itself does", habits),
        *_option_lines(table),
    ]
    return "\n".join(lines) + "\n"


def about() -> str:
    """Date and versions."""
    import platform

    import torch
    import zensync

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"zensync {zensync.__version__}, {today}."
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="only names the tests")
    parser.add_argument(
        "--report", type=Path, nargs="+", help="judges JUnit reports of pytest instead of running"
    )
    parser.add_argument("--jobs", type=int, default=1, help="files of tests that run at once")
    parser.add_argument("--page", type=Path, default=PAGE, help="what to write")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / FOLDER))
    import coverage_cases
    import coverage_options

    cases = [*coverage_cases.SYMPTOMS, *coverage_options.HABITS]
    tests = tests_named(cases, coverage_options)
    if arguments.list:
        print("\n".join(tests))
        return 0
    if arguments.report:
        outcomes = merged(map(outcomes_of, arguments.report))
    else:
        outcomes = run_tests(tests, arguments.jobs)
    symptoms = case_rows(coverage_cases.SYMPTOMS, outcomes)
    habits = case_rows(coverage_options.HABITS, outcomes)
    table = option_rows(coverage_options, outcomes)
    arguments.page.write_text(page(symptoms, habits, table, about()), encoding="utf-8")
    red = [row for row in (*symptoms, *habits, *(row for line in table for row in line)) if row.why]
    for row in red:
        print(f"{row.case} ({row.way}): {row.why}")
    print(
        f"{arguments.page}: {len(red)} claims do not hold" if red else f"{arguments.page}: all hold"
    )
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
