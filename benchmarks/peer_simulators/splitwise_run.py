"""Runs SplitwiseSim of a checkout on jobs, one JSON line each on standard input and output.

Runs in the peer's Python, so it imports only the checkout, its packages and the standard library. Job: `folder` of the
checkout, `prompts` and `tokens` (machines of eight A100 with Llama-2-70B), and `requests` ([arrival_s, prompt tokens,
answer tokens]). Step times are those of the checkout's data/perf_model.csv, the scheduler is its `mixed_pool`. Answer:
`cpu_s`, and the TTFT and TPOT of each request in seconds.
"""

import csv
import json
import random
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

LLM = 2  # the type of a request
FIRST_S = 1.0  # the first arrival: what happens at 0 happens before there are machines
NONE: dict[str, Any] = {}


def settings(job: dict[str, Any]) -> Any:
    """As its `configs` make them; only the machines, the model and the scheduler are ours to choose."""
    pool = {
        "instance_type": "Splitwise",
        "max_batch_size": 512,
        "max_batch_tokens": 2048,
        "max_preemptions": 4,
        "pipeline_parallelism": 1,
        "tensor_parallelism": 8,
    }
    application = {
        "application_id": 0,
        "model_architecture": "llama2-70b",
        "model_size": "llama2-70b-fp16",
        "allocator": "noop",
        "scheduler": "mixed_pool",
        "overheads": NONE,
        "debug": False,
    }
    machines = job["prompts"] + job["tokens"]
    hardware, models, orchestrators = "configs/hardware_repo", "configs/model_repo", "configs/orchestrator_repo"
    return import_module("omegaconf").OmegaConf.create(
        {
            "hardware_repo": {name: f"{hardware}/{name}" for name in ("processors", "interconnects", "skus")},
            "model_repo": {name: f"{models}/{name}" for name in ("architectures", "sizes")},
            "orchestrator_repo": {name: f"{orchestrators}/{name}" for name in ("allocators", "schedulers")},
            "performance_model": {
                "_target_": "performance_model.DatabasePerformanceModel",
                "db_path": "data/perf_model.csv",
            },
            "power_model": {
                "_target_": "power_model.ConstantPowerModel",
                **dict.fromkeys(("idle_power", "prompt_power", "token_power"), NONE),
            },
            "cluster": {"power_budget": 0, "servers": [{"sku": "dgx-a100", "count": machines}], "interconnects": []},
            "router": {"_target_": "router.NoOpRouter", "overheads": {"routing_delay": 0}},
            "arbiter": {"_target_": "arbiter.NoOpArbiter", "overheads": NONE},
            "applications": [application],
            "start_state": {
                "state_type": "splitwise",
                "application_id": 0,
                "split_type": "homogeneous",
                "prompt": pool | {"num_instances": job["prompts"]},
                "token": pool | {"num_instances": job["tokens"]},
            },
        }
    )


def write_trace(requests: list[list[float]], path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        columns = ("application_id", "arrival_timestamp", "batch_size", "prompt_size", "token_size")
        rows.writerow(("request_id", "request_type", *columns))
        rows.writerows((number, LLM, 0, FIRST_S + at_s, 1, *sizes) for number, (at_s, *sizes) in enumerate(requests))


def simulator(job: dict[str, Any], trace: Path) -> Any:
    """Built in the order of its run.py, without Hydra's command line."""
    import_module("flow")  # first: its modules import each other in a circle
    made, start = import_module("initialize"), import_module("simulator")
    for name in ("initialize", "performance_model"):
        import_module(name).get_original_cwd = lambda: job["folder"]  # type: ignore[attr-defined]
    config = settings(job)
    made.init_hardware_repo(config)
    made.init_model_repo(config)
    made.init_orchestrator_repo(config)
    made.init_performance_model(config)
    made.init_power_model(config)
    cluster = made.init_cluster(config)
    router = made.init_router(config, cluster)
    arbiter = made.init_arbiter(config, cluster)
    parts = {"cluster": cluster, "router": router, "arbiter": arbiter}
    parts["applications"] = made.init_applications(config, **parts)
    for application in parts["applications"].values():
        router.add_application(application)
        arbiter.add_application(application)
    simulated = start.TraceSimulator(trace=made.Trace.from_csv(trace), end_time=float("inf"), **parts)
    made.init_start_state(config, **parts)
    simulated.save_results = lambda: None
    return simulated


def run(job: dict[str, Any]) -> dict[str, Any]:
    trace = Path("trace.csv")
    write_trace(job["requests"], trace)
    random.seed(0)
    simulated = simulator(job, trace)
    begun_s = time.process_time()
    simulated.run()
    cpu_s = time.process_time() - begun_s
    done = [(each.metrics, each.token_size) for each in simulated.router.completed_queue]
    tpot_s = [(each.router_response_time - each.TTFT) / (size - 1) for each, size in done if size > 1]
    return {"cpu_s": cpu_s, "ttft_s": [each.TTFT for each, _ in done], "tpot_s": tpot_s}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # the simulator prints
    for line in sys.stdin:
        job = json.loads(line)
        if job["folder"] not in sys.path:
            sys.path.insert(0, job["folder"])
        print(json.dumps(run(job)), file=answers, flush=True)


if __name__ == "__main__":
    main()
