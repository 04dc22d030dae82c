"""The engine beside its peers: what is made of samples, what a limit is, and one quick run for real."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import PARTS, main
from benchmarks.engine import chart, compare, step
from benchmarks.engine.compare import (
    AGAINST,
    BATCH_1,
    BATCH_16,
    BATCH_32,
    COLUMNS,
    COST,
    PREFILL,
    SHARE,
    WALL,
    claims,
    figures,
)
from benchmarks.engine.driver_processes import LoadedEngines, Program, load_engines
from benchmarks.engine.drivers.protocol import EngineDriverConfig, Task
from benchmarks.engine.engines import (
    DETERMINISTIC,
    LLAMA_ROWS,
    OURS,
    TRANSFORMERS_ROW,
    VLLM_ROW,
    BenchmarkedEngine,
    engines,
    ours,
)
from benchmarks.engine.limits import BITS, DecoderSize, most_tokens
from benchmarks.environments import LLAMA, VLLM
from benchmarks.figures import BenchmarkPart, BenchmarkReport, report_from
from cluster.offline.load import machine

SMOL = DecoderSize(matrix=106_200_000, head=28_311_552, layers=30, query=576, kv=192)
MACHINE = {"read 1": 10e9, "read 2": 20e9, "float32 1024x576x1536": 200e9, "bfloat16 1024x576x1536": 2000e9}


def contender(name: str, driver: str, weights: str = "float32") -> BenchmarkedEngine:
    return BenchmarkedEngine(name, weights, Program(driver, EngineDriverConfig("model", 2)))


FLOAT32 = contender(OURS, "ours")
INT8 = contender("diptych int8", "ours", "int8")
PEER = contender(VLLM_ROW, "vllm")
SMALL_PEER = contender(LLAMA_ROWS["Q4_1"], "llama", "q4_1")
PRESENT = (FLOAT32, INT8, PEER, SMALL_PEER)


def samples(**step_s: float) -> compare.Samples:
    """Two rounds in which every column's step takes so long: by wall, and twice that of CPU."""
    names = {"float32": FLOAT32, "int8": INT8, "vllm": PEER, "q4_1": SMALL_PEER}
    return {
        (names[name].name, column.name): [(seconds, 2 * seconds)] * 2
        for name, seconds in step_s.items()
        for column in COLUMNS
    }


def test_the_limit_of_a_single_decode_is_memory_bandwidth() -> None:
    most = most_tokens(SMOL, BATCH_1, "float32", MACHINE)
    weights, kv = 4 * (106_200_000 + 28_311_552), 250 * 30 * 2 * 192 * 4
    assert most == pytest.approx(20e9 / (weights + kv))
    assert most_tokens(SMOL, BATCH_1, "q4_1", MACHINE) == pytest.approx(20e9 / (weights * 5 / 32 + kv))


def test_the_limit_of_a_prefill_is_matrix_products() -> None:
    operations = 2 * (106_200_000 * 1024 + 28_311_552) + 4 * 30 * 576 * 1024 * 1025 / 2
    assert most_tokens(SMOL, PREFILL, "float32", MACHINE) == pytest.approx(1024 / (operations / 200e9))


def test_the_limit_of_smaller_weights_uses_the_fastest_precision() -> None:
    assert most_tokens(SMOL, PREFILL, "int8", MACHINE) > 5 * most_tokens(SMOL, PREFILL, "float32", MACHINE)


def test_a_tied_embedding_is_counted_once() -> None:
    config = {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "vocab_size": 49_152,
        "num_hidden_layers": 30,
    }
    tied = DecoderSize.of(config | {"tie_word_embeddings": True}, 134_515_008)
    assert (tied.head, tied.query, tied.kv) == (28_311_552, 576, 192)
    assert tied.matrix == 134_515_008 - 28_311_552
    assert DecoderSize.of(config, 134_515_008).matrix == tied.matrix - tied.head


def test_rates_shares_and_ratios_are_computed_from_steps() -> None:
    made = figures(samples(float32=0.1, int8=0.05, vllm=0.12, q4_1=0.1), [MACHINE] * 2, PRESENT, COLUMNS, SMOL)
    cells = {(figure.table, figure.row, figure.column): figure.spread.median for figure in made}
    assert cells[WALL, OURS, BATCH_16.name] == pytest.approx(160.0)
    assert cells[compare.CPU, OURS, BATCH_16.name] == pytest.approx(80.0)
    assert cells[AGAINST, VLLM_ROW, BATCH_16.name] == pytest.approx(1.2)
    most = most_tokens(SMOL, BATCH_16, "float32", MACHINE)
    assert cells[SHARE, OURS, BATCH_16.name] == pytest.approx(160.0 / most)
    assert not [table for table, _, _ in cells if table == COST]


def test_cost_of_determinism_is_a_ratio_of_speeds() -> None:
    sure = contender(DETERMINISTIC, "ours")
    both = dict(samples(float32=0.1)) | {(DETERMINISTIC, column.name): [(0.125, 0.25)] * 2 for column in COLUMNS}
    made = figures(both, [MACHINE] * 2, (FLOAT32, sure), COLUMNS, SMOL)
    costs = [figure.spread.median for figure in made if figure.table == COST]
    assert costs == pytest.approx([0.8] * len(COLUMNS))


