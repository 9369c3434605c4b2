// What the kernels of sum_quantize share: tiles and blocks of the sum, and launching.
#pragma once

#include "blocks.cuh"
#include "sums.cuh"

namespace megatron_zpp::cuda {

struct SumQuantizeParams {
  Addends addends;
  uint32_t blocks;       // of all outputs
  uint32_t runs, tiles;  // of a lane's elements, of a warp's
  Divisor by_message_blocks;
  Lanes lanes;
  Writer writer;
  void* error;
};

// The block that a group of lanes has of a tile, counted through all outputs. Lanes behind the end have the last one.
struct Target {
  uint32_t block;
  bool active;
};

__device__ __forceinline__ Target target_of(const SumQuantizeParams& p, uint32_t tile) {
  const uint32_t block = tile * p.lanes.groups() + p.lanes.group();
  return {min(block, p.blocks - 1), block < p.blocks};
}

__device__ __forceinline__ uint64_t first_element(const SumQuantizeParams& p, const Target& target) {
  return uint64_t(target.block) << p.writer.log_block;
}

// Sums with as many stages as BYTES of shared memory have room for. Each warp of a block has stages of its own.
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
      Writer(op.output, op.output_format, op.elements / op.output_count, op.seed),
      op.error,
  };
}

// Of what fits on the chip: to start is dear here, a tile takes long.
constexpr int kGrids = 4;

template <auto kernel>
void launch_tiles(const SumQuantize& op, int elements_a_lane, CUstream_st* stream) {
  const SumQuantizeParams params = params_of(op, elements_a_lane);
  launch_loading_ahead<kernel>(params.tiles, stream, params, kGrids);
}

// sum_quantize with an error to feed back.
void run_with_error(const SumQuantize& op, CUstream_st* stream);

}  // namespace megatron_zpp::cuda
