"""What outside load generators report is read as they write it, and held against what the server counted."""

from dataclasses import replace

from benchmarks.outside import Counts, ToolResult, aiperf_read, counts_of, guidellm_read, table, vllm_read

SERVER = Counts(6, 300, 96)
FOUND = ToolResult("aiperf", SERVER, 6, 300, 96, 31.4, 26.5, 5.64, 4.43, 34.0, retokenized=95)


def spread(mean: float, median: float, count: int) -> dict[str, dict[str, float]]:
    return {"successful": {"mean": mean, "median": median, "count": count}, "errored": {"mean": 9.0, "count": 1}}


def test_server_counts_come_from_metrics() -> None:
    text = """
# TYPE diptych_requests_total counter
diptych_requests_total{gateway="g",outcome="completed"} 6.0
diptych_requests_total{gateway="g",outcome="failed"} 2.0
diptych_prompt_tokens_total{gateway="g"} 480.0
diptych_generated_tokens_total{gateway="g"} 96.0
"""
    assert counts_of(text) == Counts(6, 480, 96)
    assert counts_of(text).since(Counts(1, 80, 16)) == Counts(5, 400, 80)


def test_guidellm_report_is_read_for_successful_requests() -> None:
    metrics = {
        "request_totals": {"successful": 6, "errored": 1},
        "prompt_token_count": spread(80.0, 80.0, 6),
        "output_token_count": spread(15.833333333333334, 16.0, 6),
        "time_to_first_token_ms": spread(12.5, 11.0, 6),
        "inter_token_latency_ms": spread(5.5, 5.0, 90),
    }
    read = guidellm_read({"benchmarks": [{"metrics": metrics}]})
    assert (read["requests"], read["prompt_tokens"], read["output_tokens"]) == (6, 480, 95)
    assert [read[f"{name}_ms"] for name in ("ttft_mean", "ttft_p50", "itl_mean", "itl_p50")] == [12.5, 11.0, 5.5, 5.0]


def test_aiperf_report_has_usage_and_retokenized_counts() -> None:
    read = aiperf_read(
        {
            "request_count": {"avg": 6.0},
            "total_usage_prompt_tokens": {"avg": 300.0},
            "total_usage_completion_tokens": {"avg": 96.0},
            "total_osl": {"avg": 95.0},
            "time_to_first_token": {"avg": 31.4, "p50": 26.5},
            "inter_token_latency": {"avg": 5.64, "p50": 4.43},
        }
    )
    assert ToolResult("aiperf", SERVER, seconds=34.0, **read) == FOUND


def test_vllm_result_file_is_read() -> None:
    counts = {"completed": 6, "total_input_tokens": 300, "total_output_tokens": 96}
    times = {"mean_ttft_ms": 31.4, "median_ttft_ms": 26.5, "mean_itl_ms": 5.64, "median_itl_ms": 4.43}
    read = vllm_read(counts | times)
    assert ToolResult("vllm bench serve", SERVER, seconds=34.0, **read) == replace(
        FOUND, tool="vllm bench serve", retokenized=None
    )


def test_one_token_difference_is_a_disagreement() -> None:
    assert FOUND.agrees
    assert not replace(FOUND, server=Counts(6, 300, 97)).agrees and not replace(FOUND, prompt_tokens=299).agrees
    assert replace(FOUND, server=Counts(7, 350, 112)).agrees, "a request that the tool left out, of the same length"
    assert not replace(FOUND, requests=0, prompt_tokens=0, output_tokens=0).agrees


def test_the_table_has_both_counts_and_both_times() -> None:
    last = table([FOUND]).splitlines()[-1]
    assert last == "| aiperf | 6 / 6 | 300 / 300 | 96 / 96 | 95 | 31 / 26 | 5.6 / 4.4 |"