def test_each_claim_has_its_own_bound() -> None:
    made = claims(samples(float32=0.10, int8=0.08, vllm=0.12, q4_1=0.10), PRESENT)
    verdicts = {claim.what: claim.met for claim in made}
    assert verdicts[f"{PREFILL.name}: {OURS} / {VLLM_ROW}"]  # 1.2 of 1.1
    assert verdicts[f"{BATCH_1.name}: diptych int8 / {LLAMA_ROWS['Q4_1']}"]  # 1.25 of 1
    assert not verdicts[f"{BATCH_32.name}: diptych int8 / {LLAMA_ROWS['Q4_1']}"]  # 1.25 of 1.5, of the fastest peer
    assert not [what for what in verdicts if LLAMA_ROWS["F32"] in what], "nobody claims what was not measured"
    slower = claims(samples(float32=0.115, vllm=0.12), (FLOAT32, PEER))
    assert [claim.met for claim in slower] == [False] * len(COLUMNS)


OVERHEAD = {
    "step": 0.1,
    "device": 0.098,
    "schedule": 0.0005,
    "commit": 0.0004,
    "drain": 0.0001,
    "inputs": 0.001,
    "sample": 0.001,
    "tokens a second": 30_000.0,
    "tokens a CPU second": 25_000.0,
}


def test_step_overhead_is_everything_but_the_forward_pass() -> None:
    assert step.parts_s(OVERHEAD)[step.REST] == pytest.approx(0.001)  # neither the executor's nor a timed call's
    assert step.overhead(OVERHEAD) == pytest.approx(0.004 / 0.1)
    assert [claim.met for claim in step.claims([OVERHEAD], 32)] == [True, True]
    worse = OVERHEAD | {"sample": 0.003, "tokens a CPU second": 19_000.0}
    assert [claim.met for claim in step.claims([worse], 32)] == [False, False]


def test_every_weight_format_is_measured_and_has_a_limit() -> None:
    from workers.model.load import FORMATS

    found = list(ours(2))
    taken = {value for each in found for name, value in each.program.config.options if name == "weights"}
    assert taken == set(FORMATS) - {"float32"}
    assert {each.weights for each in found} <= BITS.keys()


def test_a_missing_peer_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for peer in (VLLM, LLAMA):
        monkeypatch.setenv(peer.variable, str(tmp_path))
    monkeypatch.setattr("benchmarks.engine.engines.model_folder", lambda: tmp_path)
    found, left_out = engines(2, quick=False)
    assert {each.name for each in found if not each.ours} == {TRANSFORMERS_ROW}
    assert len(left_out) == 2 and all("peer-install" in line for line in left_out)


def test_llama_cpp_is_compiled_with_the_whole_tile_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(LLAMA.variable, str(tmp_path))
    ran: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("subprocess.run", lambda words, check, env=None: ran.append((words, env or {})))
    LLAMA.install(lambda line: None)
    (environment,) = (env for words, env in ran if any("llama-cpp-python==" in word for word in words))
    assert environment["CXXFLAGS"] == f"-include {tmp_path}/amx_config.h"
    assert "ldtilecfg" in (tmp_path / "amx_config.h").read_text()


@pytest.mark.full
def test_a_driver_that_fails_to_load_reports_its_error() -> None:
    broken = Program("transformers", EngineDriverConfig("/nowhere/at/all", 1))
    with load_engines({"broken": broken, "limits": Program("limits", EngineDriverConfig("", 1))}) as loaded:
        assert "nowhere" in loaded.failed["broken"]
        assert loaded.names == ["limits"]
        assert min(loaded.ask("limits", Task(())).values()) > 0


def test_a_disturbed_measurement_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = iter([0.5, 0.0, 0.5, 0.5, 0.5])
    monkeypatch.setattr(LoadedEngines, "_measured", lambda self, driver, task: ("answer", next(foreign)))
    loaded = LoadedEngines({"one": None}, {}, tries=3)  # type: ignore[dict-item]
    assert [loaded.ask("one", Task(())), loaded.ask("one", Task(()))] == ["answer", "answer"]
    assert (loaded.tasks, loaded.retries, loaded.disturbed) == (2, 3, 1)


def report(part: BenchmarkPart) -> BenchmarkReport:
    load = machine.load()
    return BenchmarkReport(
        "2026-01-02T03:04:05", "Linux", 2, "some processor", 8 << 30, load, load, {}, 0, False, (part,)
    )


def test_the_chart_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    if chart.missing():
        pytest.skip(chart.MISSING)
    made = figures(samples(float32=0.1, int8=0.05, vllm=0.12, q4_1=0.1), [MACHINE] * 2, PRESENT, COLUMNS, SMOL)
    part = BenchmarkPart("engine", made)
    chart.draw(report(part), part, tmp_path / "engine.svg")
    chart.draw(report(part), part, tmp_path / "engine.png")
    assert (tmp_path / "engine.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "engine.svg").stat().st_size > 10_000


def test_without_matplotlib_there_is_a_message_and_no_chart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = figures(samples(float32=0.1), [MACHINE] * 2, (FLOAT32,), COLUMNS, SMOL)
    quiet = replace(PARTS["engine"], measure=lambda rounds, quick, progress: BenchmarkPart("engine", made))
    monkeypatch.setitem(PARTS, "engine", quiet)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(chart, "missing", lambda: chart.MISSING)
    main(["engine", "--out", str(tmp_path)], standalone_mode=False)
    assert "diptych[bench]" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png")) and list(tmp_path.glob("*.json"))


@pytest.mark.campaign
@pytest.mark.model
def test_a_quick_run_measures_ours_and_transformers(tmp_path: Path) -> None:
    main(["engine", "--quick", "--out", str(tmp_path)], standalone_mode=False)
    (part,) = report_from(next(tmp_path.glob("*.json")).read_bytes()).parts
    assert not part.failed
    speeds = {(figure.row, figure.column): figure.spread for figure in part.figures if figure.table == WALL}
    columns = {column.name for column in compare.QUICK_COLUMNS}
    assert speeds.keys() == {(row, column) for row in (OURS, TRANSFORMERS_ROW) for column in columns}
    assert min(each.low for each in speeds.values()) > 0
