"""`make matrix`: what makes a claim red, and that the page and the claims agree. No test of the
matrix runs here.
"""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import coverage_cases
import coverage_options
import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "scripts/matrix.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["matrix"] = module
    spec.loader.exec_module(module)
    return module


matrix = load_script()
CASES = [*coverage_cases.SYMPTOMS, *coverage_options.HABITS]

REPORT = """<testsuites><testsuite>
<testcase classname="tests.python.test_a" name="test_one[1]"/>
<testcase classname="tests.python.test_a" name="test_one[2]"/>
<testcase classname="tests.python.test_a" name="test_bad"><failure message="x"/></testcase>
<testcase classname="tests.python.test_a" name="test_error"><error message="x"/></testcase>
<testcase classname="tests.python.test_a" name="test_twice"/>
<testcase classname="tests.python.test_a" name="test_twice"><error message="x"/></testcase>
<testcase classname="tests.python.test_a" name="test_some[1]"/>
<testcase classname="tests.python.test_a" name="test_some[2]"><skipped message="x"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def outcomes(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    return matrix.outcomes_of(path)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (["test_a.py::test_one"], ""),
        (["test_a.py::test_one[2]"], ""),
        (["test_a.py::test_one[3]"], "did not run"),
        (["test_a.py::test_on"], "did not run"),
        (["test_a.py::test_missing"], "did not run"),
        (["test_b.py::test_one"], "did not run"),
        (["test_a.py::test_one", "test_a.py::test_bad"], "failed"),
        (["test_a.py::test_error"], "failed"),
        (["test_a.py::test_twice"], "failed"),
        (["test_a.py::test_some"], "skipped"),
        (["test_a.py::test_some[1]"], ""),
        ([], "no test"),
    ],
)
def test_a_claim_is_red_unless_all_its_tests_passed(outcomes, tests, why):
    found = matrix.judge(tests, outcomes)
    assert (found == "") == (why == "")
    assert why in found


def test_of_two_outcomes_the_bad_one_counts():
    good, bad = {"test_a.py::one": "passed"}, {"test_a.py::one": "failed"}
    assert matrix.merged([good, bad]) == matrix.merged([bad, good]) == bad


def test_a_stated_refusal_is_no_success_and_a_failure_is_neither(outcomes):
    fine, bad = ("test_a.py::test_one",), ("test_a.py::test_bad",)
    results = [
        matrix.row_of("case", "way", ("words", works), tests, outcomes).result
        for works in (True, False)
        for tests in (fine, bad)
    ]
    assert results == [matrix.GREEN, matrix.FAILED, matrix.STATED, matrix.FAILED]


def run(monkeypatch, tmp_path, tests, report=REPORT):
    """Exit status and page for one claim."""
    case = coverage_cases.Case("one#1", "seen", "works", ("hook",), tests)
    options = {"option": {"hook": tests, "all_reduce": "none"}}
    monkeypatch.setattr(coverage_cases, "SYMPTOMS", (case,))
    monkeypatch.setattr(coverage_options, "HABITS", ())
    monkeypatch.setattr(coverage_options, "OPTIONS", options)
    path, page = tmp_path / "report.xml", tmp_path / "page.md"
    path.write_text(report)
    monkeypatch.setattr(sys, "argv", ["matrix.py", "--report", str(path), "--page", str(page)])
    return matrix.main(), page.read_text()


def test_the_command_fails_if_a_claim_does_not_hold(monkeypatch, tmp_path):
    status, page = run(monkeypatch, tmp_path, ("test_a.py::test_one",))
    assert status == 0
    assert "2 work, 0 are refused or limited as stated, 0 failed" in page
    assert "torch " in page
    assert re.search(r"\d{4}-\d\d-\d\d", page)
    for tests in (("test_a.py::test_gone",), ("test_a.py::test_one", "test_a.py::test_bad"), ()):
        status, page = run(monkeypatch, tmp_path, tests)
        assert status == 1
        assert "0 work, 0 are refused or limited as stated, 2 failed" in page
    status, page = run(monkeypatch, tmp_path, ("test_a.py::test_one",), "<testsuites/>")
    assert status == 1, "nothing ran"


def test_a_wrong_name_hides_no_other_test(monkeypatch):
    """Of pytest itself: one wrong name, and nothing of that call runs."""
    ran = []

    def fake(names):
        ran.append(names)
        if "tests/python/test_a.py::gone" in names:
            return {}, matrix.WRONG_NAME
        return {names[0].rpartition("/")[2]: "passed"}, 0

    monkeypatch.setattr(matrix, "_run", fake)
    found = matrix.run_tests(["test_a.py::gone", "test_a.py::there", "test_b.py::other"])
    assert found == {"test_a.py::there": "passed", "test_b.py::other": "passed"}
    assert len(ran) == 4


def test_the_status_of_a_wrong_name_is_pytests():
    outcomes, status = matrix._run(["tests/python/test_matrix.py::gone"])
    assert status == matrix.WRONG_NAME
    assert outcomes == {}


def functions_of(file):
    text = (ROOT / "tests/python" / file).read_text(encoding="utf-8")
    return set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))


def test_every_test_that_is_named_exists():
    for test in matrix.tests_named(CASES, coverage_options):
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions_of(file), test


def test_every_cell_of_the_matrix_is_in_its_tables():
    """A test of options, groups, compilers or Join that no claim names would show nothing."""
    named = matrix.tests_named(CASES, coverage_options)
    for module in ("options", "groups", "compile", "join", "users"):
        cells = importlib.import_module(f"test_matrix_{module}").CELLS
        for cell in cells:
            assert f"test_matrix_{module}.py::test_{module}[{cell}]" in named, (module, cell)


def test_the_page_is_that_of_the_claims():
    """Written again whenever claims change; outcomes are those of `make matrix`."""
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert ", 0 failed." in page
    for case in CASES:
        assert f"| {case.name}: {case.seen} |" in page, case.name
    for option in coverage_options.OPTIONS:
        assert f"| {option} |" in page, option


def test_cases_say_what_they_are():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert case.seen
        assert set(case.ways) <= set(coverage_options.WAYS)
        assert not case.works or case.does.startswith("works"), case.name
    missing = SimpleNamespace(name="x", seen="y", does="z", ways=(), tests=(), works=True)
    assert matrix.case_rows([missing], {})[0].result == matrix.FAILED
