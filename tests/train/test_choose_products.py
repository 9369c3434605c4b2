"""The choice of products' algorithms: from the checkpoint, the cache or a measurement, equal on all ranks."""

import json
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.components import ModelComponents
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.product_algorithms import ProductAlgorithms
from megatron_zpp.model.products import ChosenLinear, ProductShape, chosen_linears
from megatron_zpp.ops.products import multiply
from megatron_zpp.train.choose_products import Choice, choose_products
from megatron_zpp.train.product_cache import ProductCache
from megatron_zpp.train.time_products import Timings

ROWS, DTYPE = 32, torch.bfloat16
OWN = ProductAlgorithms("GPU A", 130100, "2.11.0", {})
OTHER = ProductAlgorithms("GPU B", 130100, "2.11.0", {})


def model(hidden: int = 16) -> GPT:
    config = ModelConfig(num_layers=2, hidden_size=hidden, num_attention_heads=2, seq_length=8)

    def linear(inputs: int, outputs: int, bias: bool) -> ChosenLinear:
        return ChosenLinear(inputs, outputs, bias, multiply=multiply)

    return GPT(config, 50, parts=ModelComponents(linear=linear))


class Timer:
    """Says that the algorithm `name` is the fastest for products with a bias, and torch's for others."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.timed: list[str] = []

    def __call__(self, shape: ProductShape) -> Timings:
        self.timed.append(shape.name)
        return Timings(1e-3, {"aa": 0.985e-3, self._name: 0.9e-3 if shape.bias else 0.99e-3})


class Site:
    """A cache, and starts of a run with it."""

    def __init__(self, directory: Path) -> None:
        self.environ = {"MEGATRON_ZPP_CACHE": str(directory / "cache")}
        self.said: list[str] = []
        self._starts = 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    @property
    def file(self) -> Path:
        (found,) = Path(self.environ["MEGATRON_ZPP_CACHE"]).glob("products-*.json")
        return found

    def cache(self) -> ProductCache:
        return ProductCache(self.environ, self.said.append)

    def start(
        self,
        timer: Timer,
        saved: ProductAlgorithms | None = None,
        own: ProductAlgorithms = OWN,
        into: GPT | None = None,
        topology: Topology | None = None,
        purpose: str | None = None,
        make: Callable[[], Timer] | None = None,
    ) -> Choice:
        self._starts += 1
        purpose = purpose or f"products/{self._starts}"
        exchange = Exchange(self._store, topology or Topology(), timedelta(seconds=60), purpose)
        return choose_products(
            into or model(),
            *(ROWS, DTYPE),
            own=own,
            saved=saved,
            timer=make or (lambda: timer),
            cache=self.cache,
            exchange=exchange,
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_an_algorithm_is_chosen_only_by_a_clear_margin() -> None:
    assert Timings(1.0, {"a": 0.95, "b": 0.9}).fastest == "b"
    assert Timings(1.0, {"a": 0.985, "b": 0.99}).fastest == ""
    assert Timings(1.0, {"a": 2.0}).fastest == ""
    assert Timings(1.0, {}).fastest == ""


def test_each_product_is_measured_once_and_the_maps_get_the_fastest(site: Site) -> None:
    timer, into = Timer("bb"), model()
    choice = site.start(timer, into=into)
    assert len(timer.timed) == len(set(timer.timed)) == 12
    for _, linear in chosen_linears(into):
        chosen = linear.algorithms
        assert (chosen.rows, chosen.forward, chosen.of_input, chosen.of_weight) == (ROWS, "bb", "", "")
    assert sum(map(bool, choice.algorithms.chosen.values())) == 4
    assert choice.lines[-1].startswith(" 4 of 12 matrix products by measured algorithms (12 measured in")
    assert [
        line for line in choice.lines if "0.900 ms, torch's own product 1.000 ms" in line
    ] == choice.lines[:-1]


def test_a_later_start_takes_the_choice_of_the_cache(site: Site) -> None:
    first = site.start(Timer("bb"))
    assert stat.S_IMODE(site.file.stat().st_mode) == 0o600
    timer = Timer("cc")
    second = site.start(timer)
    assert timer.timed == []
    assert second.algorithms == first.algorithms
    assert second.lines == [" 4 of 12 matrix products by measured algorithms (from the cache)"]


def test_a_resumed_run_takes_the_choice_of_its_checkpoint(site: Site) -> None:
    saved = site.start(Timer("bb")).algorithms
    progress = Progress(iteration=3, products=saved)
    loaded = Progress.from_json(json.loads(json.dumps(asdict(progress))))
    assert loaded == progress
    site.file.unlink()
    timer = Timer("cc")
    resumed = site.start(timer, saved=loaded.products)
    assert timer.timed == []
    assert resumed.algorithms == saved
    assert resumed.lines == [" 4 of 12 matrix products by measured algorithms (from the checkpoint)"]


def test_the_checkpoint_wins_over_the_cache_and_only_new_shapes_are_measured(site: Site) -> None:
    saved = site.start(Timer("bb")).algorithms
    site.file.unlink()
    site.start(Timer("cc"))
    assert site.start(Timer("dd"), saved=saved).algorithms == saved
    timer = Timer("dd")
    wider = site.start(timer, saved=saved, into=model(32))
    assert len(timer.timed) == 12
    assert set(wider.algorithms.chosen) == set(timer.timed)


def test_another_device_measures_again_and_says_that_bits_may_differ(site: Site) -> None:
    saved = site.start(Timer("bb"), own=OTHER).algorithms
    timer = Timer("cc")
    choice = site.start(timer, saved=saved)
    assert len(timer.timed) == 12
    assert choice.algorithms.device == "GPU A"
    (warning,) = [line for line in choice.lines if "WARNING" in line]
    assert "of GPU B, cuBLASLt 130100, torch 2.11.0; this is GPU A, cuBLASLt 130100" in warning
    assert "bits may differ" in warning


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"no json"])
def test_a_damaged_file_is_measured_again_with_a_warning(site: Site, content: bytes) -> None:
    site.start(Timer("bb"))
    site.file.write_bytes(content)
    timer = Timer("cc")
    choice = site.start(timer)
    assert len(timer.timed) == 12
    (warning,) = site.said
    assert "measured again" in warning
    assert "SHA-256" in warning
    assert site.start(Timer("dd")).algorithms == choice.algorithms


@pytest.mark.parametrize(
    "value",
    [
        {"device": "A", "cublaslt": 1, "torch": "2", "chosen": {"x": 3}},
        {"device": "A", "cublaslt": "1", "torch": "2", "chosen": {}},
        {"device": "A", "cublaslt": 1, "torch": "2", "chosen": []},
        {"device": "A", "cublaslt": 1, "torch": "2"},
        {"device": "A", "cublaslt": 1, "torch": "2", "chosen": {"x": "a" * 1000}},
        [],
        3,
    ],
)
def test_a_damaged_state_is_refused(value: object) -> None:
    state = asdict(Progress()) | {"products": value}
    with pytest.raises((ValueError, KeyError, TypeError)):
        Progress.from_json(state)


def test_checkpoints_of_older_versions_have_no_algorithms() -> None:
    state = asdict(Progress())
    del state["products"]
    assert Progress.from_json(state).products is None


def test_all_ranks_have_the_choice_of_rank_0(site: Site) -> None:
    timers, models = [Timer("bb"), Timer("cc")], [model(), model()]

    def start(rank: int) -> Choice:
        return site.start(
            timers[rank], into=models[rank], topology=Topology(rank, 2, rank, 2), purpose="together"
        )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert first == second
    assert timers[1].timed == []
    for (_, one), (_, other) in zip(*map(chosen_linears, models), strict=True):
        assert one.algorithms == other.algorithms
        assert one.algorithms.forward == "bb"


@pytest.mark.parametrize("fails", [False, True])
def test_what_one_rank_cannot_do_all_ranks_refuse(site: Site, fails: bool) -> None:
    def no_timer() -> Timer:
        raise RuntimeError("no memory")

    def start(rank: int) -> str:
        own = OWN if fails or rank == 0 else OTHER
        with pytest.raises(ValueError, match="--gemm-algorithms measured: ") as raised:
            site.start(
                Timer("bb"), own=own, topology=Topology(rank, 2, rank, 2), purpose="both", make=no_timer
            )
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert first == second
    expected = (
        "no memory; use heuristic" if fails else "rank 1 with GPU B, cuBLASLt 130100, torch 2.11.0, rank 0"
    )
    assert expected in first


def test_sizes_that_cublaslt_cannot_read_stay_torchs(site: Site) -> None:
    timer, into = Timer("bb"), model(18)
    choice = site.start(timer, into=into)
    assert timer.timed == []
    assert choice.algorithms.chosen == {}
    assert not any(linear.algorithms.any for _, linear in chosen_linears(into))


RUN = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--fp8 --bf16",
            "--gemm-algorithms measured: chooses .* 16-bit products; omit one of it and --fp8",
        ),
        (
            "--fp32",
            "--gemm-algorithms measured: chooses .* 16-bit products; omit one of it and --fp32",
        ),
        ("--tensor-model-parallel-size 2", "--gemm-algorithms measured: needs whole layers"),
        ("--zero-spare-multiprocessors 4", "--zero-spare-multiprocessors 4: has no effect on the products"),
    ],
)
def test_settings_without_such_products_are_refused(flags: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_args([*RUN.split(), "--gemm-algorithms", "measured", *flags.split()])


def test_cpus_are_refused() -> None:
    config = parse_args([*RUN.split(), "--gemm-algorithms", "measured"])
    with pytest.raises(
        ValueError, match="chooses among algorithms of cuBLASLt, which a cpu lacks; use heuristic"
    ):
        config.compilation.check_products("cpu", "bfloat16")
    with pytest.raises(ValueError, match="16-bit products; use heuristic"):
        config.compilation.check_products("cuda", "float32")
    config.compilation.check_products("cuda", "bfloat16")
    parse_args(RUN.split()).compilation.check_products("cpu", "float32")
