"""An S3 server as a process (moto), in an environment of its own, which is made once."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow.fs import S3FileSystem

from pipelines.runs.storage.mirror import INDEX
from support.services.environments import make_environment

PACKAGES = ("moto[s3]==5.2.5", "flask", "flask-cors")
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def object_store(environment: Path, **variables: str) -> Iterator[dict[str, str]]:
    """Yields the environment variables with which clients find the server."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    server = subprocess.Popen(
        [make_environment(environment, PACKAGES), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env=os.environ | KEYS | variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for_port(port)
        yield KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    finally:
        server.kill()
        server.wait()


@contextmanager
def connected_store(environment: Path) -> Iterator[ArrowFSWrapper]:
    """Yields a client of a server, which commands also find in their environment."""
    with object_store(environment) as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield ArrowFSWrapper(S3FileSystem(endpoint_override=variables["AWS_ENDPOINT_URL"], allow_bucket_creation=True))


def wait_for_checkpoint(store: ArrowFSWrapper, bucket: str) -> None:
    """Waits for a checkpoint of the student in a bucket's run; the teacher's training has its own."""
    index, until = f"{bucket}/run/{INDEX}", time.monotonic() + 240
    while time.monotonic() < until:
        if store.exists(index) and re.search(rb'distill/[^"]*\.ckpt/', store.cat(index)):
            return
        time.sleep(0.1)
    raise AssertionError("no checkpoint came to the store in four minutes")


def wait_for_port(port: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"nobody listens on port {port} after a minute, {sys.executable}")
