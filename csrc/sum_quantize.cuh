// What the kernels of sum_quantize share: blocks of the sum, and launching.
#pragma once

#include "blocks.cuh"
#include "sums.cuh"

namespace megatron_zpp::cuda {

struct SumQuantizeParams {
  Addends addends;
  uint32_t blocks;  // of all outputs
  Divisor by_message_blocks;
  Lanes lanes;
  Writer writer;
  void* error;
  Type error_type;
};

// The block that a group of lanes has, counted through all outputs. Lanes behind the end have the last one once more.
struct Target {
  uint32_t block;
  bool active;
};

__device__ __forceinline__ Target target_of(const SumQuantizeParams& p, uint32_t first) {
  const uint32_t block = first + p.lanes.group();
  return {min(block, p.blocks - 1), block < p.blocks};
}

__device__ __forceinline__ uint64_t first_element(const SumQuantizeParams& p, const Target& target) {
  return uint64_t(target.block) << p.writer.log_block;
}

template <Codes In, int RUN, int K>
__device__ __forceinline__ void begin_sum(const SumQuantizeParams& p, const Target& target, RunSum<In, RUN, K>& sum) {
  const uint32_t first = target.block << (p.writer.log_block - kLog2<RUN>);
  uint32_t run[K];
#pragma unroll
  for (int k = 0; k < K; ++k) run[k] = first + p.lanes.run<RUN>(k) / RUN;
  sum.begin(p.addends, run);
}

inline SumQuantizeParams params_of(const SumQuantize& op, int elements_a_lane) {
  const int64_t blocks = op.elements / op.output_format.block;
  return {
      Addends(op.messages, op.format, op.elements, op.message_count),
      index_of(blocks),
      Divisor(blocks / op.output_count),
      Lanes{log2_of(op.output_format.block / elements_a_lane)},
      Writer(op.output, op.output_format, op.elements / op.output_count, op.seed),
      op.error,
      op.error_type,
  };
}

template <auto kernel>
void launch_blocks(const SumQuantize& op, int elements_a_lane, CUstream_st* stream) {
  const SumQuantizeParams params = params_of(op, elements_a_lane);
  launch<kernel, kGridsLoadingAhead>((params.blocks + params.lanes.groups() - 1) / params.lanes.groups(), stream, params);
}

// sum_quantize with an error to feed back.
void run_with_error(const SumQuantize& op, CUstream_st* stream);

}  // namespace megatron_zpp::cuda
