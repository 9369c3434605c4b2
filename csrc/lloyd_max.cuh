// Lloyd-Max codes on a GPU.
//
// LANES neighbouring lanes hold a block, each V runs of eight elements: run v of member l begins at element
// 8 * (v * LANES + l) of the block. Sums of a block are those of megatron_zpp/ops/lloyd_max.py, `ordered_sum`: the
// elements of each run in turn, then the runs in halves onto each other.
#pragma once

#include "device.cuh"
#include "lloyd_max.h"

namespace megatron_zpp::cuda {

template <int LANES, int V>
struct Shape {
  static constexpr int kLanes = LANES, kRuns = V;
  static constexpr int kBlock = 8 * LANES * V;
  static constexpr int kGroups = kWarp / LANES;           // blocks that a warp holds at once
  static constexpr int kAtOnce = V == 1 ? 4 : V == 2 ? 2 : 1;  // of these, whose loads are in flight together

  __device__ static __forceinline__ int member() { return lane_index() % LANES; }
  __device__ static __forceinline__ int group() { return lane_index() / LANES; }
  // The first element of run v, counted from the beginning of the block.
  __device__ static __forceinline__ int run(int v) { return 8 * (v * LANES + member()); }
};

// Calls run(std::integral_constant<int, bits>(), Shape<...>()).
template <typename Run>
void with_shape(const LloydMaxFormat& format, Run&& run) {
  const auto with_bits = [&](auto bits) {
    switch (format.block) {
      case 32: return run(bits, Shape<4, 1>());
      case 64: return run(bits, Shape<8, 1>());
      case 128: return run(bits, Shape<16, 1>());
      case 256: return run(bits, Shape<32, 1>());
      case 512: return run(bits, Shape<32, 2>());
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
int64_t tiles_of(int64_t blocks) {
  constexpr int64_t tile = S::kGroups * S::kAtOnce;
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

// A block over a power of two: its largest magnitude is then in [1, 2).
struct Power {
  float power;
  bool finite, usable;  // neither NaN nor Inf; besides, not below 2^-126

  template <typename S>
  __device__ static __forceinline__ Power of(const float (&x)[S::kRuns][8], const S&) {
    uint32_t key = 0;
#pragma unroll
    for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i) key = max(key, bits_of(x[v][i]) & ~kSignBit);
    }
    key = largest_of_lanes(key, kLog2<S::kLanes>);
    const bool finite = key < kInfinityBits, usable = finite && key >= 0x00800000u;
    return {usable ? float_of(key & kInfinityBits) : 1.f, finite, usable};
  }

  // x over the power; not a number that is used where the block is not usable.
  template <int V>
  __device__ __forceinline__ void divide(const float (&x)[V][8], float (&z)[V][8]) const {
    const float inverse = 1.f / power;  // exact
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i) z[v][i] = x[v][i] * inverse;
    }
  }

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

// How many of the ascending boundaries are at most `size`: a binary search, in fewer instructions than a count.
template <int LEVELS>
__device__ __forceinline__ uint32_t boundaries_below(float size, const float (&boundary)[LEVELS - 1]) {
  if constexpr (LEVELS == 2) return size >= boundary[0] ? 1 : 0;
  if constexpr (LEVELS == 4) {
    const bool high = size >= boundary[1];
    return (high ? 2 : 0) + (size >= (high ? boundary[2] : boundary[0]) ? 1 : 0);
  }
  if constexpr (LEVELS == 8) {
    const bool high = size >= boundary[3];
    const bool odd = size >= (high ? boundary[5] : boundary[1]);
    const float last = high ? (odd ? boundary[6] : boundary[4]) : (odd ? boundary[2] : boundary[0]);
    return (high ? 4 : 0) + (odd ? 2 : 0) + (size >= last ? 1 : 0);
  }
}

// The codes of x in multiples of `unit`, from the lowest level up; 0 where the block is sent as zeros or as NaN.
template <int BITS, int V>
__device__ __forceinline__ void encode(const float (&x)[V][8], float unit, uint32_t (&codes)[V][8]) {
  constexpr int kHalf = 1 << (BITS - 1);
  float boundary[kHalf - 1];
#pragma unroll
  for (int b = 0; b < kHalf - 1; ++b) boundary[b] = unit * lloyd_max_boundary(BITS, b);
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t magnitude = boundaries_below<kHalf>(fabsf(x[v][i]), boundary);
      codes[v][i] = magnitude ^ (x[v][i] < 0.f ? kHalf - 1 : kHalf);
    }
  }
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

// All lanes of a warp must call this.
__device__ __forceinline__ float level_of(float level_of_lane, uint32_t code) {
  return __shfl_sync(kAllLanes, level_of_lane, code);
}

// One message. Codes of a run of eight elements are BITS bytes: all of them, or the low bits and the high ones apart.
template <int BITS>
struct Message {
  uint8_t* bytes;
  int64_t elements, code_bytes;

