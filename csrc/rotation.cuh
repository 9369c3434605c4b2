// Signs and butterflies of rotated codes on a GPU.
#pragma once

#include "lloyd_max_codes.cuh"

namespace megatron_zpp::cuda {

// ---- signs ----

// A warp draws the signs of 4,096 elements at a time, 128 per lane, and keeps them in shared memory, one bit each.
constexpr int kSignsOfLane = 128, kSignsOfWarp = kWarp * kSignsOfLane;

// The tiles whose signs are drawn together: a warp takes them one after the other.
template <typename S>
constexpr uint32_t kTilesOfSigns = kSignsOfWarp / (S::kGroups * S::kAtOnce * S::kBlock);

class WarpSigns {
 public:
  using Storage = uint4[kWarp];

  __device__ explicit __forceinline__ WarpSigns(Storage& shared) : shared_(shared) {}

  // Draws the signs from `element` of the unit on, a multiple of 128. All lanes of a warp must call this.
  __device__ __forceinline__ void draw(const Signs& signs, uint64_t element) {
    const Random8 random = random_signs(signs, element / kSignsOfLane + lane_index());
    __syncwarp();  // all lanes have read the last ones
    shared_[lane_index()] = {random.word[0], random.word[1], random.word[2], random.word[3]};
    __syncwarp();
  }

  // The signs of a run of eight elements, counted from the first ones drawn.
  __device__ __forceinline__ uint32_t of_run(uint32_t run) const {
    return reinterpret_cast<const uint8_t*>(shared_)[run];
  }

 private:
  Storage& shared_;
};

// The warps that take `tiles` tiles.
template <typename S>
int64_t warps_of(uint32_t tiles) {
  return (int64_t(tiles) + kTilesOfSigns<S> - 1) / kTilesOfSigns<S>;
}

// The tile that a warp takes after `tile`: it draws signs for kTilesOfSigns neighbours.
template <typename S>
__device__ __forceinline__ uint32_t tile_after(uint32_t tile) {
  constexpr uint32_t n = kTilesOfSigns<S>;
  return (tile + 1) % n == 0 ? tile + 1 + (warp_count() - 1) * n : tile + 1;
}

// ---- butterflies ----

// The numbers that a rotation mixes.
template <typename S>
constexpr int kRotated = S::kBlock < 256 ? S::kBlock : 256;

// 1 / sqrt(kRotated).
template <typename S>
constexpr float kRotationFactor = kRotated<S> == 256   ? 0.0625f
                                  : kRotated<S> == 128 ? 0.088388346f
                                  : kRotated<S> == 64  ? 0.125f
                                                       : 0.17677669f;

__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = a + b, difference = a - b;
  a = sum;
  b = difference;
}

// Each kRotated numbers of a block times the Hadamard matrix: neighbours of a run, then lanes, then runs.
template <typename S>
__device__ __forceinline__ void butterflies(float (&x)[S::kRuns][8]) {
#pragma unroll
  for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
    for (int h = 1; h < 8; h *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (!(i & h)) butterfly(x[v][i], x[v][i + h]);
      }
    }
#pragma unroll
    for (int distance = 1; distance < S::kLanes; distance *= 2) {
      const float sign = lane_index() & distance ? -1.f : 1.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[v][i] = fmaf(x[v][i], sign, __shfl_xor_sync(kAllLanes, x[v][i], distance));
    }
  }
#pragma unroll
  for (int h = 1; 8 * S::kLanes * h < kRotated<S>; h *= 2) {
#pragma unroll
    for (int v = 0; v < S::kRuns; ++v) {
      if (v & h) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) butterfly(x[v][i], x[v + h][i]);
    }
  }
}

}  // namespace megatron_zpp::cuda
