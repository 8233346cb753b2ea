"""The server that forks commands. Run as a script, it imports the libraries and serves the socket of this number.

onnxruntime isn't among the libraries: it starts a thread on import, and threads don't survive a fork.
"""

import gc
import os
import socket
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

LIBRARIES = (
    "datasets",
    "jsonargparse",
    "lightning.pytorch.loggers",
    "numba",
    "onnx",
    "onnxscript",
    "pyarrow.parquet",
    "rich.progress",
    "safetensors.torch",
    "torch.distributed.checkpoint",
    "torch.onnx",
    "torchao.quantization",
    "torchmetrics",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
)


@cache
def start_server() -> socket.socket:
    """Starts the server on the first call and returns the socket for requests; it ends with this process."""
    from support.processes.forked_process import adopt_orphans

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [env.get("PYTHONPATH")])])
        env["TQDM_DISABLE"] = "1"  # as the commands do where their errors aren't printed on a terminal
        command = [sys.executable, "-m", "support.processes.command_server", str(theirs.fileno())]
        subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
    adopt_orphans()
    return ours


if __name__ == "__main__":
    from support.processes.forked_process import serve

    for name in LIBRARIES:
        import_module(name)
    gc.freeze()  # a collection in a forked process would write to each of the objects above
    serve(socket.socket(fileno=int(sys.argv[1])))