  __device__ __forceinline__ void store_run(uint64_t element, const uint32_t (&codes)[8]) const {
    if constexpr (BITS == 3) {
      uint32_t low = 0, high = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        low |= (codes[i] & 3) << 2 * i;
        high |= (codes[i] >> 2) << i;
      }
      *reinterpret_cast<uint16_t*>(bytes + element / 4) = uint16_t(low);
      bytes[elements / 4 + element / 8] = uint8_t(high);
    } else {
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) word |= codes[i] << BITS * i;
      if constexpr (BITS == 2)
        *reinterpret_cast<uint16_t*>(bytes + element / 4) = uint16_t(word);
      else
        *reinterpret_cast<uint32_t*>(bytes + element / 2) = word;
    }
  }

  // What load_run read, as 32 bits.
  __device__ __forceinline__ uint32_t load_run(uint64_t element) const {
    if constexpr (BITS == 4) return *reinterpret_cast<const uint32_t*>(bytes + element / 2);
    const uint32_t low = *reinterpret_cast<const uint16_t*>(bytes + element / 4);
    if constexpr (BITS == 2) return low;
    return low | uint32_t(bytes[elements / 4 + element / 8]) << 16;
  }

  __device__ static __forceinline__ uint32_t code(uint32_t run, int i) {
    if constexpr (BITS == 3) return (run >> 2 * i & 3) | (run >> (16 + i) & 1) << 2;
    return run >> BITS * i & ((1 << BITS) - 1);
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
    for (int64_t at = layout.used_bytes; at < layout.bytes; at += 2)
      *reinterpret_cast<uint16_t*>(message.bytes + at) = 0;
  }
};

// ---- rotation ----

// The signs of a tile: ROWS rows of 256 elements, of which each lane has eight neighbours. Four rows have 32 words of
// signs, one per lane, so that each lane draws once.
template <int ROWS>
class TileSigns {
 public:
  // `element` of the unit is the tile's first one.
  __device__ __forceinline__ TileSigns(const Signs& signs, uint64_t element) {
#pragma unroll
    for (int four = 0; four < ROWS / 4; ++four) {
      const Random8 random = random_signs(signs, element / 128 + 8 * four + lane_index() / 4);
      const int word = lane_index() % 4;
      words_[four] = word < 2 ? (word == 0 ? random.word[0] : random.word[1])
                              : (word == 2 ? random.word[2] : random.word[3]);
    }
  }

  // Gives the lane's eight elements of a row their signs. All lanes of a warp must call this.
  __device__ __forceinline__ void apply(int row, float (&x)[8]) const {
    const uint32_t word = __shfl_sync(kAllLanes, words_[row / 4], 8 * (row % 4) + lane_index() / 4);
    const uint32_t byte = word >> (8 * (lane_index() % 4));
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = float_of(bits_of(x[i]) ^ ((byte >> i) << 31));
  }

 private:
  uint32_t words_[ROWS / 4];
};

// Each 256 elements, or the block where it is smaller, times the Hadamard matrix over its root.
template <typename S>
__device__ __forceinline__ void butterflies(float (&x)[8]) {
#pragma unroll
  for (int h = 1; h < 8; h *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  }
#pragma unroll
  for (int distance = 1; distance < S::kLanes; distance *= 2) {
    const float sign = lane_index() & distance ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = fmaf(x[i], sign, __shfl_xor_sync(kAllLanes, x[i], distance));
  }
  constexpr float factor = S::kLanes == 32  ? 0.0625f
                           : S::kLanes == 16 ? 0.088388346f
                           : S::kLanes == 8  ? 0.125f
                                             : 0.17677669f;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= factor;
}

}  // namespace megatron_zpp::cuda
