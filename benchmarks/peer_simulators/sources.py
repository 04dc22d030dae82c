"""The peers: where their users get them."""

from benchmarks.peer_simulators.process import PeerSource

DISTSERVE = PeerSource(
    "DistServe's simulator",
    "DIPTYCH_DISTSERVE",
    "--distserve",
    "simdistserve/base/worker.py",
    "distserve_run.py",
    "a checkout of github.com/LLMServe/DistServe, with simpy, numpy and pandas in its .venv",
)
VIDUR = PeerSource(
    "Vidur",
    "DIPTYCH_VIDUR",
    "--vidur",
    "lib/python*/site-packages/vidur",
    "vidur_run.py",
    "a virtual environment with the package vidur",
)
SPLITWISE = PeerSource(
    "SplitwiseSim",
    "DIPTYCH_SPLITWISE",
    "--splitwise",
    "performance_model.py",
    "splitwise_run.py",
    "a checkout of github.com/Mutinifni/splitwise-sim, with its requirements in its .venv",
)
