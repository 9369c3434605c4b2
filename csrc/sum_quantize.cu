// sum_quantize without feedback of the error on a GPU.
#include "sum_quantize.cuh"

namespace megatron_zpp::cuda {

namespace {

// K runs of RUN elements a lane. Much is done once a lane and block, so 64 elements are better than 32.
template <Codes In, Codes Out, int RUN, int K>
__global__ void __launch_bounds__(kThreads, RUN * K == 32 ? 3 : 2)
    sum_quantize_kernel(const __grid_constant__ SumQuantizeParams p) {
  const uint32_t groups = p.lanes.groups(), step = warp_count() * groups;
  uint32_t first = warp_index() * groups;
  if (first >= p.blocks) return;
  RunSum<In, RUN, K> sum;
  begin_sum(p, target_of(p, first), sum);
  for (; first < p.blocks; first += step) {
    float x[K][RUN];
    sum.finish(p.addends, x);
    if (first + step < p.blocks) begin_sum(p, target_of(p, first + step), sum);  // under way while this one is encoded
    const Target target = target_of(p, first);
    const Quotient place = p.by_message_blocks(target.block);
    write_block<Out>(p.writer, p.lanes, p.writer.message(place.quotient), place.remainder, first_element(p, target), x,
                     target.active);
  }
}

template <Codes In, Codes Out>
void launch_codes(const SumQuantize& op, CUstream_st* stream) {
  // What a lane reads of a message at a time: 32 bytes, or 16 where more would be elements of two blocks.
  constexpr int kWide = 256 / bits_of_code(In), kNarrow = kWide / 2;
  if (op.output_format.block < 64)
    return launch_blocks<sum_quantize_kernel<In, Out, kNarrow, 32 / kNarrow>>(op, 32, stream);
  if constexpr (kWide > kSmallestBlock) {
    if (op.format.block < kWide)
      return launch_blocks<sum_quantize_kernel<In, Out, kNarrow, 64 / kNarrow>>(op, 64, stream);
  }
  launch_blocks<sum_quantize_kernel<In, Out, kWide, 64 / kWide>>(op, 64, stream);
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
