"""Serves text from a checkpoint over HTTP: `python -m megatron_zpp.commands.serve --load DIR`."""

import importlib.util
import socket
import sys

from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import option_error, parse_all
from megatron_zpp.distributed.process_group import select_device
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.generate.loading import CheckpointOptions, DeviceOptions, load_for
from megatron_zpp.generate.server_options import ServerOptions

PROG = "serve"


def main() -> None:
    """Load the checkpoint and serve it."""
    groups = {"model": CheckpointOptions, "device": DeviceOptions, "server": ServerOptions}
    options = parse_all(groups, PROG, __doc__, sys.argv[1:])
    if importlib.util.find_spec("aiohttp") is None:
        raise ValueError(
            "aiohttp (not installed): the server needs it; pip install -r launch/requirements-serve.txt"
        )
    from megatron_zpp.generate.server import run

    device = select_device(options["device"].device, Topology())
    model, tokenizer = load_for(options["model"], device)
    try:
        name = options["server"].served_model_name or options["model"].load
        run(model, tokenizer, options["server"], name)
    except OSError as error:
        server = options["server"]
        if isinstance(error, socket.gaierror):
            raise option_error(
                "--host", server.host, f"{error.strerror}; give an address of this host"
            ) from None
        raise option_error(
            "--port", server.port, f"cannot listen on {server.host}: {error.strerror}"
        ) from None


if __name__ == "__main__":
    run_tool(PROG, main)
