// Lloyd-Max codes on a GPU.
//
// LANES neighbouring lanes hold a block, each V runs of eight elements: run v of member l begins at element
// 8 * (v * LANES + l) of the block. Sums of a block are those of megatron_zpp/ops/lloyd_max.py, `ordered_sum`: the
// elements of each run in turn, then the runs in halves onto each other.
#pragma once

#include "device.cuh"
#include "lloyd_max.h"

#ifndef ZPP_LANES
#define ZPP_LANES 8
#define ZPP_RUNS 4
#endif
#ifndef ZPP_STREAM
#define ZPP_STREAM false
#endif
#ifndef ZPP_DIRECT
#define ZPP_DIRECT 1
#endif
#ifndef ZPP_AHEAD
#define ZPP_AHEAD 0
#endif
#ifndef ZPP_GRIDS
#define ZPP_GRIDS kGridsOnChip
#endif
#ifndef ZPP_TWO
#define ZPP_TWO 2
#endif
#ifndef ZPP_MIN
#define ZPP_MIN 2
#endif

namespace megatron_zpp::cuda {

template <int LANES, int V>
struct Shape {
  static constexpr int kLanes = LANES, kRuns = V;
  static constexpr int kBlock = 8 * LANES * V;
  static constexpr int kGroups = kWarp / LANES;           // blocks that a warp holds at once
  static constexpr int kAtOnce = V == 1 ? 4 : V == 2 ? ZPP_TWO : 1;  // of these, whose loads are in flight together

  static constexpr int kTileElements = kWarp / LANES * kAtOnce * kBlock;  // of a warp

  __device__ static __forceinline__ int member() { return lane_index() % LANES; }
  __device__ static __forceinline__ int group() { return lane_index() / LANES; }
  // The first element of run v, counted from the beginning of the block.
  __device__ static __forceinline__ int run(int v) { return 8 * (v * LANES + member()); }
  // Block b of the lane in a tile, counted over all tiles.
  __device__ static __forceinline__ uint32_t block(uint32_t tile, int b) {
    return (tile * kAtOnce + b) * kGroups + group();
  }
  // The first element of its run v, counted from the beginning of the tile.
  __device__ static __forceinline__ int element(int b, int v) { return (b * kGroups + group()) * kBlock + run(v); }
};

// Calls run(std::integral_constant<int, bits>(), Shape<...>()).
template <typename Run>
void with_shape(const LloydMaxFormat& format, Run&& run) {
  const auto with_bits = [&](auto bits) {
    switch (format.block) {
      case 32: return run(bits, Shape<4, 1>());
      case 64: return run(bits, Shape<8, 1>());
      case 128: return run(bits, Shape<8, 2>());
      case 256: return run(bits, Shape<ZPP_LANES, ZPP_RUNS>());
      case 512: return run(bits, Shape<16, 4>());
      case 1024: return run(bits, Shape<32, 4>());
      case 2048: return run(bits, Shape<32, 8>());
    }
    throw std::invalid_argument("megatron_zpp: no kernel for blocks of " + std::to_string(format.block));
  };
  switch (format.bits) {
    case 2: return with_bits(std::integral_constant<int, 2>());
    case 3: return with_bits(std::integral_constant<int, 3>());
    case 4: return with_bits(std::integral_constant<int, 4>());
  }
  throw std::invalid_argument("megatron_zpp: no kernel for codes of " + std::to_string(format.bits) + " bits");
}

// The number of tiles of `blocks` blocks: what a warp takes at a time.
template <typename S>
uint32_t tiles_of(uint32_t blocks) {
  constexpr uint32_t tile = S::kGroups * S::kAtOnce;
  return (blocks + tile - 1) / tile;
}

// The sum over a block of one number per run.
template <typename S>
__device__ __forceinline__ float sum_of_block(float (&runs)[S::kRuns]) {
#pragma unroll
  for (int half = S::kRuns / 2; half > 0; half /= 2) {
#pragma unroll
    for (int v = 0; v < half; ++v) runs[v] += runs[v + half];
  }
  float sum = runs[0];
#pragma unroll
  for (int distance = S::kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  return sum;
}

// The sum of a[i] * b[i] over a block.
template <typename S>
__device__ __forceinline__ float product_of_block(const float (&a)[S::kRuns][8], const float (&b)[S::kRuns][8]) {
  float runs[S::kRuns];
#pragma unroll
  for (int v = 0; v < S::kRuns; ++v) {
    runs[v] = a[v][0] * b[v][0];
#pragma unroll
    for (int i = 1; i < 8; ++i) runs[v] += a[v][i] * b[v][i];
  }
  return sum_of_block<S>(runs);
}

// The bits of the largest magnitude of a block; above those of infinity if the block has a NaN. Positive numbers are
// largest as signed integers, negative ones as unsigned integers, and Hopper takes the maximum of three in one
// instruction, which is one instruction per number.
template <typename S>
__device__ __forceinline__ uint32_t largest_magnitude(const float (&x)[S::kRuns][8]) {
  int32_t positive = INT32_MIN;
  uint32_t negative = 0;
#pragma unroll
  for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint32_t a = bits_of(x[v][i]), b = bits_of(x[v][i + 1]);
      positive = max(positive, max(int32_t(a), int32_t(b)));
      negative = max(negative, max(a, b));
    }
  }
  return largest_of_lanes(max(uint32_t(positive) & ~kSignBit, negative & ~kSignBit), kLog2<S::kLanes>);
}

