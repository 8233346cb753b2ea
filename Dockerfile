# An image for pipelines.launch: Stillroom with the extras deepspeed and demo.
# torch from PyPI brings CUDA's libraries: for GPUs the host needs NVIDIA's driver and the NVIDIA Container Toolkit.
# DeepSpeed's operators and torchao's optimizers are compiled when they are first used, which needs a C++ compiler.
ARG BASE=python:3.11-slim
FROM ${BASE}
WORKDIR /opt/stillroom
RUN command -v g++ || (apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*)
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[deepspeed,demo]"
RUN stillroom --help
ENV PYTHONUNBUFFERED=1
CMD ["stillroom", "--help"]
