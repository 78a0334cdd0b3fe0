"""`make claims`: claims and README.md agree; figures are found, judged and kept."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def load_script():
    spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts/claims.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["claims"] = module
    spec.loader.exec_module(module)
    return module


claims = load_script()
MEASUREMENTS, CLAIMS = claims.load_claims()


def test_every_claim_of_the_readme_stands_there():
    assert claims.not_in(README, CLAIMS) == []
    stated = next(claim.readme for claim in CLAIMS if claim.name == "readme_time_dense")
    gone = README.replace(stated, stated.replace("(", "["))
    assert [claim.name for claim in claims.not_in(gone, CLAIMS)] == ["readme_time_dense"]


def measured_cells(text: str) -> list[str]:
    """Figures of README's table of measurements."""
    table = text.split("| per step |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [cell.strip() for line in table for cell in line.strip("|").split("|")[1:]]
    return [cell for cell in cells if re.search(r"\d", cell)]


def test_every_figure_of_the_readmes_table_is_a_claim():
    cells = measured_cells(README)
    assert len(cells) >= 11
    assert set(cells) <= {claim.readme for claim in CLAIMS}


def test_names_are_unique_and_measurements_exist():
    names = [claim.name for claim in CLAIMS] + list(MEASUREMENTS)
    assert len(set(names)) == len(names)
    assert {claim.measurement for claim in CLAIMS} == set(MEASUREMENTS)
    for claim in CLAIMS:
        assert claim.readme or claim.says
        low, high = claim.bounds()
        assert low <= high
        assert (low, high) != (float("-inf"), float("inf"))


def test_a_source_is_a_section_or_a_command():
    for claim in CLAIMS:
        place, _, section = claim.source.partition(", ")
        if place.startswith("zensync "):
            continue
        text = (ROOT / place).read_text(encoding="utf-8")
        assert not section or f"\n## {section}\n" in text, claim
        assert not claim.readme or place == "README.md"


def test_nobody_is_sent_to_an_issue(capsys, monkeypatch):
    for words in (["--list"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["claims.py", *words])
        with contextlib.suppress(SystemExit):
            claims.main()
        shown = capsys.readouterr().out
        assert "make claims" in shown or "demo_bits" in shown
        assert "issue" not in shown.lower()
    assert "issue" not in claims.CLAIMS.read_text(encoding="utf-8").lower()


def claim_of(**fields):
    return claims.Claim("one", "m", "ratio", **fields)


ROWS = [
    {"n": 4, "ratio": 2.0, "ratio_low": 1.5, "ratio_high": 2.5},
    {"n": 8, "ratio": 4.0, "ratio_low": 3.5, "ratio_high": 8.0},
    {"n": 8, "ratio": None},
    {"wall_s": 9.0},
]


@pytest.mark.parametrize(
    ("fields", "figure", "reached"),
    [
        ({"where": {"n": 8}, "at_least": 4}, (4, 3.5, 8), True),
        ({"where": {"n": 8}, "at_least": 4.01}, (4, 3.5, 8), False),
        ({"at_least": 3}, (2, 1.5, 2.5), False),  # the worst counts
        ({"at_most": 3}, (4, 3.5, 8), False),
        ({"at_most": 4}, (4, 3.5, 8), True),
        ({"where": {"n": 4}, "at_most": 0.5, "inverse": True}, (0.5, 0.4, 1 / 1.5), True),
        ({"where": {"n": 4}, "readme": "2.1 MB", "within": 0.05}, (2, 1.5, 2.5), True),
        ({"where": {"n": 4}, "readme": "2.2 (2–3)", "within": 0.05}, (2, 1.5, 2.5), False),
        ({"where": {"n": 4}, "readme": "9.0", "better": "lower"}, (2, 1.5, 2.5), True),
        ({"where": {"n": 4}, "readme": "1.0", "better": "higher"}, (2, 1.5, 2.5), True),
        ({"where": {"n": 4}, "readme": "1.0"}, (2, 1.5, 2.5), False),
        ({"where": {"n": 4}, "readme": "20", "scale": 10}, (20, 15, 25), True),
    ],
)
def test_a_claim_is_judged_by_its_median(fields, figure, reached):
    verdict = claims.judge(claim_of(**fields), claims.Outcome(ROWS))
    assert (verdict["figure"], verdict["low"], verdict["high"]) == pytest.approx(figure)
    assert verdict["reached"] is reached


def test_what_is_missing_or_void_is_not_reached():
    missing = claims.judge(claim_of(where={"n": 5}, at_least=0), claims.Outcome(ROWS))
    assert (missing["reached"], missing["figure"]) == (False, None)
    void = claims.judge(claim_of(at_least=0), claims.Outcome(ROWS, "void"))
    assert (void["reached"], void["figure"], void["note"]) == (False, 2, "void")


def run_of(mode: str, step_s: float) -> dict:
    return {
        "mode": mode,
        "loss": 4.0 if mode == "dense" else 4.002,
        "step_s": [99.0, 99.0, step_s, step_s],  # two are the warm-up
        "wire_bytes_tables": 10 * step_s,
    }


def test_figures_of_the_demo():
    runs = [run_of("dense", 8.0), run_of("sparse", 2.0), run_of("zensync", 0.5)]
    rows = {row["mode"]: row for row in claims.rows_of(runs)}
    assert [rows[mode]["time_ratio"] for mode in rows] == [16, 4, 1]
    assert rows["dense"]["table_share"] == 1 / 16
    assert rows["dense"]["steps_per_s_low"] == 1 / 8
    assert rows["zensync"]["loss_off"] == pytest.approx(0.0005)


def measurement_of(code: str, **fields):
    command = [sys.executable, "-c", code, "--json", "{json}"]
    return claims.Measurement("m", command, timed=False, **fields)


WRITE = (
    "import json, sys; json.dump({'rows': [{'ratio': 2, 'text': 'Moby'}]}, open(sys.argv[2], 'w'))"
)


def test_a_measurement_is_run_and_kept(tmp_path):
    outcome = claims.measure(measurement_of(WRITE, result="kept.json", needs="Moby"), tmp_path)
    assert outcome.rows[0]["ratio"] == 2
    assert outcome.rows[-1]["wall_s"] > 0
    assert json.loads((tmp_path / "kept.json").read_text())["rows"][0]["ratio"] == 2


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (measurement_of("raise SystemExit(2)"), "status 2"),
        (measurement_of("pass"), "wrote no result"),
        (measurement_of(WRITE, needs="Ishmael"), "not 'Ishmael'"),
        (claims.Measurement("m", [sys.executable, "-c", "raise SystemExit(1)"]), "status 1"),
        (claims.Measurement("m", ["/no/such/program"]), "could not be started"),
    ],
)
def test_a_measurement_that_fails_says_so(what, why):
    with pytest.raises(claims.MeasureError, match=why):
        claims.measure(what, None)


