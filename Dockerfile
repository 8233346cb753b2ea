# An image for pipelines.launch: Stillroom with the extras deepspeed and demo.
# The torch of PyPI brings CUDA's libraries with it; a driver on the host is all that GPUs need.
ARG BASE=python:3.11-slim
FROM ${BASE}
WORKDIR /opt/stillroom
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[deepspeed,demo]"
RUN stillroom --help
ENV PYTHONUNBUFFERED=1
CMD ["stillroom", "--help"]
