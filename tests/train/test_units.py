"""Units of the engine that a command line asks for."""

from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.setup.build_engine import build_engine
from megatron_zpp.train.setup.device import prepare_device
from tests.train.conftest import BYTES, TINY


def test_halves_of_layers_and_tables_have_their_rates_beside_muon() -> None:
    """Tables have the decoupled one, as all parameters that Muon does not train."""
    line = "--mock-data --train-iters 1 --device cpu --optimizer muon --decoupled-lr 1e-3".split()
    line += "--untie-embeddings-and-output-weights --zero-unit sublayer".split()
    config = parse_args([*BYTES, *TINY, *line])
    engine = build_engine(config, 257, prepare_device(config, Topology()), Topology())
    for unit in engine.units:
        for placement in unit.layout.placements:
            assert placement.decoupled != bool(placement.matrices), placement.name
    halves = [unit for unit in engine.units if unit.names[0].startswith("layers.")]
    assert len(halves) == 2 * config.model.num_layers
