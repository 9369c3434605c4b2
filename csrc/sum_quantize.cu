// sum_quantize on a GPU.
#include "blocks.cuh"
#include "sums.cuh"

namespace megatron_zpp::cuda {

namespace {

struct SumQuantizeParams {
  Addends addends;
  uint32_t blocks;       // in all outputs
  uint32_t runs, tiles;  // a run is the elements of a lane, a tile those of a warp
  Divisor by_message_blocks;
  Lanes lanes;
  Writer writer;
};

// The block of a tile that a group of lanes encodes, counted over all outputs. Lanes past the end have the last block
// and are not active.
struct Target {
  uint32_t block;
  bool active;
};

__device__ __forceinline__ Target target_of(const SumQuantizeParams& p, uint32_t tile) {
  const uint32_t block = tile * p.lanes.groups() + p.lanes.group();
  return {min(block, p.blocks - 1), block < p.blocks};
}

// Sums with as many stages per warp as fit in BYTES of shared memory per thread block.
template <CodeType C, int RUN, int BYTES>
using BlockSums = TileSums<C, RUN, BYTES / (kThreads / kWarp) / int(sizeof(Stage<C, RUN>))>;

SumQuantizeParams params_of(const SumQuantize& op, int elements_a_lane) {
  const int64_t blocks = op.elements / op.format.block;
  const Lanes lanes{log2_of(op.format.block / elements_a_lane)};
  return {
      Addends(op.messages, op.format, op.elements, op.message_count),
      index_of(blocks),
      uint32_t(op.elements / elements_a_lane),
      uint32_t((blocks + lanes.groups() - 1) / lanes.groups()),
      Divisor(blocks / op.output_count),
      lanes,
      Writer(op.output, op.format, op.elements / op.output_count),
  };
}

// Fewer than kGridsOnChip, because thread blocks are expensive to start here and tiles take long.
constexpr int kGrids = 4;

template <auto kernel>
void launch_tiles(const SumQuantize& op, int elements_a_lane, CUstream_st* stream) {
  const SumQuantizeParams params = params_of(op, elements_a_lane);
  launch_loading_ahead<kernel>(params.tiles, stream, params, kGrids);
}

// RUN elements per lane. There is much work per lane and block, so 64 are better than 32.
template <CodeType C, int RUN>
__global__ void __launch_bounds__(kThreads, RUN == 32 ? 3 : 2)
    sum_quantize_kernel(const __grid_constant__ SumQuantizeParams p) {
  using Sums = BlockSums<C, RUN, 40 << 10>;
  __shared__ typename Sums::Stages stages[kThreads / kWarp];
  uint32_t tile = warp_index();
  if (tile >= p.tiles) return;
  Sums sums(p.addends, stages[threadIdx.x / kWarp], tile, warp_count(), p.runs);
  for (; tile < p.tiles; tile += warp_count()) {
    float x[1][RUN];
    sums.next(tile, x[0]);
    const Target target = target_of(p, tile);
    const Quotient output = p.by_message_blocks(target.block);
    write_block<C>(p.writer, p.lanes, p.writer.message(output.quotient), output.remainder, x, target.active);
  }
}

template <CodeType C>
void launch_codes(const SumQuantize& op, CUstream_st* stream) {
  if (op.format.block < 64) return launch_tiles<sum_quantize_kernel<C, 32>>(op, 32, stream);
  launch_tiles<sum_quantize_kernel<C, 64>>(op, 64, stream);
}

}  // namespace

void run(const SumQuantize& op, CUstream_st* stream) {
  with_code_type(op.format.code_type,
                 [&](auto code_type) { launch_codes<decltype(code_type)::value>(op, stream); });
}

}  // namespace megatron_zpp::cuda
