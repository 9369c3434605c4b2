"""Chooses between 8-bit and 16-bit products before the model is built, equally on all ranks.

Rank 0 chooses for all. What the run has saved comes first, then what earlier starts on the same kind of GPU
have measured; else it measures. So a run that is started again has the same products, and computes the same
bits.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_zpp.checkpoint.directory import each_candidate, read_newest
from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.read import CheckpointReader
from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.checksums import DamagedFile, OnProgress
from megatron_zpp.storage.object_path import Location
from megatron_zpp.train.bounded import is_damaged, read_together
from megatron_zpp.train.buddy_memory import newest_state
from megatron_zpp.train.device import Device, check_attention
from megatron_zpp.train.inputs import RunInputs
from megatron_zpp.train.layer_times import LayerTimes, LayerTimesCache, measured_layer
from megatron_zpp.train.ranks import Ranks
from megatron_zpp.train.time_layers import time_layers

Timer = Callable[[Config, Device, Topology, Callable[[], None]], LayerTimes]


@dataclass(frozen=True)
class SavedProducts:
    """Whether a run had 8-bit products when it saved an iteration."""

    iteration: int
    fp8: bool

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "SavedProducts | None":
        """What the content of state.json says; None before the first step, as of imported weights."""
        iteration, settings = state["progress"]["iteration"], state["config"].get("precision", {})
        return cls(iteration, bool(settings.get("fp8", False))) if iteration else None


def with_chosen_products(
    inputs: RunInputs,
    device: Device,
    ranks: Ranks,
    timer: Timer = time_layers,
    environ: Mapping[str, str] = os.environ,
) -> RunInputs:
    """`inputs` with the products that --fp8-products measured chooses, and a line on it for the log.

    Where 16-bit products are chosen, the settings are those of a run without --fp8. Every rank must call it.
    Raises ValueError, on all ranks, if rank 0 cannot measure.
    """
    config = inputs.config
    if not config.precision.measures_fp8:
        return inputs
    check_attention(config, device)
    ranks.activity.now("choosing products", patient=True)
    exchange = Exchange(ranks.store, ranks.topology, config.distributed.timeout, "fp8-products")
    saved = saved_products(config, exchange)
    if exchange.topology.rank == 0:
        cache = partial(LayerTimesCache, environ, partial(print, file=sys.stderr))
        exchange.put("choice", _choice(config, device, saved, timer, cache, exchange))
    choice = exchange.get("choice")
    if choice["problem"] is not None:
        raise option_error("--fp8-products", "measured", f"{choice['problem']}; use always, or omit --fp8")
    if not choice["fp8"]:
        config = replace(config, precision=config.precision.with_16bit_products())
    return replace(inputs, config=config, lines=(*inputs.lines, choice["line"]))


def saved_products(config: Config, exchange: Exchange) -> SavedProducts | None:
    """What the newest states say that the run resumes from; None if it begins. Every rank must call it.

    What is damaged is passed over here, as it is when states are loaded.
    """
    settings = config.checkpoint
    if settings.huggingface or settings.finetune or settings.load is None:
        return None
    read = partial(_newest, config, exchange.topology)
    found, _ = read_together(read, exchange, FileWorker(), "--load", settings.load)
    newest = exchange.combine("saved", found, lambda each: max(filter(None, each), default=None))
    return None if newest is None else SavedProducts(*newest)


def _newest(config: Config, topology: Topology, on_progress: OnProgress) -> tuple[int, bool] | None:
    """(iteration, fp8) of the newest checkpoint, on rank 0, or of what the memory of a node has."""
    found = []
    if topology.local_rank == 0 and (state := newest_state(config)) is not None:
        found.append(SavedProducts.of(state))
    if topology.rank == 0:
        found.append(_of_checkpoints(config, on_progress))
    return max(((each.iteration, each.fp8) for each in found if each is not None), default=None)


def _of_checkpoints(config: Config, on_progress: OnProgress) -> SavedProducts | None:
    """What the newest whole checkpoint says; None if there is none, or all are damaged."""
    assert config.checkpoint.load is not None
    find = partial(each_candidate, config.checkpoint.load, config.checkpoint.ckpt_step)

    def read(path: Location) -> SavedProducts | None:
        with CheckpointReader(path, on_progress) as reader:
            return SavedProducts.of(reader.state)

    try:
        return read_newest(find, read, is_damaged)
    except (DamagedFile, OSError) as error:
        if not is_damaged(error):
            raise
        return None


def _choice(
    config: Config,
    device: Device,
    saved: SavedProducts | None,
    timer: Timer,
    cache: Callable[[], LayerTimesCache],
    exchange: Exchange,
) -> dict[str, Any]:
    """Rank 0's choice as JSON; `problem` is None unless it fails."""
    if saved is not None:
        line = f" {_bits(saved.fp8)} products, as the run had at iteration {saved.iteration}"
        return {"problem": None, "fp8": saved.fp8, "line": line}
    layer = measured_layer(config, device)
    try:
        kept = cache()
        times, origin = kept.read(layer), "from the cache"
        if times is None:
            started = time.perf_counter()
            times = timer(config, device, exchange.topology, exchange.progress)
            origin = f"measured in {time.perf_counter() - started:.1f} s"
            kept.add(layer, times)
    except Exception as error:  # of the device, of files, of compilers: the other ranks wait for an answer
        return {"problem": one_line(error), "fp8": None, "line": ""}
    line = (
        f" {_bits(times.fp8_pays)} products: a layer takes {1000 * times.bits8:.3f} ms with 8-bit products, "
        f"{1000 * times.bits16:.3f} ms with 16-bit products ({origin})"
    )
    return {"problem": None, "fp8": times.fp8_pays, "line": line}


def _bits(fp8: bool) -> str:
    return "8-bit" if fp8 else "16-bit"
