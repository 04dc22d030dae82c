"""The drawing of the code: floors follow from imports, circles are found, and this tree has none."""

from pathlib import Path

from benchmarks.rooms import PACKAGES, ROOT, described, draw, svg


def tree(root: Path, **modules: str) -> Path:
    for name, source in modules.items():
        path = root / "shop" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def test_a_room_stands_above_all_it_imports(tmp_path: Path) -> None:
    root = tree(tmp_path, money="x = 1\n", goods__apple="from shop import money\n", till="import shop.goods.apple\n")
    drawing = draw(root, {"shop": "shop"})
    assert drawing.floors == {"shop.money": 0, "shop.goods": 1, "shop.till": 2}
    assert drawing.num_arrows == 2 and not drawing.circles
    assert "3 rooms on 3 floors, 2 arrows, 0 circles" in described(drawing)


def test_rooms_that_import_each_other_are_named_as_a_circle(tmp_path: Path) -> None:
    root = tree(tmp_path, hen="import shop.egg\n", egg="def lay():\n    import shop.hen\n", farm="import shop.hen\n")
    drawing = draw(root, {"shop": "shop"})
    assert drawing.circles == (("shop.egg", "shop.hen"),)
    assert drawing.floors["shop.farm"] == 1 + drawing.floors["shop.hen"] == 1 + drawing.floors["shop.egg"]


def test_the_packages_have_few_rooms_and_no_circle() -> None:
    drawing = draw(ROOT, PACKAGES)
    assert not drawing.circles
    assert sum(room.startswith("cluster.") for room in drawing.lines) <= 15
    assert svg(drawing).count("<rect") == 1 + len(drawing.lines)
