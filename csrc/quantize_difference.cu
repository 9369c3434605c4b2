// quantize_difference on a GPU.
#include "lloyd_max_codes.cuh"

namespace megatron_zpp::cuda {

namespace {

template <int BITS>
struct QuantizeDifferenceParams {
  const float *weights, *reference;
  uint32_t blocks, tiles;
  Messages<BITS> messages;
  const float* skip;
  float* squares;
};

// Differences as a block of the message.
template <int BITS, typename S>
__device__ __forceinline__ void write_block(const QuantizeDifferenceParams<BITS>& p, const LaneTables<BITS>& tables,
                                            bool skip, uint32_t block, float (&d)[S::kRuns][8]) {
  const Power power(largest_magnitude<S>(d));
  float z[S::kRuns][8];
#pragma unroll
  for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
    for (int i = 0; i < 8; ++i) z[v][i] = d[v][i] * power.inverse();
  }
  const float mean = product_of_block<S>(z, z) * (1.f / S::kBlock);
  const uint32_t stored = skip ? 0u : power.stored(power.power * sqrtf(mean));
  const float scale = float_of(stored << 16);
  const uint32_t kept = scale > 0.f ? ~0u : 0u;  // neither 0 nor NaN
  const Message<BITS> message = p.messages[0];
  const Encoder<BITS, S> encoder(tables, scale, 1.f / scale);
#pragma unroll
  for (int v = 0; v < S::kRuns; ++v) {
    uint32_t magnitudes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitudes[i] = encoder.magnitude(fabsf(d[v][i]));
    const Nibbles codes = codes_of<BITS>(d[v], magnitudes) & kept;
    if (block < p.blocks) message.store_run(S::run_of_message(block, v), codes);
    if (p.squares == nullptr) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i)  // what the code loses, or its negative
      z[v][i] = fabsf(d[v][i]) - level_of<BITS - 1>(tables.level, magnitudes[i]) * scale;
  }
  const bool writes = block < p.blocks && S::member() == 0;
  if (writes) p.messages.store_scale(message, block, stored);
  if (p.squares == nullptr) return;
  const float difference = product_of_block<S>(d, d), missed = product_of_block<S>(z, z);
  if (!writes) return;
  p.squares[block] = skip ? 0.f : difference;
  p.squares[p.blocks + block] = skip ? 0.f : missed;
}

template <int BITS, typename S>
__global__ void __launch_bounds__(kThreads, S::kRuns > 4 ? 1 : 2) quantize_difference_kernel(
    const __grid_constant__ QuantizeDifferenceParams<BITS> p) {
  const LaneTables<BITS> tables;
  const bool skip = p.skip != nullptr && *p.skip != 0.f;
  for (uint32_t tile = uniform_warp_index(); tile < p.tiles; tile += warp_count()) {
    Run<float> weights[S::kAtOnce][S::kRuns], reference[S::kAtOnce][S::kRuns];
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint64_t start = uint64_t(min(S::block(tile, b), p.blocks - 1)) * S::kBlock;
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
        weights[b][v].load(p.weights + start + S::run(v));
        reference[b][v].load(p.reference + start + S::run(v));
      }
    }
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      float d[S::kRuns][8];
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
        float w[8], r[8];
        weights[b][v].to_floats(w);
        reference[b][v].to_floats(r);
#pragma unroll
        for (int i = 0; i < 8; ++i) d[v][i] = w[i] - r[i] + 0.f;  // 0 for -0
      }
      write_block<BITS, S>(p, tables, skip, S::block(tile, b), d);
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
        op.weights, op.reference, blocks, tiles_of<S>(blocks), Messages<kBits>(op.message, op.format, op.elements),
        op.skip, op.squares};
    launch<quantize_difference_kernel<kBits, S>>(params.tiles, stream, params);
  });
}

}  // namespace megatron_zpp::cuda
