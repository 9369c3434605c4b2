// quantize_difference on a GPU.
#include "lloyd_max.cuh"

namespace megatron_zpp::cuda {

namespace {

template <int BITS>
struct QuantizeDifferenceParams {
  const float *weights, *reference;
  uint32_t blocks;
  Messages<BITS> messages;
  const float* skip;
  float* squares;
};

template <int BITS, typename S>
__global__ void __launch_bounds__(kThreads) quantize_difference_kernel(
    const __grid_constant__ QuantizeDifferenceParams<BITS> p) {
  constexpr uint32_t kTile = S::kGroups * S::kAtOnce;
  const float level = level_of_lane<BITS>();
  const bool skip = p.skip != nullptr && *p.skip != 0.f;
  const Message<BITS> message = p.messages[0];
  for (uint32_t first = warp_index() * kTile; first < p.blocks; first += warp_count() * kTile) {
    Eight<float, true, true> weights[S::kAtOnce][S::kRuns], reference[S::kAtOnce][S::kRuns];
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint64_t block = min(first + b * S::kGroups + S::group(), p.blocks - 1);
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
        weights[b][v].load(p.weights + block * S::kBlock + S::run(v));
        reference[b][v].load(p.reference + block * S::kBlock + S::run(v));
      }
    }
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint32_t block = first + b * S::kGroups + S::group();
      const bool active = block < p.blocks;
      float d[S::kRuns][8], z[S::kRuns][8];
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
        float w[8], r[8];
        weights[b][v].to_floats(w);
        reference[b][v].to_floats(r);
#pragma unroll
        for (int i = 0; i < 8; ++i) d[v][i] = w[i] - r[i];
      }
      const Power power = Power::of(d, S());
      power.divide(d, z);
      const float mean = product_of_block<S>(z, z) * (1.f / S::kBlock);
      const uint32_t stored = skip ? 0u : power.stored(power.power * sqrtf(mean));
      const float scale = float_of(stored << 16);
      uint32_t codes[S::kRuns][8];
      encode<BITS>(d, scale, codes);
      const bool sent = scale > 0.f;  // neither 0 nor NaN
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
        for (int i = 0; i < 8; ++i) codes[v][i] = sent ? codes[v][i] : 0u;
        if (active) message.store_run(uint64_t(block) * S::kBlock + S::run(v), codes[v]);
      }
      if (active && S::member() == 0) p.messages.store_scale(message, block, stored);
      if (p.squares != nullptr) {
        float lost[S::kRuns][8];
#pragma unroll
        for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
          for (int i = 0; i < 8; ++i) lost[v][i] = d[v][i] - level_of(level, codes[v][i]) * scale;
        }
        const float difference = product_of_block<S>(d, d), missed = product_of_block<S>(lost, lost);
        if (active && S::member() == 0) {
          p.squares[block] = skip ? 0.f : difference;
          p.squares[p.blocks + block] = skip ? 0.f : missed;
        }
      }
    }
  }
}

}  // namespace

void run(const QuantizeDifference& op, CUstream_st* stream) {
  with_shape(op.format, [&](auto bits, auto shape) {
    constexpr int kBits = decltype(bits)::value;
    using S = decltype(shape);
    const uint32_t blocks = index_of(op.elements / op.format.block);
    const QuantizeDifferenceParams<kBits> params{
        op.weights, op.reference, blocks, Messages<kBits>(op.message, op.format, op.elements), op.skip, op.squares};
    launch<quantize_difference_kernel<kBits, S>>(tiles_of<S>(blocks), stream, params);
  });
}

}  // namespace megatron_zpp::cuda
