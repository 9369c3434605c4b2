// Code of sum_quantize: tiles and blocks of the sum, and launching.
#pragma once

#include "blocks.cuh"
#include "sums.cuh"

namespace megatron_zpp::cuda {

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
template <CodeType In, int RUN, int SCALES, int BYTES>
using BlockSums = TileSums<In, RUN, SCALES, BYTES / (kThreads / kWarp) / int(sizeof(Stage<In, RUN, SCALES>))>;

inline SumQuantizeParams params_of(const SumQuantize& op, int elements_a_lane) {
  const int64_t blocks = op.elements / op.output_format.block;
  const Lanes lanes{log2_of(op.output_format.block / elements_a_lane)};
  return {
      Addends(op.messages, op.format, op.elements, op.message_count),
      index_of(blocks),
      uint32_t(op.elements / elements_a_lane),
      uint32_t((blocks + lanes.groups() - 1) / lanes.groups()),
      Divisor(blocks / op.output_count),
      lanes,
      Writer(op.output, op.output_format, op.elements / op.output_count),
  };
}

// Fewer than kGridsOnChip, because thread blocks are expensive to start here and tiles take long.
constexpr int kGrids = 4;

template <auto kernel>
void launch_tiles(const SumQuantize& op, int elements_a_lane, CUstream_st* stream) {
  const SumQuantizeParams params = params_of(op, elements_a_lane);
  launch_loading_ahead<kernel>(params.tiles, stream, params, kGrids);
}

}  // namespace megatron_zpp::cuda