// A block over a power of two: its largest magnitude is then in [1, 2).
struct Power {
  float power;
  bool finite, usable;  // neither NaN nor Inf; besides, not below 2^-126

  // `key` has the bits of the largest magnitude.
  __device__ explicit __forceinline__ Power(uint32_t key)
      : finite(key < kInfinityBits), usable(key < kInfinityBits && key >= 0x00800000u) {
    power = usable ? float_of(key & kInfinityBits) : 1.f;
  }

  // 1 / power, which is exact: subnormal for 2^127.
  __device__ __forceinline__ float inverse() const { return float_of(max(0x7F000000u - bits_of(power), 0x00400000u)); }

  // The bits of a scale in bf16: 0 for a block of zeros or one below the normal numbers, NaN for one that is not
  // finite or overflows.
  __device__ __forceinline__ uint32_t stored(float scale) const {
    if (!finite) return 0x7FC0u;
    if (!usable) return 0u;
    const uint32_t bits = narrow<Bf16>(scale).bits;
    if (bits == 0x7F80u) return 0x7FC0u;
    return float_of(bits << 16) >= 0x1p-126f ? bits : 0u;
  }
};

// x * factor, in place, but 0 for -0.
template <int V>
__device__ __forceinline__ void multiply(float (&x)[V][8], float factor) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[v][i] = fmaf(x[v][i], factor, 0.f);
  }
}

// ---- codes ----

// Eight codes of BITS bits, each in four bits of a word.
using Nibbles = uint32_t;

// The code of a magnitude in units: floor(slope * magnitude), at most the highest, is the code or one less, so that one
// comparison with the boundary above that guess decides. A guess is right if slope * boundary b is in [b, b + 1) for
// all b; the slopes are in the middle of what that allows.
template <int BITS>
constexpr float kSlope = BITS == 3 ? 1.43f : 2.85f;

// A table of eight numbers in the lanes of a warp: lane c has entry c % 8.
template <int BITS>
struct LaneTables {
  static constexpr int kHalf = 1 << (BITS - 1);
  float boundary;  // infinity behind the last one
  float level;     // positive

  __device__ __forceinline__ LaneTables() : boundary(float_of(kInfinityBits)), level(lloyd_max_level(BITS, 0)) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (lane_index() % kHalf != i) continue;
      if (i < kHalf - 1) boundary = lloyd_max_boundary(BITS, i);
      level = lloyd_max_level(BITS, i);
    }
  }
};

// 1 if x >= y, and 0 otherwise, as the one instruction that compares so.
__device__ __forceinline__ float one_if_at_least(float x, float y) {
#ifdef __CUDA_ARCH__
  float result;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x >= y ? 1.f : 0.f;
#endif
}

