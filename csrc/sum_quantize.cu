// sum_quantize on a GPU.
#include "sum_quantize.cuh"

namespace megatron_zpp::cuda {

namespace {

// RUN elements per lane. There is much work per lane and block, so 64 are better than 32.
template <CodeType In, CodeType Out, int RUN, int SCALES>
__global__ void __launch_bounds__(kThreads, RUN == 32 ? 3 : 2)
    sum_quantize_kernel(const __grid_constant__ SumQuantizeParams p) {
  using Sums = BlockSums<In, RUN, SCALES, 40 << 10>;
  __shared__ typename Sums::Stages stages[kThreads / kWarp];
  uint32_t tile = warp_index();
  if (tile >= p.tiles) return;
  Sums sums(p.addends, stages[threadIdx.x / kWarp], tile, warp_count(), p.runs);
  for (; tile < p.tiles; tile += warp_count()) {
    float x[1][RUN];
    sums.next(tile, x[0]);
    const Target target = target_of(p, tile);
    const Quotient output = p.by_message_blocks(target.block);
    write_block<Out>(p.writer, p.lanes, p.writer.message(output.quotient), output.remainder, x, target.active);
  }
}

template <CodeType In, CodeType Out>
void launch_codes(const SumQuantize& op, CUstream_st* stream) {
  if (op.output_format.block < 64) return launch_tiles<sum_quantize_kernel<In, Out, 32, 1>>(op, 32, stream);
  if (op.format.block < 64) return launch_tiles<sum_quantize_kernel<In, Out, 64, 2>>(op, 64, stream);
  launch_tiles<sum_quantize_kernel<In, Out, 64, 1>>(op, 64, stream);
}

}  // namespace

void run(const SumQuantize& op, CUstream_st* stream) {
  with_code_type(op.format.code_type, [&](auto in) {
    with_code_type(op.output_format.code_type,
               [&](auto out) { launch_codes<decltype(in)::value, decltype(out)::value>(op, stream); });
  });
}

}  // namespace megatron_zpp::cuda
