# The project on an NVIDIA GPU.
#   docker build --file .devcontainer/cuda.Dockerfile --tag hmoe_repro:cuda .
#   docker run --rm --gpus all hmoe_repro:cuda .venv/bin/hmoe bench --what algorithms --scale gpu --device cuda
# The wheels of PyTorch carry CUDA, so the image needs the driver of the host and nothing else of NVIDIA's.
FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /workspaces/hmoe_repro
COPY . .
RUN make .venv/.ready