// Encodes a block in multiples of `unit`.
template <int BITS, typename S>
class Encoder {
 public:
  // `inverse` is 1 / unit, within a percent. All lanes of a warp must call this and `magnitude`.
  __device__ __forceinline__ Encoder(const LaneTables<BITS>& tables, float unit, float inverse)
      : unit_(unit),
        boundary_(kProducts ? unit * tables.boundary : BITS == 2 ? unit * lloyd_max_boundary(2, 0) : tables.boundary),
        guess_factor_(kSlope<BITS> / kTop * inverse) {}

  // A word whose five low bits are the number of boundaries at most `size`, which is not negative.
  __device__ __forceinline__ uint32_t magnitude(float size) const {
    if constexpr (BITS == 2) return size >= boundary_ ? 1 : 0;
    const float place = __saturatef(size * guess_factor_);
    const float guess = __fmaf_rd(place, kTop, 0x1p23f);  // rounds down to an integer in the low bits
    const float entry = __shfl_sync(kAllLanes, boundary_, bits_of(guess), LaneTables<BITS>::kHalf);
    return bits_of(guess + one_if_at_least(size, kProducts ? entry : unit_ * entry));
  }

 private:
  // Each lane of a block multiplies one boundary by the unit, if the block has a lane for each.
  static constexpr bool kProducts = BITS > 2 && S::kLanes >= LaneTables<BITS>::kHalf;
  static constexpr float kTop = LaneTables<BITS>::kHalf - 0.01f;  // the guess is at most kHalf - 1
  float unit_, boundary_, guess_factor_;
};

// Packs eight words of magnitudes and the signs of x to codes, from the lowest level up. x must not be -0.
template <int BITS>
__device__ __forceinline__ Nibbles codes_of(const float (&x)[8], const uint32_t (&magnitudes)[8]) {
  uint32_t word = 0, signs = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) word = __funnelshift_r(word, magnitudes[i], 4);
#pragma unroll
  for (int i = 7; i >= 0; --i) signs = __funnelshift_l(bits_of(x[i]), signs, 4);
  signs &= 0x88888888u;
  const uint32_t all_bits = (signs >> (4 - BITS) << 1) - (signs >> 3);  // of the codes of negative numbers
  return word ^ (0x11111111u << (BITS - 1)) ^ all_bits;
}

// The bits under `kept` of each nibble, at the bottom: the two low bits of eight nibbles are 16 bits, one is eight.
__device__ __forceinline__ uint32_t squeezed_pairs(uint32_t x) {
  x &= 0x33333333u;
  x = (x | x >> 2) & 0x0F0F0F0Fu;
  x = (x | x >> 4) & 0x00FF00FFu;
  return (x | x >> 8) & 0xFFFFu;
}

__device__ __forceinline__ uint32_t squeezed_bits(uint32_t x) {
  x &= 0x11111111u;
  x = (x | x >> 3) & 0x03030303u;
  x = (x | x >> 6) & 0x000F000Fu;
  return (x | x >> 12) & 0xFFu;
}

// The levels of a warp: lane c has that of code c.
template <int BITS>
__device__ __forceinline__ float level_of_lane() {
  constexpr int kHalf = 1 << (BITS - 1);
  const int code = lane_index() % (2 * kHalf);
  const int i = code < kHalf ? kHalf - 1 - code : code - kHalf;
  float level = lloyd_max_level(BITS, 0);
#pragma unroll
  for (int j = 1; j < kHalf; ++j) level = i == j ? lloyd_max_level(BITS, j) : level;
  return code < kHalf ? -level : level;
}

// The level of the code in the low bits of `word`. All lanes of a warp must call this.
template <int BITS>
__device__ __forceinline__ float level_of(float level_of_lane, uint32_t word) {
  return __shfl_sync(kAllLanes, level_of_lane, word, 1 << BITS);
}

// ---- memory ----

// Eight numbers of a lane as loaded. fp32 numbers take two loads, of which the second finds its sectors in the cache:
// that takes fewer instructions than loads of whole sectors by pairs of lanes (device.cuh).
template <typename T>
class Run {
 public:
  __device__ __forceinline__ void load(const T* address) { words_ = load_vector<uint4, ZPP_STREAM>(address); }

