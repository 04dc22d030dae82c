"""docs/elastic-campaign.md from the record. Its words stand in page.md.jinja."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from cluster.bench.elastic.contenders import CHUNKS, PROMPT_CHUNKS
from cluster.bench.elastic.record import (
    ORACLE,
    OURS,
    STATIC,
    SYSTEM,
    Entry,
    Phases,
    Ratio,
    Record,
    Result,
    Stale,
    ratio,
)
from cluster.bench.filled import filled
from cluster.scoring.figures import promise

PAGE = "elastic-campaign.md"
TEMPLATE = Path(__file__).with_name("page.md.jinja")
NEVER_WORSE, AHEAD, OF_ORACLE = 0.97, 1.25, 0.9  # the aims


def write(folder: Path, found: Record, pictures: str = "pictures/elastic-{}.svg") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(markdown(found, pictures))


def markdown(found: Record, pictures: str = "pictures/elastic-{}.svg") -> str:
    """`pictures`: where they lie, seen from the page, with braces for the name."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    text = environment.from_string(TEMPLATE.read_text()).render(
        record=found,
        verdicts=verdicts(found),
        losing=losing(found),
        goodputs=goodputs,
        phases=phases,
        stale=stale_table(found.stale),
        promise=promise,
        oracle=lambda result: result.of(ORACLE),
        aims=list(aims(found)),
        picture=pictures.format,
        chunks=", ".join(map(str, CHUNKS)),
        prompt_chunks=", ".join(map(str, PROMPT_CHUNKS)),
    )
    return filled(text)


# ---- tables ------------------------------------------------------------------------------------------------------


def verdicts(found: Record) -> str:
    """One row a workload: ours beside the best static choice, the best named system and the oracle."""
    rows = []
    for each in found.results:
        ours, static = each.of(OURS), each.best_static
        if ours is None:
            continue
        systems = [entry for entry in each.entries if entry.kind == SYSTEM]
        best = max(systems, key=lambda entry: entry.rate, default=None)
        rows.append(
            (
                each.scenario,
                f"{ours.rate / each.gpus:.3f}",
                static.name,
                _ratio(ours, static),
                best.name if best else "-",
                _ratio(ours, best),
                _ratio(ours, each.of(ORACLE)),
            )
        )
    headers = ("workload", "ours", "best static", "ours over it", "best system", "ours over it", "ours over the oracle")
    return _table(headers, rows)


def losing(found: Record) -> list[str]:
    """Where somebody is ahead of ours, oracle aside: in words, the worst first."""
    lost: list[tuple[float, str]] = []
    for each in found.results:
        ours = each.of(OURS)
        for entry in each.entries:
            if ours is None or entry.kind in (OURS, ORACLE) or entry.rate <= ours.rate:
                continue
            behind = ratio(ours.by_seed, entry.by_seed)
            told = behind.told if behind else "0"
            lost.append((ours.rate / entry.rate, f"{each.scenario}: {told} of {_named(entry)}"))
    return [told for _, told in sorted(lost)]


def goodputs(result: Result) -> str:
    ours = result.of(OURS)
    rows = [
        (
            _named(entry),
            f"{entry.rate / result.gpus:.3f}",
            f"{entry.low / result.gpus:.3f} to {entry.high / result.gpus:.3f}"
            if len(entry.by_seed) > 1
            else "one seed",
            f"{entry.rate / result.full_rate:.2f}",
            _ratio(ours, entry) if ours else "-",
        )
        for entry in sorted(result.entries, key=lambda each: -each.rate)
    ]
    return _table(("", "requests/s and GPU", "95 % interval", "scale", "ours over it"), rows)


def _named(entry: Entry) -> str:
    match entry.kind:
        case "ours":
            return "**ours**"
        case "oracle":
            return "oracle"
        case "system":
            return entry.name
    return f"best static: {entry.name}"


def phases(result: Result) -> str:
    """Where requests were lost, at the rate at which the better of ours and the static ones still holds."""
    rows = []
    for each in result.phases:
        for told in _merged(each):
            rows.append((each.name, *told))
    headers = ("", "phase", "requests", "kept", "TTFT kept", "TPOT kept", "late", "slow", "both", "refused", "other")
    return _table(headers, rows)


def _merged(of_one: Phases) -> Iterator[tuple[str, ...]]:
    """Phases of one name together."""
    for name in dict.fromkeys(told.phase for told in of_one.told):
        alike = [told for told in of_one.told if told.phase == name]
        total = sum(told.requests for told in alike)
        shares = (
            sum(getattr(told, field) * told.requests for told in alike) / total
            for field in ("kept", "ttft_kept", "tpot_kept")
        )
        missed = [sum(getattr(told, field) for told in alike) for field in ("late", "slow", "late_slow", "rejected")]
        other = sum(told.failed + told.cut for told in alike)
        yield (name, str(total), *(f"{share:.1%}" for share in shares), *map(str, missed), str(other))


def stale_table(found: Sequence[Stale]) -> str:
    columns = list(dict.fromkeys((each.gateways, each.stale_s) for each in found))
    headers = ("", *(f"{gateways} gateway{'s' * (gateways > 1)}, {age:g} s" for gateways, age in columns))
    rows = []
    for name in dict.fromkeys(each.routing for each in found):
        by_view = {(each.gateways, each.stale_s): each for each in found if each.routing == name}
        rows.append((name, *(f"{fmean(by_view[view].kept):.1%}" if view in by_view else "-" for view in columns)))
    return _table(headers, rows) if rows else ""


def _ratio(ours: Entry, other: Entry | None) -> str:
    if other is None:
        return "-"
    found: Ratio | None = ratio(ours.by_seed, other.by_seed)
    return found.told if found else "theirs is 0"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (headers, ("---", *("---:" for _ in headers[1:])), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- the aims ----------------------------------------------------------------------------------------------------


def summary(found: Record) -> str:
    """A line a workload and aim: whether it holds, with the ratio."""
    return "\n".join(aims(found)) or "no workload is recorded"


def aims(found: Record) -> Iterator[str]:
    for each in found.results:
        ours = each.of(OURS)
        if ours is None or not any(entry.kind in STATIC for entry in each.entries):
            continue
        wanted = [("the best static choice", each.best_static, AHEAD if each.shifts else NEVER_WORSE)]
        if (oracle := each.of(ORACLE)) is not None:
            wanted.append(("the oracle", oracle, OF_ORACLE))
        for name, entry, aim in wanted:
            got = ratio(ours.by_seed, entry.by_seed)
            verdict = "holds" if got is None or got.mean >= aim else "FALLS SHORT"
            told = got.told if got else "theirs is 0"
            yield f"{verdict}: {each.scenario}, ours is {told} of {name}, wanted {aim:g}"
