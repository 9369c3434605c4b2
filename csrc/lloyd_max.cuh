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

  static constexpr int kTileBlocks = kGroups * kAtOnce, kTileElements = kTileBlocks * kBlock;  // of a warp

  __device__ static __forceinline__ int member() { return lane_index() % LANES; }
  __device__ static __forceinline__ int group() { return lane_index() / LANES; }
  // The first element of run v, counted from the beginning of the block.
  __device__ static __forceinline__ int run(int v) { return 8 * (v * LANES + member()); }
  // Block b of the lane in a tile, counted over all tiles.
  __device__ static __forceinline__ uint32_t block(uint32_t tile, int b) {
    return (tile * kAtOnce + b) * kGroups + group();
  }
  // Run v of a block, counted from the beginning of a message or of the lane's tile. What a compiler knows of it is
  // the last addend, so that accesses differ by constants.
  __device__ static __forceinline__ uint64_t run_of_message(uint32_t block, int v) {
    return uint64_t(block) * (kBlock / 8) + member() + v * LANES;
  }
  __device__ static __forceinline__ uint32_t run_of_tile(int b, int v) {
    return group() * (kBlock / 8) + member() + (b * kGroups * (kBlock / 8) + v * LANES);
  }
};

// Calls run(std::integral_constant<int, bits>(), Shape<...>()).
template <typename Run>
void with_shape(const LloydMaxFormat& format, Run&& run) {
  const auto with_bits = [&](auto bits) {
    switch (format.block) {
      case 32: return run(bits, Shape<4, 1>());
      case 64: return run(bits, Shape<8, 1>());
      case 128: return run(bits, Shape<8, 2>());
      case 256: return run(bits, Shape<8, 4>());
      case 512: return run(bits, Shape<16, 4>());
      case 1024: return run(bits, Shape<32, 4>());
      case 2048: return run(bits, Shape<32, 8>());
    }
    throw std::invalid_argument("megatron_zpp: no kernel for blocks of " + std::to_string(format.block));
  };
  switch (format.bits) {
    case 2: return with_bits(std::integral_constant<int, 2>());
    case 4: return with_bits(std::integral_constant<int, 4>());
  }
  throw std::invalid_argument("megatron_zpp: no kernel for codes of " + std::to_string(format.bits) + " bits");
}

// The number of tiles of `blocks` blocks: what a warp takes at a time.
template <typename S>
uint32_t tiles_of(uint32_t blocks) {
  return (blocks + S::kTileBlocks - 1) / S::kTileBlocks;
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

// ---- memory ----

// Eight numbers of a lane as loaded. fp32 numbers take two loads, of which the second finds its sectors in the cache:
// that takes fewer instructions than loads of whole sectors by pairs of lanes (device.cuh).
template <typename T>
class Run {
 public:
  __device__ __forceinline__ void load(const T* address) { words_ = load_vector<uint4>(address); }

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
#pragma unroll
    for (int h = 0; h < 2; ++h) quads_[h] = load_vector<float4>(address + 4 * h);
  }

  __device__ __forceinline__ void to_floats(float (&x)[8]) const {
    to_eight(quads_, x);
  }

  __device__ __forceinline__ void to_floats(uint32_t signs, float (&x)[8]) const {
    to_floats(x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = signs & (1u << i) ? -x[i] : x[i];
  }

 private:
  float4 quads_[2];
};

}  // namespace megatron_zpp::cuda