def test_a_busy_machine_voids_after_some_tries(monkeypatch, tmp_path):
    busy = WRITE.replace("'ratio'", "'foreign_load': 0.5, 'ratio'")
    outcome = claims.measure(replace(measurement_of(busy), timed=True), None)
    assert "void 3 times" in outcome.note
    assert claims.measure(measurement_of(busy), None).note == ""


@pytest.mark.parametrize(("at_least", "status"), [(2, 0), (3, 1)])
def test_the_command_fails_if_a_claim_falls_short(monkeypatch, tmp_path, capfd, at_least, status):
    one = {"m": measurement_of(WRITE)}
    monkeypatch.setattr(claims, "load_claims", lambda: (one, [claim_of(at_least=at_least)]))
    path = tmp_path / "claims.json"
    monkeypatch.setattr(sys, "argv", ["claims", "--json", str(path)])
    assert claims.main() == status
    kept = json.loads(path.read_text())
    assert kept.keys() == {"machine", "commit", "claims"}
    assert kept["claims"][0]["reached"] is (status == 0)
    assert ("SHORT" in capfd.readouterr().out) is (status == 1)


def test_the_command_lists_and_refuses(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["claims", "--list", "--only", "sync_8x200", "demo_bits"])
    assert claims.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    monkeypatch.setattr(sys, "argv", ["claims", "--only", "nothing"])
    assert claims.main() == 2
    assert "nothing" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["claims", "--json", "/"])
    assert claims.main() == 2
    assert "is a folder" in capsys.readouterr().err
    monkeypatch.setattr(claims, "not_in", lambda *_: [claim_of(readme="5")])
    assert claims.main() == 2
    assert "'5'" in capsys.readouterr().err
