"""Writes config.yaml to --save: the file that repeats a run."""

import os
from pathlib import Path

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.files import write_text
from megatron_zpp.storage.lease import Lease
from megatron_zpp.storage.location import location
from megatron_zpp.version import __version__

RUN_FILE = "config.yaml"


def write_run_file(config: Config, save: str, topology: Topology, lease: Lease | None) -> list[str]:
    """Write the settings of a run to --save, on rank 0; return a line for the log if that fails.

    `lease` is that of --save, whose holder alone may write there.
    """
    path = location(save) / RUN_FILE
    comments = [
        f"Written by megatron_zpp {__version__}. pretrain_gpt.py --config {RUN_FILE} repeats the run on as",
        f"many ranks ({topology.world_size}) and nodes ({topology.nodes}); flags beside it win. Start it in",
        f"{os.getcwd()!r}: relative paths are relative to it.",
    ]
    try:
        if lease is not None:
            lease.check()
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, config.to_yaml(comments))
    except OSError as error:
        return [f" WARNING: {path}: cannot be written ({one_line(error)}); training continues"]
    return []
