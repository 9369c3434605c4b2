"""Says which ZeRO++ flags the ranks of a mesh cannot obey, with the sizes that would do."""

from megatron_zpp.config.options import option_error
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.mesh import Mesh


def check_routes(zero: ZeroConfig, mesh: Mesh) -> None:
    """Raise ValueError, with the sizes that would be valid, for flags for which `mesh` has no route."""
    local = mesh.replicas.size
    zero.hpz_ranks(local)
    zero.gradient_ranks(local)
    if not zero.sends_differences:
        return
    flag, format = "--zero-quantized-weights-format", zero.zero_quantized_weights_format
    if mesh.nodes == 1:
        raise option_error(
            flag, format, "needs 2 or more nodes; on one node use int8, or omit --zero-quantized-weights"
        )
    if not zero.holds_references(local):
        divisors = [str(size) for size in range(2, local + 1) if local % size == 0]
        raise option_error(
            flag,
            format,
            f"needs groups inside a node of {local} data ranks, each of which keeps a reference: "
            f"--zero-hpz-partition-size {', '.join(['auto', *divisors])}; not {zero.zero_hpz_partition_size}",
        )
