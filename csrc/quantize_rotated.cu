// quantize_rotated on a GPU.
#include "lloyd_max.cuh"

namespace megatron_zpp::cuda {

namespace {

template <int BITS>
struct QuantizeRotatedParams {
  const void* input;
  uint32_t blocks;  // of all messages
  Messages<BITS> messages;
  Signs signs;
};

template <int BITS, typename S, typename T>
__global__ void __launch_bounds__(kThreads) quantize_rotated_kernel(
    const __grid_constant__ QuantizeRotatedParams<BITS> p) {
  constexpr uint32_t kTile = S::kGroups * S::kAtOnce;
  const float level = level_of_lane<BITS>();
  const T* input = static_cast<const T*>(p.input);
  for (uint32_t first = warp_index() * kTile; first < p.blocks; first += warp_count() * kTile) {
    const TileSigns<S::kAtOnce * S::kRuns> signs(p.signs, p.signs.first + uint64_t(first) * S::kBlock);
    Eight<T, true, true> loaded[S::kAtOnce][S::kRuns];
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint64_t block = min(first + b * S::kGroups + S::group(), p.blocks - 1);
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) loaded[b][v].load(input + block * S::kBlock + S::run(v));
    }
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint32_t block = first + b * S::kGroups + S::group();
      const bool active = block < p.blocks;
      float y[S::kRuns][8], z[S::kRuns][8], levels[S::kRuns][8];
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
        loaded[b][v].to_floats(y[v]);
        signs.apply(b * S::kRuns + v, y[v]);
        butterflies<S>(y[v]);
      }
      const Power power = Power::of(y, S());
      power.divide(y, z);
      const float squares = product_of_block<S>(z, z);
      uint32_t codes[S::kRuns][8];
      encode<BITS>(z, sqrtf(squares * (1.f / S::kBlock)), codes);
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
        for (int i = 0; i < 8; ++i) levels[v][i] = level_of(level, codes[v][i]);
      }
      const float ratio = squares / product_of_block<S>(z, levels);
      const uint32_t stored = power.stored(power.power * ratio);
      const bool sent = float_of(stored << 16) > 0.f;  // neither 0 nor NaN
      if (!active) continue;
      const Quotient message = p.messages.by_blocks(block);
      const Message<BITS> to = p.messages[message.quotient];
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
        for (int i = 0; i < 8; ++i) codes[v][i] = sent ? codes[v][i] : 0u;
        to.store_run(uint64_t(message.remainder) * S::kBlock + S::run(v), codes[v]);
      }
      if (S::member() == 0) p.messages.store_scale(to, message.remainder, stored);
    }
    __syncwarp();
  }
}

}  // namespace

void run(const QuantizeRotated& op, CUstream_st* stream) {
  with_shape(op.format, [&](auto bits, auto shape) {
    constexpr int kBits = decltype(bits)::value;
    using S = decltype(shape);
    const uint32_t blocks = index_of(op.elements / op.format.block);
    const QuantizeRotatedParams<kBits> params{
        op.input, blocks, Messages<kBits>(op.messages, op.format, op.elements / op.message_count), op.signs};
    with_dtype(op.input_dtype, [&](auto dtype) {
      launch<quantize_rotated_kernel<kBits, S, typename decltype(dtype)::type>>(tiles_of<S>(blocks), stream, params);
    });
  });
}

}  // namespace megatron_zpp::cuda
