"""--fp8-products measured: by saved states, the cache or a measurement; equal on all ranks and starts."""

import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.memory_copies import MemoryCopies, SnapshotName
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import Config, parse_args
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.grid import Grid
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.storage.run_memory import RunMemory, snapshots_root
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.signals import StopSignals
from megatron_zpp.tokenizer import build_tokenizer, describe
from megatron_zpp.train.build_engine import build_engine
from megatron_zpp.train.choose_fp8 import SavedProducts, saved_products, with_chosen_products
from megatron_zpp.train.device import Device, prepare_device
from megatron_zpp.train.inputs import RunInputs
from megatron_zpp.train.layer_times import LayerTimes, LayerTimesCache, measured_layer
from megatron_zpp.train.loop import train
from megatron_zpp.train.ranks import Ranks
from megatron_zpp.train.reading import open_data
from megatron_zpp.train.run import build_run
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.train.time_layers import TimedLayer
from tests.model.variants import MODELS, flags_of

FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --kv-channels 16 --seq-length 16 --micro-batch-size 2 --train-iters 4 "
    "--lr 1e-3 --device cpu --num-workers 0 --log-interval 1 --eval-iters 0 --bf16"
).split()
HELD = "--fp8 --fp8-recipe delayed --fp8-param-gather".split()
MEASURED = [*HELD, "--fp8-products", "measured"]
FASTER, SLOWER = LayerTimes(2e-3, 1e-3), LayerTimes(1e-3, 2e-3)


def test_8_bit_products_are_chosen_only_by_a_clear_margin() -> None:
    assert LayerTimes(1.0, 0.98).fp8_pays
    assert LayerTimes(1.0, 0.5).fp8_pays
    assert not LayerTimes(1.0, 0.981).fp8_pays
    assert not LayerTimes(1.0, 1.0).fp8_pays
    assert not LayerTimes(1.0, 2.0).fp8_pays


def test_16_bit_products_are_those_of_a_run_without_flags_of_8_bits() -> None:
    given = parse_args([*FLAGS, *MEASURED, "--fp8-margin", "1", "--fp8-output-layer"])
    assert given.precision.with_16bit_products() == PrecisionConfig(bf16=True)


class Timer:
    """Says that layers take these times, and counts how often."""

    def __init__(self, times: LayerTimes) -> None:
        self._times, self.calls = times, 0

    def __call__(
        self, config: Config, device: Device, topology: Topology, progress: Callable[[], None]
    ) -> LayerTimes:
        self.calls += 1
        progress()
        return self._times


