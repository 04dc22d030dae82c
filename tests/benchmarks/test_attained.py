"""Attainment by load: which loads and contenders, and when Diptych counts as below another."""

from benchmarks.elastic import attained, record
from benchmarks.elastic.attained import HELD_OUT, LOADS, MIXED, SCALES, LoadPoint, cells, row
from benchmarks.elastic.contenders import WITH_ADMISSION, contender_named


def test_loads_are_shares_of_the_recorded_goodput_and_held_out_ones_of_the_fleet() -> None:
    found = record.load()
    day, held_out = list(cells(found, ["day"])), list(cells(found, [HELD_OUT]))
    ours = next(each for each in found.results if each.scenario == "day").of(record.OURS)
    assert ours is not None and [each.rate for each in day] == [load * ours.rate for load in LOADS]
    assert [each.load for each in held_out] == list(SCALES)
    names = [each.name for each in day[0].others]
    assert names[2:] == [f"{WITH_ADMISSION} on {names[0]}", f"{WITH_ADMISSION} on {MIXED}"]


def test_more_than_a_point_below_another_is_a_loss() -> None:
    point = LoadPoint("day", 0.9, 1.0, tuple(map(contender_named, attained.HELD_OUT_STATICS)))
    assert "**1.5 below**" in row(point, [0.97, 0.985, 0.5])
    assert "| yes |" in row(point, [0.97, 0.979, 0.5]) and "| - | - | yes |" in row(point, [1.0])
