"""Runs Vidur on jobs, one JSON line each on standard input and output.

Runs in Vidur's Python, so it imports only Vidur and the standard library. Job: `scheduler` ("vllm" or "sarathi"),
`replicas`, `tensor`, `kv_blocks`, `max_tokens` (of a request), `max_batch` and `chunk`, `requests` ([arrival_s, prompt
tokens, answer tokens]) and `costs` in ms: `tokens` of a step without attention by its number of tokens, from 1 on;
`decode` of attention as [sequences, mean context, ms] and `prefill` as [context, chunk, ms]. Contexts are multiples of
256, chunks of 32: Vidur rounds up to these. Answer: `start_s` and `cpu_s` of CPU, TTFT and TPOT of each request.

Vidur predicts from profiles with random forests, and looks the predictions up in tables. These come from the job.
"""

import csv
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

LAYERS = 80  # of Llama-2-70B; tables are of one layer
UNTIMED = (
    "attn_pre_proj",
    "attn_post_proj",
    "attn_rope",
    "attn_kv_cache_save",
    "mlp_down_proj",
    "mlp_act",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
    "all_reduce",
)
DATE = "2023-11-16"  # any: the trace's reader keeps the rows of one date


def tables(costs: dict[str, Any]) -> dict[str, dict[tuple[int, ...], float]]:
    """Vidur's tables by operator. One operator has all that is not attention; the others take no time."""
    steps = {(tokens,): ms / LAYERS for tokens, ms in enumerate(costs["tokens"], 1)}
    predictions = {name: dict.fromkeys(steps, 0.0) for name in UNTIMED} | {"mlp_up_proj": steps}
    for name, rows in (("attn_decode", costs["decode"]), ("attn_prefill", costs["prefill"])):
        predictions[name] = {(first, second): ms / LAYERS for first, second, ms in rows}
    return predictions


def write_trace(requests: list[list[float]], path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("Date", "Time", "PromptTokenCount", "CompletionTokenCount"))
        rows.writerows((DATE, *each) for each in requests)


def simulator(job: dict[str, Any], trace: Path) -> Any:
    vidur = import_module("vidur.config")
    predictor = import_module("vidur.execution_time_predictor.sklearn_execution_time_predictor")
    costs = tables(job["costs"])
    predictor.SklearnExecutionTimePredictor._load_predictions_from_hf = lambda self: costs
    batch = {"batch_size_cap": job["max_batch"]}
    schedulers = {
        "vllm": lambda: vidur.VllmSchedulerConfig(max_tokens_in_batch=job["max_tokens"], **batch),
        "sarathi": lambda: vidur.SarathiSchedulerConfig(chunk_size=job["chunk"], **batch),
    }
    return import_module("vidur.simulator").Simulator(
        vidur.SimulationConfig(
            log_level="error",
            cluster_config=vidur.ClusterConfig(
                num_replicas=job["replicas"],
                replica_config=vidur.ReplicaConfig(
                    model_name="meta-llama/Llama-2-70b-hf",
                    num_pipeline_stages=1,
                    tensor_parallel_size=job["tensor"],
                    device="a100",
                    network_device="a100_dgx",
                ),
                cache_config=vidur.CacheConfig(num_blocks=job["kv_blocks"]),
                global_scheduler_config=vidur.RoundRobinGlobalSchedulerConfig(),
                replica_scheduler_config=schedulers[job["scheduler"]](),
            ),
            request_generator_config=vidur.TraceRequestGeneratorConfig(
                trace_file=str(trace),
                date=DATE,
                prefill_scale_factor=1,
                decode_scale_factor=1,
                time_scale_factor=1,
                max_tokens=job["max_tokens"],
            ),
            execution_time_predictor_config=vidur.RandomForrestExecutionTimePredictorConfig(
                attention_decode_batching_overhead_fraction=0.0,
                nccl_cpu_launch_overhead_ms=0.0,
                use_native_execution_time_predictor=True,  # the faster one
            ),
            metrics_config=vidur.MetricsConfig(write_metrics=False, store_plots=False, enable_chrome_trace=False),
        )
    )


def run(job: dict[str, Any]) -> dict[str, Any]:
    trace = Path("trace.csv")
    write_trace(job["requests"], trace)
    import_module("vidur.simulator")
    begun_s = time.process_time()
    simulated = simulator(job, trace)
    start_s = time.process_time() - begun_s
    requests = [event._request for _, event in simulated._event_queue]
    simulated.run()
    return {
        "start_s": start_s,
        "cpu_s": time.process_time() - begun_s - start_s,
        "ttft_s": [each.prefill_completed_at - each.arrived_at for each in requests],
        "tpot_s": [
            (each.completed_at - each.prefill_completed_at) / (each.num_decode_tokens - 1)
            for each in requests
            if each.num_decode_tokens > 1
        ],
    }


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # the simulator prints
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
