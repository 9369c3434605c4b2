// quantize_rotated on a GPU.
#include "rotation.cuh"

namespace megatron_zpp::cuda {

namespace {

template <int BITS>
struct QuantizeRotatedParams {
  const void* input;
  uint32_t blocks, tiles;  // of all messages
  Messages<BITS> messages;
  Signs signs;
};

// The runs of a tile.
template <typename S, typename T>
struct LoadedTile {
  Run<T> runs[S::kAtOnce][S::kRuns];

  // Lanes past the end load the last block again.
  __device__ __forceinline__ void load(const T* input, uint32_t tile, uint32_t blocks) {
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint64_t block = min(S::block(tile, b), blocks - 1);
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) runs[b][v].load(input + block * S::kBlock + S::run(v));
    }
  }
};

// A number over a power up to this is not so small that it rounds to 0: bf16 numbers are multiples of 2^-133, and so
// are sums of them; fp32 numbers of 2^-149, and a rotation's factor makes them smaller.
template <typename T>
constexpr float kLargestSafePower = sizeof(T) == 2 ? 0x1p12f : 1.f;

// A rotated block that is `factor` too large, as a block of a message.
template <int BITS, typename S, typename T>
__device__ __forceinline__ void write_block(const QuantizeRotatedParams<BITS>& p, const LaneTables<BITS>& tables,
                                            uint32_t block, float (&x)[S::kRuns][8], float factor) {
  const Power power(bits_of(float_of(largest_magnitude<S>(x)) * factor));
  multiply(x, power.inverse() * factor);
  // Numbers are -0 again if they were so small that the product rounded to it; inputs and sums have larger steps.
  if (power.power > kLargestSafePower<T>) {
#pragma unroll
    for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[v][i] += 0.f;
    }
  }
  const float squares = product_of_block<S>(x, x);
  const Root unit(squares * (1.f / S::kBlock));
  const Encoder<BITS, S> encoder(tables, unit.root, unit.inverse);
  Nibbles codes[S::kRuns];
  float products[S::kRuns];
#pragma unroll
  for (int v = 0; v < S::kRuns; ++v) {
    uint32_t magnitudes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float size = fabsf(x[v][i]);
      magnitudes[i] = encoder.magnitude(size);
      const float product = size * level_of<BITS - 1>(tables.level, magnitudes[i]);
      products[v] = i == 0 ? product : products[v] + product;
    }
    codes[v] = codes_of<BITS>(x[v], magnitudes);
  }
  const float ratio = quotient_of(squares, sum_of_block<S>(products));
  const uint32_t stored = power.stored(power.power * ratio);
  if (block >= p.blocks) return;
  const uint32_t kept = float_of(stored << 16) > 0.f ? ~0u : 0u;  // neither 0 nor NaN
  const Quotient message = p.messages.by_blocks(block);
  const Message<BITS> to = p.messages[message.quotient];
#pragma unroll
  for (int v = 0; v < S::kRuns; ++v)
    to.store_run(S::run_of_message(message.remainder, v), codes[v] & kept);
  if (S::member() == 0) p.messages.store_scale(to, message.remainder, stored);
}

template <int BITS, typename S, typename T>
__global__ void __launch_bounds__(kThreads, S::kRuns > 4 ? 1 : sizeof(T) == 4 ? 2 : 3) quantize_rotated_kernel(
    const __grid_constant__ QuantizeRotatedParams<BITS> p) {
  // From 16-bit numbers, butterflies make no bits so low that a power of two loses them.
  constexpr bool kLater = sizeof(T) == 2 && (kRotated<S> == 256 || kRotated<S> == 64);
  __shared__ WarpSigns::Storage storage[kThreads / kWarp];
  WarpSigns signs(storage[threadIdx.x / kWarp]);
  const LaneTables<BITS> tables;
  const T* input = static_cast<const T*>(p.input);
  LoadedTile<S, T> loaded;
  uint32_t tile = uniform_warp_index() * kTilesOfSigns<S>;
  if (tile < p.tiles) loaded.load(input, tile, p.blocks);
  for (; tile < p.tiles; tile = tile_after<S>(tile)) {
    const uint32_t of_signs = tile % kTilesOfSigns<S>;
    if (of_signs == 0) signs.draw(p.signs, p.signs.first + uint64_t(tile) * S::kTileElements);
    float x[S::kAtOnce][S::kRuns][8];
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v)
        loaded.runs[b][v].to_floats(signs.of_run(S::run_of_tile(b, v) + of_signs * (S::kTileElements / 8)), x[b][v]);
    }
    if (tile_after<S>(tile) < p.tiles) loaded.load(input, tile_after<S>(tile), p.blocks);
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      butterflies<S>(x[b]);
      if constexpr (!kLater) multiply(x[b], kRotationFactor<S>);
      write_block<BITS, S, T>(p, tables, S::block(tile, b), x[b], kLater ? kRotationFactor<S> : 1.f);
    }
  }
}

}  // namespace

void run(const QuantizeRotated& op, CUstream_st* stream) {
  with_shape(op.format, [&](auto bits, auto shape) {
    constexpr int kBits = decltype(bits)::value;
    using S = decltype(shape);
    const uint32_t blocks = index_of(op.elements / op.format.block);
    const QuantizeRotatedParams<kBits> params{
        op.input, blocks, tiles_of<S>(blocks), Messages<kBits>(op.messages, op.format, op.elements / op.message_count),
        op.signs};
    with_dtype(op.input_dtype, [&](auto dtype) {
      using T = typename decltype(dtype)::type;
      launch<quantize_rotated_kernel<kBits, S, T>>(warps_of<S>(params.tiles), stream, params);
    });
  });
}

}  // namespace megatron_zpp::cuda
