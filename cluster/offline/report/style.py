"""The style of pictures, and how they are saved; output bytes are deterministic. Needs matplotlib (an extra)."""

from collections.abc import Callable
from functools import wraps
from io import BytesIO
from math import log10
from pathlib import Path
from typing import Any, ParamSpec

P = ParamSpec("P")

# Okabe and Ito's palette, which is safe for color-blind readers.
BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, RED, GRAY = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#56B4E9", "#D55E00", "#7F7F7F"),
)
COLORS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, "#000000", GRAY)
MARKERS = "osD^vP*X<>"
RULES: Any = {
    "svg.hashsalt": "diptych",
    "svg.fonttype": "none",
    "text.parse_math": False,  # do not parse $ in names as math
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
DPI = 120


class NoPictures(RuntimeError):
    """matplotlib is missing; the message says what to install."""


def styled(draw: Callable[P, Any]) -> Callable[P, Any]:
    """Decorator: draw in this style. Raises `NoPictures` without matplotlib."""

    @wraps(draw)
    def with_rules(*args: P.args, **more: P.kwargs) -> Any:
        with _rules():
            return draw(*args, **more)

    return with_rules


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure of this size in inches, and its panels by [row][column]."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), layout="constrained")
    return picture, picture.subplots(rows, columns, squeeze=False, **options)


def plain(axis: Any) -> None:
    """Few ticks with plain numbers instead of powers of ten on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    decades = log10(high / low)
    places = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if decades < 1.0 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    axis.set_major_locator(LogLocator(subs=places))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def look(number: int) -> dict[str, Any]:
    """Color and marker of the n-th system; pairs repeat only after 40 systems."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def png(picture: Any) -> bytes:
    with _rules():
        made = BytesIO()
        picture.savefig(made, format="png", dpi=DPI, metadata={"Software": None})
        return made.getvalue()


def save(picture: Any, path: Path) -> Path:
    """Save in the format of the suffix (.png, .svg, .pdf). Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        path.write_bytes(png(picture))
        return path
    dated = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix)
    with _rules():
        picture.savefig(path, dpi=DPI, metadata={dated: None} if dated else None)
    return path


def _rules() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise NoPictures("pictures need matplotlib; install it with `pip install 'diptych[pictures]'`") from None
    return matplotlib.rc_context(RULES)


def legend(picture: Any, panel: Any, **more: Any) -> None:
    """One entry per label, below all panels."""
    handles, labels = panel.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    picture.legend(entries.values(), entries.keys(), loc="outside lower center", **{"ncols": 3, **more})
