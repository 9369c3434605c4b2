// sum_quantize without feedback of the error on a GPU.
#include "sum_quantize.cuh"

namespace megatron_zpp::cuda {

namespace {

// RUN elements a lane. Much is done once a lane and block, so 64 are better than 32.
template <Codes In, Codes Out, int RUN, int SCALES>
__global__ void __launch_bounds__(kThreads, RUN == 32 ? 3 : 2)
    sum_quantize_kernel(const __grid_constant__ SumQuantizeParams p) {
  using Sums = BlockSums<In, RUN, SCALES, 40 << 10>;
  __shared__ typename Sums::Landings landings[kThreads / kWarp];
  uint32_t tile = warp_index();
  if (tile >= p.tiles) return;
  Sums sums(p.addends, landings[threadIdx.x / kWarp], tile, warp_count(), p.runs);
  for (; tile < p.tiles; tile += warp_count()) {
    float x[1][RUN];
    sums.next(tile, x[0]);
    const Target target = target_of(p, tile);
    const Quotient place = p.by_message_blocks(target.block);
    write_block<Out>(p.writer, p.lanes, p.writer.message(place.quotient), place.remainder, first_element(p, target), x,
                     target.active);
  }
}

template <Codes In, Codes Out>
void launch_codes(const SumQuantize& op, CUstream_st* stream) {
  if (op.output_format.block < 64) return launch_tiles<sum_quantize_kernel<In, Out, 32, 1>>(op, 32, stream);
  if (op.format.block < 64) return launch_tiles<sum_quantize_kernel<In, Out, 64, 2>>(op, 64, stream);
  launch_tiles<sum_quantize_kernel<In, Out, 64, 1>>(op, 64, stream);
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
