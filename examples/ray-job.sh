#!/bin/sh
# Serves on an existing Ray cluster, as a job: RAY_ADDRESS=http://HEAD:8265 examples/ray-job.sh [FILE [ID]]
# RAY_AUTH_MODE and RAY_AUTH_TOKEN are those of that cluster. `ray job stop ID` stops everything.
set -eu
: "${RAY_ADDRESS:?set it to the dashboard of the Ray, such as http://127.0.0.1:8265}"
exec ray job submit --no-wait --submission-id "${2:-diptych}" --working-dir . -- \
    diptych serve --grace 1 -f "${1:-examples/laptop.yaml}"
