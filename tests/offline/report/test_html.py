"""The page is self-contained and shows what was run and all figures."""

import json
import re
import sys
import tomllib
from base64 import b64decode, b64encode
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cluster.cli.comparison import write_report
from cluster.offline.report import html
from cluster.offline.report.table import comparison, details, pools, terminal
from cluster.offline.scoring.figures import DEFINITIONS
from tests.offline.report.compared_systems import systems

ROOT = Path(__file__).resolve().parents[3]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    return tags


@pytest.fixture(scope="module")
def tags() -> Tags:
    return parsed(html.page("Split & together", systems(), subtitle="by hand", notes=("a <note>",)))


def test_the_page_stands_alone(tags: Tags) -> None:
    images = [attributes["src"] or "" for tag, attributes in tags.seen if tag == "img"]
    assert len(images) == len(list(html.pictures(systems())))
    for image in images:
        kind, _, data = image.partition(",")
        assert kind == "data:image/png;base64" and b64decode(data).startswith(b"\x89PNG")
    assert not {"script", "link", "iframe", "a"} & {tag for tag, _ in tags.seen}
    outside = {name for _, attributes in tags.seen for name in attributes} & {"href", "srcset", "action", "onload"}
    assert not outside


def test_the_page_says_what_was_run_and_what_it_means(tags: Tags) -> None:
    both = systems()
    words = " ".join("".join(tags.words).split())
    assert "<cut> & $x$" in words and "a <note>" in words and "made by hand" in words
    for system in both:
        for goodput in system.goodputs:
            assert goodput.summary in words
    for word in (*DEFINITIONS, "every 50 ms", "virtual", "0, 1, 2", "TTFT <= 0.06 s and TPOT <= 0.02 s", "at 99 %"):
        assert word in words


def test_json_has_all_figures_of_all_systems() -> None:
    ours, theirs = (json.loads(json.dumps(each.as_json(), allow_nan=False)) for each in systems())
    assert [each["target"] for each in ours["goodput"]] == [0.9, 0.99]
    assert ours["figures"]["mfu"] == pytest.approx(0.25)
    assert theirs["figures"]["rejected"] == 3 and theirs["goodput"][0]["unattainable"]


def test_pictures_that_are_there_are_not_drawn_again() -> None:
    both = systems()
    images = {each.name: each.name.encode() for each in html.pictures(both)}
    page = html.page("drawn before", both, images=images)
    assert all(b64encode(image).decode() in page for image in images.values())


def test_without_matplotlib_a_report_has_no_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report(systems(), tmp_path, "Report", "by hand")
    assert "<img" not in (tmp_path / "report.html").read_text()
    assert not [*tmp_path.glob("*.png")]
    assert "pip install 'diptych[pictures]'" in capsys.readouterr().err


def test_a_page_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one system"):
        html.page("none", ())


def test_the_template_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["cluster.offline.report"]
    assert any(html.TEMPLATE.match(pattern) for pattern in patterns) and html.TEMPLATE.exists()


def test_the_comparison_has_goodput_with_its_interval_and_names_the_target() -> None:
    both = systems()
    grid = comparison(both)
    assert grid.headers[2:4] == ("goodput/GPU\nat 90 %, req/s", "goodput/GPU\nat 99 %, req/s")
    ours = both[0].goodputs[0]
    first, second = grid.rows
    assert first[:3] == ("split by hand", "4", f"{ours.per_gpu:.3g}\n{ours.low / 4:.3g}..{ours.high / 4:.3g}")
    assert second[2] == "0\n0% at best"
    assert second[-1] == "3/0/2"
    assert all(len(row) == len(grid.headers) for row in grid.rows)
    for word in ("TTFT <= 0.06 s and TPOT <= 0.02 s", "all GPUs", "every 50 ms", "at 20, 5 requests/s"):
        assert word in grid.title


def test_details_and_pools_have_every_figure() -> None:
    both = systems()
    rows = {row[0]: row[1] for row in details(both).rows}
    assert rows["MFU"] == "25.0%" and rows["GPUs provisioned"] == "4" and rows["prompt tokens cached"] == "25.0%"
    ttft_ms = 1e3 * (both[0].figures.ttft_s.p50 if both[0].figures.ttft_s else 0.0)
    assert rows["TTFT, s, p50/p90/p99"] == "/".join(3 * [f"{ttft_ms / 1e3:.3g}"])
    assert [row[:5] for row in pools(both[:1]).rows] == [
        ("split by hand", "prefill", "prefill", "1", "2"),
        ("split by hand", "decode", "decode", "1", "1"),
    ]


def test_the_terminal_shows_every_cell_as_it_is() -> None:
    console = Console(width=200, record=True, file=StringIO())
    grid = comparison(systems())
    console.print(terminal(grid))
    shown = re.sub(r"\s+", " ", console.export_text())
    for row in grid.rows:
        for cell in row:
            for line in cell.splitlines():
                assert line in shown
