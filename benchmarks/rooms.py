"""The drawing of the code: rooms, floors and arrows, read from the import statements of a source tree.

    python -m benchmarks.rooms                          # this tree
    python -m benchmarks.rooms --root OTHER_CHECKOUT    # another one, to compare
    python -m benchmarks.rooms --package cluster --svg rooms.svg

A room is a folder of a package, or a module that lies at the top of it. An arrow says that one room imports another.
A room's floor is one above the highest room it imports; rooms that import each other in a circle share a floor.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"diptych": "proto/diptych", "kvtransfer": "kvtransfer", "workers": "workers", "cluster": "cluster"}
GENERATED = "diptych.v1"
BOX_WIDTH, BOX_HEIGHT, GAP, FLOOR_HEIGHT = 150, 34, 16, 86  # pixels


@dataclass(frozen=True, slots=True)
class Drawing:
    """`arrows` point from a room to the rooms it imports. `slivers` have fewer than 80 lines and one importer."""

    lines: dict[str, int]
    modules: dict[str, int]
    arrows: dict[str, frozenset[str]]
    floors: dict[str, int]
    circles: tuple[tuple[str, ...], ...]
    slivers: int

    @property
    def num_arrows(self) -> int:
        return sum(map(len, self.arrows.values()))


def draw(root: Path, packages: dict[str, str]) -> Drawing:
    """Read all modules of these packages. Imports inside functions count too."""
    sources = dict(_modules(root, packages))
    names = set(sources)
    lines: dict[str, int] = defaultdict(int)
    modules: dict[str, int] = defaultdict(int)
    imports = {}
    for name, source in sources.items():
        lines[room(name)] += source.count("\n")
        modules[room(name)] += 1
        imports[name] = {owner for each in _imported(source) if (owner := _owner(each, names)) and owner != name}
    arrows = {each: set[str]() for each in lines}
    for name, found in imports.items():
        arrows[room(name)] |= {room(each) for each in found} - {room(name)}
    circles = _circles(arrows)
    return Drawing(
        lines=dict(lines),
        modules=dict(modules),
        arrows={each: frozenset(found) for each, found in arrows.items()},
        floors=_floors(arrows, circles),
        circles=tuple(tuple(sorted(each)) for each in circles if len(each) > 1),
        slivers=sum(
            sources[name].count("\n") < 80 and sum(name in found for found in imports.values()) == 1 for name in names
        ),
    )


def room(name: str) -> str:
    """The folder, or top-level module, that a dotted module name lies in."""
    return ".".join(name.split(".")[:2])


def _modules(root: Path, packages: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, folder in packages.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = [name, *path.relative_to(root / folder).with_suffix("").parts]
            dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not dotted.startswith(GENERATED) and dotted != name:
                yield dotted, path.read_text()


def _imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _owner(imported: str, names: set[str]) -> str | None:
    """The module that an imported name is, or is defined in."""
    parts = imported.split(".")
    return next((key for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in names), None)


def _reach(arrows: dict[str, set[str]], start: str) -> set[str]:
    seen, todo = set[str](), [start]
    while todo:
        for each in arrows[todo.pop()] - seen:
            seen.add(each)
            todo.append(each)
    return seen


def _circles(arrows: dict[str, set[str]]) -> list[frozenset[str]]:
    """Rooms that reach each other; a room in no circle stands alone."""
    reach = {each: _reach(arrows, each) for each in arrows}
    return list({frozenset({each, *(other for other in reach[each] if each in reach[other])}) for each in arrows})


def _floors(arrows: dict[str, set[str]], circles: list[frozenset[str]]) -> dict[str, int]:
    circle = {each: members for members in circles for each in members}
    below = {members: {circle[each] for one in members for each in arrows[one]} - {members} for members in circles}
    floors: dict[frozenset[str], int] = {}
    for members in TopologicalSorter(below).static_order():
        floors[members] = 1 + max((floors[each] for each in below[members]), default=-1)
    return {each: floors[members] for each, members in circle.items()}


def described(drawing: Drawing) -> str:
    """The drawing in words: a line for each floor, highest first, and the totals of each package."""
    out = []
    for floor in sorted(set(drawing.floors.values()), reverse=True):
        here = sorted(each for each, found in drawing.floors.items() if found == floor)
        out.append(f"{floor:3}  " + "  ".join(f"{each} ({drawing.lines[each]:,})" for each in here))
    out.append("")
    out.append(f"{'package':12}{'rooms':>7}{'folders':>9}{'modules':>9}{'lines':>9}")
    for package in sorted({each.split(".")[0] for each in drawing.lines}):
        rooms = [each for each in drawing.lines if each.startswith(f"{package}.")]
        folders = sum(drawing.modules[each] > 1 for each in rooms)
        modules, lines = (sum(count[each] for each in rooms) for count in (drawing.modules, drawing.lines))
        out.append(f"{package:12}{len(rooms):>7}{folders:>9}{modules:>9}{lines:>9,}")
    out.append(
        f"\n{len(drawing.lines)} rooms on {1 + max(drawing.floors.values())} floors, {drawing.num_arrows} arrows, "
        f"{len(drawing.circles)} circles, {drawing.slivers} modules under 80 lines with one importer"
    )
    out += [f"circle: {' '.join(each)}" for each in drawing.circles]
    return "\n".join(out)


def svg(drawing: Drawing) -> str:
    """Boxes by floor; arrows that follow from others are left out."""
    arrows = {each: set(found) for each, found in drawing.arrows.items()}
    floors: dict[int, list[str]] = defaultdict(list)
    for each, floor in sorted(drawing.floors.items()):
        floors[floor].append(each)
    width = max(map(len, floors.values())) * (BOX_WIDTH + GAP) + GAP
    height = len(floors) * FLOOR_HEIGHT
    place = {}
    for floor, row in floors.items():
        left = (width - len(row) * (BOX_WIDTH + GAP) + GAP) / 2
        for n, each in enumerate(row):
            place[each] = left + n * (BOX_WIDTH + GAP), height - (floor + 1) * FLOOR_HEIGHT + 20
    reach = {each: _reach(arrows, each) for each in arrows}
    fonts = "Helvetica, Arial, DejaVu Sans, sans-serif"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{fonts}" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for each, found in arrows.items():
        for other in sorted(found):
            if any(other in reach[step] for step in found - {other}):
                continue
            (x, y), (to_x, to_y) = place[each], place[other]
            out.append(
                f'<line x1="{x + BOX_WIDTH / 2:.0f}" y1="{y + BOX_HEIGHT:.0f}" x2="{to_x + BOX_WIDTH / 2:.0f}" '
                f'y2="{to_y:.0f}" stroke="#9aa5b1"/>'
            )
    for each, (x, y) in place.items():
        out.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4" fill="#eef3f8" '
            f'stroke="#52708f"/><g text-anchor="middle" transform="translate({x + BOX_WIDTH / 2:.0f} {y:.0f})">'
            f'<text y="15">{each}</text><text y="28" fill="#666677">{drawing.lines[each]:,} lines</text></g>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


@click.command()
@click.option(
    "--root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=ROOT, help="Tree to read."
)
@click.option("--package", type=click.Choice(list(PACKAGES)), help="Draw this package alone.")
@click.option("--svg", "picture", type=click.Path(dir_okay=False, path_type=Path), help="Write the picture there, too.")
def main(root: Path, package: str | None, picture: Path | None) -> None:
    """Print the rooms of the code, their floors and arrows, and lines by package."""
    drawing = draw(root, PACKAGES if package is None else {package: PACKAGES[package]})
    click.echo(described(drawing))
    if picture is not None:
        picture.write_text(svg(drawing))


if __name__ == "__main__":
    main()
