# The project on a processor: what the dev container uses.
#   docker build --file .devcontainer/cpu.Dockerfile --tag hmoe_repro .
#   docker run --rm hmoe_repro make reproduce
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
# Without this index pip brings the CUDA build of PyTorch, which is gigabytes larger.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /workspaces/hmoe_repro
COPY . .
RUN make .venv/.ready
