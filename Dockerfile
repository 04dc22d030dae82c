# docker build -t diptych:0.1.0 .   or   buildah bud -t diptych:0.1.0 .
# Any base with Python 3.11 and its venv module will do. It runs as user 1000, also with a read-only root: what is written
# goes to /tmp, /cache and /dev/shm.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# Where pip looks, if not in its default place; of this stage only, nothing of it is in the image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH=torch==2.13.0
ARG EXTRAS=http,nixl
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# torch first: anything that asks for torch then finds the build that was chosen.
RUN python3 -m venv /opt/diptych && /opt/diptych/bin/pip install -c constraints.txt "${TORCH}"
# Everything else before the source, so that a change of the source costs seconds.
COPY pyproject.toml README.md LICENSE ./
RUN /opt/diptych/bin/pip install -c constraints.txt ".[${EXTRAS}]"
COPY proto proto
COPY kvtransfer kvtransfer
COPY workers workers
COPY cluster cluster
RUN /opt/diptych/bin/pip install --no-deps --force-reinstall .

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="Diptych" \
      org.opencontainers.image.description="Disaggregated prefill and decode serving of large language models on Ray" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# Kernels for this very CPU, and Triton's launchers, are compiled at the first start. The distribution chooses the version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --no-create-home --home-dir /tmp diptych \
    && install -d -o diptych -g diptych /cache /models
COPY --from=build /opt/diptych /opt/diptych
ENV PATH=/opt/diptych/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=diptych \
    DIPTYCH_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    RAY_USAGE_STATS_ENABLED=0
USER 1000
WORKDIR /tmp
EXPOSE 50051 8000
ENTRYPOINT ["diptych"]
CMD ["--help"]
