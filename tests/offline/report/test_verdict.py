"""A report opens with one sentence that names the best system."""

from dataclasses import replace

import pytest

from cluster.offline.report import html
from cluster.offline.report.html import verdict
from cluster.offline.report.table import SystemResult
from tests.offline.report.compared_systems import found, systems


def at(target: float) -> list[SystemResult]:
    """The systems, with the goodput at this target alone."""
    return [
        replace(system, goodputs=tuple(each for each in system.goodputs if each.target == target))
        for system in systems()
    ]


def test_the_best_by_goodput_is_named_with_its_lead() -> None:
    one, other = systems()
    shown = [replace(one, goodputs=(found(4.0, 0.9, 2),)), replace(other, goodputs=(found(8.0, 0.9, 2),))]
    less, most = (each.goodputs[0].per_gpu for each in shown)
    sentence = verdict(shown)
    assert sentence.startswith(f"{other.name} carries {most:.3g} requests/s per ") and "90 % of requests" in sentence
    assert f", {most / less:.2f} times as many as {one.name}, the next" in sentence and less < most


def test_the_highest_target_counts_and_a_system_that_never_reaches_it_has_no_rate() -> None:
    assert min(each.goodputs[-1].rate for each in systems()) == 0.0
    assert verdict(systems()) == verdict(at(max(each.target for each in systems()[0].goodputs)))
    assert verdict(systems()).endswith("; no other system does at any rate that was tried.")


def test_without_goodput_it_is_the_best_attainment() -> None:
    plain = [replace(system, goodputs=()) for system in systems()]
    best, other = sorted(plain, key=lambda each: each.figures.attainment.both, reverse=True)
    shares = [f"{100 * each.figures.attainment.both:.1f} %" for each in (best, other)]
    assert verdict(plain) == (
        f"{best.name} meets the SLOs of {shares[0]} of the requests, {other.name}, the next, of {shares[1]}."
    )
    assert verdict(plain[:1]).endswith("of the requests.") and verdict([]) == ""


@pytest.mark.parametrize("number", [1, 2])
def test_the_page_opens_with_it(number: int) -> None:
    page = html.page("Report", systems()[:number], images=dict.fromkeys(names(number), b"png"))
    opening = page.partition("</h1>")[2].partition("<h2>")[0]
    assert verdict(systems()[:number]).replace("&", "&amp;") in opening


def names(number: int) -> list[str]:
    return [picture.name for picture in html.pictures(systems()[:number])]
