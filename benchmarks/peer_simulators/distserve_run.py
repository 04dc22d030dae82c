"""Runs the simulator of a DistServe checkout (`simdistserve`) on jobs, one JSON line each on standard input and output.

Runs in the peer's Python, so it imports only the checkout and the standard library. Job: `folder` of the checkout,
`engine` (whose fits: "distserve" or "vllm"), `model`, `groups` ([replicas, tensor] once if colocated, else prefill and
decode) and `requests` ([arrival_s, prompt tokens, answer tokens]). Answer: `cpu_s`, and the TTFT and TPOT of each
request in seconds as `simdistserve/base/organize_data.py` defines them: TPOT is the time after the first token over
the answer.
"""

import json
import sys
import time
from importlib import import_module
from typing import Any

UNBOUNDED = 10**7  # batches, as in simdistserve/benchmarks/simulate_dist.py


def run(job: dict[str, Any]) -> dict[str, Any]:
    model = import_module("simdistserve.constants").ModelTypes.model_str_to_object(job["model"])
    tokens = import_module("simdistserve.estimators.memory_estimator").get_max_num_tokens
    (prefills, tensor), (decodes, decode_tensor) = job["groups"][0], job["groups"][-1]
    settings = {
        "model_type": model,
        "TP": tensor,
        "TP_Prefill": tensor,
        "TP_Decode": decode_tensor,
        "prefill_max_batch_size": UNBOUNDED,
        "decode_max_batch_size": UNBOUNDED,
        "prefill_max_tokens": tokens(model, tensor, 1),
        "decode_max_tokens": tokens(model, decode_tensor, 1),
        "enable_chunked_prefill": False,
        "engine_type": job["engine"],
    }
    environment = import_module("simpy").Environment()
    if len(job["groups"]) == 1:
        cluster = import_module("simdistserve.clusters.vllm").VLLMCluster(environment, prefills, 1, settings)
    else:
        split = import_module("simdistserve.clusters.disagg").DisaggCluster
        cluster = split(environment, prefills, decodes, 1, 1, settings)
    workload = import_module("simdistserve.base.workload")
    requests = workload.convert_pd_pair_to_request([(prompt, answer) for _, prompt, answer in job["requests"]])
    gaps = workload.convert_absolutearrival_to_interarrival([at_s for at_s, _, _ in job["requests"]])
    put = import_module("simdistserve.base.scheduler").put_requests_with_interarrivals
    begun_s = time.process_time()
    cluster.run()
    put(environment, cluster.scheduler, gaps, requests)
    environment.run()
    cpu_s = time.process_time() - begun_s
    times = [_times_s(each) for each in requests]
    return {"cpu_s": cpu_s, "ttft_s": [one for one, _ in times], "tpot_s": [other for _, other in times]}


def _times_s(request: Any) -> tuple[float, float]:
    at_ms: dict[str, float] = {}
    for moment_ms, event, _ in request.log:
        at_ms.setdefault(event, moment_ms)
    first_ms, end_ms = at_ms["wait_decode"], at_ms["exit_system"]
    return (first_ms - at_ms["init"]) / 1e3, (end_ms - first_ms) / request.output_lens / 1e3


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # the simulator prints
    for line in sys.stdin:
        job = json.loads(line)
        if job["folder"] not in sys.path:
            sys.path.insert(0, job["folder"])
        print(json.dumps(run(job)), file=answers, flush=True)


if __name__ == "__main__":
    main()