class Site:
    """A cache and a directory for checkpoints, in which runs start again and again."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.environ = {"MEGATRON_ZPP_CACHE": str(directory / "cache")}
        self._directory, self._capsys = directory, capsys

    @property
    def file(self) -> Path:
        (found,) = Path(self.environ["MEGATRON_ZPP_CACHE"]).glob("layer-*.json")
        return found

    def inputs(self, *flags: str) -> tuple[RunInputs, Device]:
        config = parse_args([*FLAGS, *flags])
        schedule = RunSchedule.from_config(config.training, config.learning_rate, 1)
        built = build_tokenizer(config.tokenizer)
        splits = open_data(config, schedule, describe(built), print)
        inputs = RunInputs(
            config=config,
            tokenizer=describe(built),
            tokenizer_files=built.files(),
            schedule=schedule,
            splits=splits,
        )
        always = replace(config, precision=replace(config.precision, fp8_products=None))
        return inputs, prepare_device(always, Grid(Topology()))  # a CPU is refused with `measured`

    def choose(
        self, timer: Timer, *flags: str, topology: Topology | None = None, store: dist.Store | None = None
    ) -> RunInputs:
        inputs, device = self.inputs(*flags)
        return with_chosen_products(
            inputs, device, ranks_of(topology or Topology(), store), timer, self.environ
        )

    def run(self, timer: Timer, *flags: str, name: str = "run") -> tuple[list[Any], str]:
        """Start a run, or resume it; (loss, norm) of each step, and the log."""
        save, metrics = self._directory / name, self._directory / f"{name}.jsonl"
        metrics.unlink(missing_ok=True)
        inputs, device = self.inputs(
            *(*flags, "--save", str(save), "--load", str(save), "--metrics-file", str(metrics))
        )
        ranks = ranks_of(Topology())
        inputs = with_chosen_products(inputs, device, ranks, timer, self.environ)
        engine = build_engine(inputs.config, inputs.tokenizer["vocab_size"], device, Grid(Topology()))
        train(build_run(inputs, engine, ranks))
        engine.close()
        records = map(json.loads, metrics.read_text().splitlines())
        log = self._capsys.readouterr().out
        return [(each["lm_loss"], each["grad_norm"]) for each in records if "lm_loss" in each], log

    def state(self, iteration: int, name: str = "run") -> dict[str, Any]:
        return json.loads((self._directory / name / f"iter_{iteration:07d}" / "state.json").read_text())


def ranks_of(topology: Topology, store: dist.Store | None = None) -> Ranks:
    return Ranks(
        topology=topology, store=store or dist.HashStore(), signals=StopSignals(), activity=Activity()
    )


@pytest.fixture
def site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Site:
    torch.set_num_threads(1)
    return Site(tmp_path, capsys)


@pytest.fixture
def memory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield directory


def test_the_faster_products_are_chosen_with_both_times_in_a_line(site: Site) -> None:
    slower = site.choose(Timer(SLOWER), *MEASURED)
    assert slower.config.precision == PrecisionConfig(bf16=True)
    (line,) = slower.lines
    assert line.startswith(
        " 16-bit products: a layer takes 2.000 ms with 8-bit products, 1.000 ms with 16-bit products "
        "(measured in 0"
    )
    site.file.unlink()
    faster = site.choose(Timer(FASTER), *MEASURED)
    assert faster.config.precision == parse_args([*FLAGS, *MEASURED]).precision
    assert faster.lines[0].startswith(" 8-bit products: a layer takes 1.000 ms with 8-bit products, 2.000 ms")


@pytest.mark.parametrize("flags", [[], HELD])
def test_other_runs_measure_nothing(site: Site, flags: list[str]) -> None:
    timer = Timer(SLOWER)
    inputs = site.choose(timer, *flags)
    assert inputs.config == parse_args([*FLAGS, *flags])
    assert (timer.calls, inputs.lines) == (0, ())


def test_later_starts_take_the_times_of_the_cache(site: Site) -> None:
    site.choose(Timer(SLOWER), *MEASURED)
    timer = Timer(FASTER)
    again = site.choose(timer, *MEASURED, "--num-layers", "3")  # a layer of the same shape
    assert timer.calls == 0
    assert not again.config.precision.fp8
    assert again.lines == (
        " 16-bit products: a layer takes 2.000 ms with 8-bit products, 1.000 ms with 16-bit products "
        "(from the cache)",
    )
    for other in (
        ["--hidden-size", "48"],
        ["--micro-batch-size", "4"],
        ["--fp8-margin", "1"],
        ["--attention-backend", "math"],
        ["--swiglu"],
    ):
        timer = Timer(FASTER)
        site.choose(timer, *MEASURED, *other)
        assert timer.calls == 1, other


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"no json"])
def test_a_damaged_file_is_measured_again_with_a_warning(
    site: Site, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    site.choose(Timer(SLOWER), *MEASURED)
    site.file.write_bytes(content)
    timer = Timer(FASTER)
    assert site.choose(timer, *MEASURED).config.precision.fp8
    assert timer.calls == 1
    assert "the times of a layer are measured again" in capsys.readouterr().err
    assert site.choose(Timer(SLOWER), *MEASURED).config.precision.fp8


@pytest.mark.parametrize(
    "seconds", [{"bits16": 1.0}, {"bits16": 1.0, "bits8": 0.0}, {"bits16": 1, "bits8": "2"}, 3]
)
def test_a_record_that_no_measurement_leaves_is_refused(seconds: object) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        LayerTimes.from_json(seconds)
    assert LayerTimes.from_json(asdict(FASTER)) == FASTER


def test_a_layer_of_another_gpu_is_another_layer(site: Site) -> None:
    inputs, device = site.inputs(*MEASURED)
    layer = measured_layer(inputs.config, device)
    cache = LayerTimesCache(site.environ, print)
    cache.add(layer, FASTER)
    assert cache.read(layer) == FASTER
    assert cache.read(layer | {"device": "GPU B"}) is None
    assert cache.read(layer | {"versions": ["other"]}) is None


@pytest.mark.parametrize("times", [FASTER, SLOWER])
def test_a_resumed_run_has_the_same_bits_and_measures_nothing(site: Site, times: LayerTimes) -> None:
    whole, log = site.run(Timer(times), *MEASURED, name="whole")
    bits = "8-bit" if times.fp8_pays else "16-bit"
    assert f" {bits} products: a layer takes" in log
    assert ("bfloat16 with 8-bit products and delayed scaling of 8-bit weights" in log) == times.fp8_pays
    assert (site.state(4, "whole")["product_scaling"] is not None) == times.fp8_pays
    plain, _ = site.run(Timer(times), *(HELD if times.fp8_pays else []), name="plain")
    assert whole == plain
    first, _ = site.run(Timer(times), *MEASURED, "--exit-interval", "2")
    site.file.unlink()
    other = Timer(SLOWER if times.fp8_pays else FASTER)
    second, log = site.run(other, *MEASURED)
    assert other.calls == 0
    assert f" {bits} products, as the run had at iteration 2" in log
    assert "WARNING" not in log
    assert [*first, *second] == whole
    assert site.state(4)["config"]["precision"]["fp8"] == times.fp8_pays


@pytest.mark.parametrize(("before", "fp8"), [([], False), (HELD, True)])
def test_a_run_continues_with_the_products_of_one_that_measured_nothing(
    site: Site, before: list[str], fp8: bool
) -> None:
    site.run(Timer(FASTER), *before, "--exit-interval", "2")
    timer = Timer(SLOWER if fp8 else FASTER)
    _, log = site.run(timer, *MEASURED)
    assert timer.calls == 0
    assert f" {'8' if fp8 else '16'}-bit products, as the run had at iteration 2" in log


def test_flags_win_over_the_checkpoint_with_a_warning(site: Site) -> None:
    site.run(Timer(SLOWER), *MEASURED, "--exit-interval", "2")
    _, log = site.run(Timer(SLOWER), *HELD)
    assert " WARNING: --fp8 was not given and is given: products of layers are of other formats" in log


def test_a_run_that_begins_anew_measures(site: Site) -> None:
    site.run(Timer(FASTER), *MEASURED, "--exit-interval", "2")
    site.file.unlink()
    load = ["--load", str(site._directory / "run")]
    for flags, calls in ((["--finetune"], 1), ([], 0)):
        timer = Timer(SLOWER)
        chosen = site.choose(timer, *MEASURED, *load, *flags)
        assert (timer.calls, chosen.config.precision.fp8) == (calls, not calls)
    imported = {"progress": {"iteration": 0}, "config": {"precision": {"fp8": False}}}
    assert SavedProducts.of(imported) is None
    assert SavedProducts.of({"progress": {"iteration": 3}, "config": {}}) == SavedProducts(3, False)


def test_the_newest_checkpoint_that_is_whole_counts(site: Site) -> None:
    site.run(Timer(FASTER), *MEASURED, "--exit-interval", "2")
    site.run(Timer(SLOWER), "--exit-interval", "3")  # with 16 bits
    load = ["--load", str(site._directory / "run")]
    assert not site.choose(Timer(FASTER), *MEASURED, *load).config.precision.fp8
    state = site._directory / "run" / "iter_0000003" / "state.json"
    state.write_bytes(state.read_bytes()[:-1])
    assert site.choose(Timer(SLOWER), *MEASURED, *load).config.precision.fp8


def test_memory_snapshots_count_where_there_is_no_checkpoint(tmp_path: Path, memory: str) -> None:
    save, name = tmp_path / "save", "0123456789abcdef"
    save.mkdir()
    snapshots = ["--buddy-snapshots", "1", "--buddy-directory", memory]
    config = parse_args([*FLAGS, *MEASURED, "--save", str(save), "--load", str(save), *snapshots])

    def saved() -> SavedProducts | None:
        return saved_products(config, Exchange(dist.HashStore(), Topology(), timedelta(seconds=60), "saved"))

    assert saved() is None
    (save / "memory_snapshots.txt").write_text(f"{name} {sha256(name.encode()).hexdigest()[:8]}\n")
    assert saved() is None
    used = RunMemory(snapshots_root(memory), name)
    for iteration, fp8 in ((7, True), (5, False)):
        state = {
            "progress": {"iteration": iteration},
            "config": {"precision": {"fp8": fp8}},
            **{"ranks": 1, "nodes": 1, "tensor": 1, "units": []},
        }
        MemoryCopies(used.path, 0).write(SnapshotName(iteration, "0" * 8), 0, {}, state)
    assert saved() == SavedProducts(7, True)
    (newest,) = used.path.glob("holder_0/iter_0000007*/*.json")
    newest.write_bytes(newest.read_bytes()[:-1])
    assert saved() == SavedProducts(5, False)
    used.close()


def test_all_ranks_have_the_choice_of_rank_0(site: Site) -> None:
    timers, store = [Timer(SLOWER), Timer(FASTER)], dist.HashStore()

    def start(rank: int) -> RunInputs:
        return site.choose(timers[rank], *MEASURED, topology=Topology(rank, 2, rank, 2), store=store)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert first.config == second.config
    assert first.lines == second.lines
    assert not first.config.precision.fp8
    assert [timer.calls for timer in timers] == [1, 0]


def test_what_rank_0_cannot_measure_all_ranks_refuse(site: Site) -> None:
    store = dist.HashStore()

    class NoMemory(Timer):
        def __call__(self, *arguments: object) -> LayerTimes:
            raise RuntimeError("no memory")

    def start(rank: int) -> str:
        with pytest.raises(
            ValueError, match=r"--fp8-products measured: .*no memory; use always, or"
        ) as raised:
            site.choose(NoMemory(FASTER), *MEASURED, topology=Topology(rank, 2, rank, 2), store=store)
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert first == second


def test_tensor_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="--fp8-products measured: times whole layers; omit one of it and"):
        parse_args([*FLAGS, *MEASURED, "--tensor-model-parallel-size", "2"])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "flags",
    [[], ["--fp8"], HELD[:3], HELD, [*HELD, "--reset-attention-mask"], ["--fp8", "--zero-unit", "sublayer"]],
)
def test_the_layer_that_is_timed_computes_what_a_run_does(site: Site, model: str, flags: list[str]) -> None:
    """Finite gradients of everything, and with 8-bit products about those with 16-bit ones."""
    dropout = "--hidden-dropout 0 --attention-dropout 0".split()
    shape = [*flags_of(MODELS[model]), *dropout]

    def gradients(more: list[str]) -> dict[str, torch.Tensor]:
        inputs, device = site.inputs(*shape, *more)
        timed = TimedLayer(inputs.config, device, Topology())
        found = timed.forward_backward()
        again = timed.forward_backward()
        for name, gradient in found.items():
            assert gradient.isfinite().all(), name
            assert torch.equal(again[name], gradient), name
        return found

    found = gradients(flags)
    usual = gradients([flag for flag in flags if flag in ("--reset-attention-mask",)])
    assert found.keys() == usual.keys()
    for name, gradient in found.items():
        far = (gradient - usual[name]).float().norm() / usual[name].float().norm()
        assert far < 0.2, (name, far)
        assert (far > 0) == bool(flags) or name.endswith("bias"), name