  // The numbers, negated where the bit in `signs` is set.
  __device__ __forceinline__ void to_floats(uint32_t signs, float (&x)[8]) const {
    const uint32_t apart = signs | signs << 15;  // the signs of even elements below those of odd ones
    const uint32_t words[4] = {words_.x, words_.y, words_.z, words_.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t word = words[k] ^ (apart << (15 - 2 * k) & 0x80008000u);
      x[2 * k] = to_float(T{uint16_t(word)});
      x[2 * k + 1] = to_float(T{uint16_t(word >> 16)});
    }
  }

 private:
  uint4 words_;
};

template <>
class Run<float> {
 public:
  __device__ __forceinline__ void load(const float* address) {
#if ZPP_DIRECT
#pragma unroll
    for (int h = 0; h < 2; ++h) quads_[h] = load_vector<float4, ZPP_STREAM>(address + 4 * h);
#else
#pragma unroll
    for (int h = 0; h < 2; ++h) quads_[h] = load_vector<float4, ZPP_STREAM>(pair_quad(address, h));
#endif
  }

  __device__ __forceinline__ void to_floats(float (&x)[8]) const {
#if ZPP_DIRECT
    to_eight(quads_, x);
#else
    float4 quads[2] = {quads_[0], quads_[1]};
    exchange_with_neighbour(quads);
    to_eight(quads, x);
#endif
  }

  __device__ __forceinline__ void to_floats(uint32_t signs, float (&x)[8]) const {
    to_floats(x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = float_of(bits_of(x[i]) ^ (signs << (31 - i) & kSignBit));
  }

 private:
  float4 quads_[2];
};

// ---- messages ----

// One message. Codes of a run of eight elements are BITS bytes: all of them, or the low bits and the high ones apart.
template <int BITS>
struct Message {
  uint8_t* bytes;
  int64_t elements, code_bytes;

  __device__ __forceinline__ void store_run(uint64_t element, Nibbles codes) const {
    if constexpr (BITS == 4) {
      *reinterpret_cast<uint32_t*>(bytes + element / 2) = codes;
    } else {
      *reinterpret_cast<uint16_t*>(bytes + element / 4) = uint16_t(squeezed_pairs(codes));
      if constexpr (BITS == 3) bytes[elements / 4 + element / 8] = uint8_t(squeezed_bits(codes >> 2));
    }
  }

  // What load_run read, as 32 bits.
  __device__ __forceinline__ uint32_t load_run(uint64_t element) const {
    if constexpr (BITS == 4) return *reinterpret_cast<const uint32_t*>(bytes + element / 2);
    const uint32_t low = *reinterpret_cast<const uint16_t*>(bytes + element / 4);
    if constexpr (BITS == 2) return low;
    return low | uint32_t(bytes[elements / 4 + element / 8]) << 16;
  }

  // A word that has code i of a run in its low bits, with others above.
  __device__ static __forceinline__ uint32_t code(uint32_t run, int i) {
    if constexpr (BITS == 3) return (run >> 2 * i & 3) | (run >> (16 + i) & 1) << 2;
    return run >> BITS * i;
  }

  __device__ __forceinline__ uint16_t* scale(uint32_t block) const {
    return reinterpret_cast<uint16_t*>(bytes + code_bytes) + block;
  }
};

// Messages of equal sizes, one after the other, whose blocks are counted through.
template <int BITS>
struct Messages {
  uint8_t* first;
  MessageLayout layout;
  int64_t elements;  // of one message
  Divisor by_blocks;

  Messages(const uint8_t* first, const LloydMaxFormat& format, int64_t elements)
      : first(const_cast<uint8_t*>(first)),
        layout(message_layout(format, elements)),
        elements(elements),
        by_blocks(layout.blocks) {}

  __device__ __forceinline__ Message<BITS> operator[](uint32_t index) const {
    return {first + index * layout.bytes, elements, layout.code_bytes};
  }

  // One lane per block stores its scale, and after the last one the padding.
  __device__ __forceinline__ void store_scale(const Message<BITS>& message, uint32_t block, uint32_t bits) const {
    *message.scale(block) = uint16_t(bits);
    if (block + 1 != layout.blocks) return;
#pragma unroll 1
    for (int64_t at = layout.used_bytes; at < layout.bytes; at += 2)
      *reinterpret_cast<uint16_t*>(message.bytes + at) = 0;
  }
};

}  // namespace megatron_zpp::cuda
