# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import growth
from bench.bound import Layout
from bench.growth import Model, on_line
from bench.results import FOLDER_VARIABLE

CURVE = [(1.0, 10.0), (3.0, 20.0), (7.0, 60.0)]


@pytest.mark.parametrize(("place", "height"), [(1, 10), (2, 15), (3, 20), (5, 40), (7, 60), (9, 80)])
def test_lines_go_through_the_points_and_beyond(place: float, height: float) -> None:
    assert on_line(CURVE, place) == pytest.approx(height)


def test_a_line_without_points_is_nothing_and_never_below() -> None:
    assert on_line([], 5.0) == 0.0
    assert on_line([(4.0, 2.0)], 100.0) == 2.0
    assert on_line([(4.0, 2.0), (8.0, 10.0)], 1.0) == 0.0


def test_one_rank_has_no_sums_and_no_protocol_and_split_attention_has_twice_the_sums() -> None:
    model, quiet = Model(1e9, 1.0, [(1.0, 2.0)], [(1.0, 5.0)]), Model(1e9, 1.0, [], [])
    assert model.step_ms(Layout(), 8, 100) == quiet.step_ms(Layout(), 8, 100)
    for layout, num_sums in ((Layout(2), 16), (Layout(2, True), 32)):
        assert model.step_ms(layout, 8, 100) - quiet.step_ms(layout, 8, 100) == pytest.approx(5.0 + 2.0 * num_sums)


def test_the_model_is_no_kinder_than_the_slowest_measured_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = {"one": [{"batch": 1, "decode": [20.0]}, {"batch": 8, "decode": [20.0]}]}
    speeds = {"one_core": 1e10, "processes": 2e10, "threads": 2e10}
    left = {"prompt": 128, "new": 64, "bandwidth": speeds, "engines": engines}
    (tmp_path / "decode.json").write_text(json.dumps(left))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    growth.main()
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 | whole |")]
    assert [float(row[5]) <= float(row[6]) for row in rows] == [True, True]
    assert rows[1][5].strip() == rows[1][6].strip() == "400.0"


def test_without_figures_nothing_is_modelled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    growth.main()
    assert capsys.readouterr().out.startswith("Not modelled")
