// adamw_quantize on a GPU.
#include "adamw.cuh"
#include "blocks.cuh"

namespace megatron_zpp::cuda {

namespace {

struct AdamwQuantizeParams {
  AdamwStep step;
  uint32_t blocks;
  Lanes lanes;
  Writer writer;
};

// Steps this lane's eight elements, which begin at `at`, and returns their new weights. Both lanes of a pair must call
// this, because they load and store the states together, as quads.
template <bool ALIGNED>
__device__ __forceinline__ void step_eight(const AdamwStep& op, const AdamwFactors& factors, int64_t at, bool active,
                                           float (&weights)[8]) {
  AdamwQuad<float, ALIGNED> quads[2];
  float4 weight_quads[2];
  const int64_t starts[2] = {at - 4 * (lane_index() & 1), at + 8 - 4 * (lane_index() & 1)};
#pragma unroll
  for (int h = 0; h < 2; ++h) quads[h].load(op, starts[h]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    quads[h].step(op, factors, starts[h]);
    if (active) quads[h].store(op, starts[h]);
    weight_quads[h] = quads[h].weight;
  }
  exchange_with_neighbour(weight_quads);
  to_eight(weight_quads, weights);
}

template <CodeType C, int V, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, V == 8 ? 1 : 2)
    adamw_quantize_kernel(const __grid_constant__ AdamwQuantizeParams p) {
  if (*p.step.scalars.found_inf != 0) return;
  const AdamwFactors factors = load_factors(p.step);
  const uint32_t groups = p.lanes.groups();
  for (uint32_t first = warp_index() * groups; first < p.blocks; first += warp_count() * groups) {
    const bool active = first + p.lanes.group() < p.blocks;
    // Lanes past the end read the last block again and write nothing.
    const uint32_t block = min(first + p.lanes.group(), p.blocks - 1);
    const int64_t start = int64_t(block) << p.writer.log_block;
    float x[V][8];
#pragma unroll
    for (int v = 0; v < V; ++v) step_eight<ALIGNED>(p.step, factors, start + p.lanes.run<8>(v), active, x[v]);
    write_block<C>(p.writer, p.lanes, p.writer.messages, block, x, active);
  }
}

template <CodeType C, int V>
void launch_vectors(const AdamwQuantize& op, CUstream_st* stream) {
  const AdamwQuantizeParams params{
      op.step,
      index_of(op.step.elements / op.format.block),
      Lanes{log2_of(op.format.block / (8 * V))},
      Writer(op.message, op.format, op.step.elements),
  };
  const int64_t tiles = (params.blocks + params.lanes.groups() - 1) / params.lanes.groups();
  if (is_aligned(op.step))
    launch<adamw_quantize_kernel<C, V, true>>(tiles, stream, params);
  else
    launch<adamw_quantize_kernel<C, V, false>>(tiles, stream, params);
}

}  // namespace

void run(const AdamwQuantize& op, CUstream_st* stream) {
  with_code_type(op.format.code_type, [&](auto code_type) {
    constexpr CodeType C = decltype(code_type)::value;
    switch (vectors_a_lane(op.format.block)) {
      case 1: return launch_vectors<C, 1>(op, stream);
      case 4: return launch_vectors<C, 4>(op, stream);
      case 8: return launch_vectors<C, 8>(op, stream);
    }
    throw std::invalid_argument("adamw_quantize: no kernel for blocks of " + std::to_string(op.format.block));
  });
}

}  // namespace megatron_zpp::cuda
