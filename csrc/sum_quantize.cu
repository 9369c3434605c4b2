// sum_quantize without feedback of the error on a GPU.
#include "sum_quantize.cuh"

namespace megatron_zpp::cuda {

namespace {

// Runs of 16 bytes of codes: fewest instructions an element, which is what limits sums of int4.
template <Codes In, Codes Out, int ELEMENTS>
__global__ void __launch_bounds__(kThreads, ELEMENTS == 32 ? 3 : 2)
    sum_quantize_kernel(const __grid_constant__ SumQuantizeParams p) {
  constexpr int kRun = 128 / bits_of_code(In);
  const uint32_t groups = p.lanes.groups();
  for (uint32_t first = warp_index() * groups; first < p.blocks; first += warp_count() * groups) {
    const Target target = target_of(p, first);
    const uint64_t index = uint64_t(target.block) << p.writer.log_block;
    float x[ELEMENTS / kRun][kRun];
    sum_block<In>(p, index, x);
    const Quotient place = p.by_message_blocks(target.block);
    write_block<Out>(p.writer, p.lanes, p.writer.message(place.quotient), place.remainder, index, x, target.active);
  }
}

template <Codes In, Codes Out>
void launch_codes(const SumQuantize& op, CUstream_st* stream) {
  if (op.output_format.block <= 1024)
    launch_blocks<sum_quantize_kernel<In, Out, 32>>(op, 32, stream);
  else
    launch_blocks<sum_quantize_kernel<In, Out, 64>>(op, 64, stream);
}

}  // namespace

void run(const SumQuantize& op, CUstream_st* stream) {
  if (op.error != nullptr) return run_with_error(op, stream);
  with_codes(op.format.codes, [&](auto in) {
    with_codes(op.output_format.codes,
               [&](auto out) { launch_codes<decltype(in)::value, decltype(out)::value>(op, stream); });
  });
}

}  // namespace megatron_zpp::cuda
