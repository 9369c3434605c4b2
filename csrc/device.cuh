// Code of all kernels: launching, indices, memory access and exchange between lanes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace megatron_zpp::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// ---- launching ----

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("megatron_zpp: ") + cudaGetErrorString(status));
}

// The largest grid, as a multiple of the thread blocks that are resident at once; threads loop over the rest. A few
// times as many thread blocks balance the load. In some kernels one warp per tile (kGridsForAll) is faster: thread
// blocks start in order, so their accesses stay close together, whereas loops drift apart.
constexpr int kGridsOnChip = 16, kGridsForAll = 1 << 16;

// Warps that prefetch tiles need several tiles each. With fewer tiles only resident thread blocks are launched.
constexpr int kTilesAhead = 4;

inline int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

template <auto kernel>
int blocks_per_multiprocessor() {
  int count = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, kThreads, 0));
  return count;
}

// The number of thread blocks that are resident on the GPU at once.
template <auto kernel>
int64_t blocks_on_chip() {
  static const int resident = blocks_per_multiprocessor<kernel>();  // the query takes microseconds
  return int64_t(std::max(resident, 1)) * multiprocessors();
}

// Launches one warp per tile, but at most `grids` times the resident blocks.
template <auto kernel, typename Params>
void launch(int64_t tiles, CUstream_st* stream, const Params& params, int grids = kGridsOnChip) {
  const int64_t wanted = (tiles + kThreads / kWarp - 1) / (kThreads / kWarp);
  const int64_t blocks = std::min(wanted, grids * blocks_on_chip<kernel>());
  kernel<<<unsigned(blocks), kThreads, 0, stream>>>(params);
}

// Likewise for kernels whose warps prefetch tiles.
template <auto kernel, typename Params>
void launch_loading_ahead(int64_t tiles, CUstream_st* stream, const Params& params, int grids = kGridsOnChip) {
  const int64_t warps = blocks_on_chip<kernel>() * (kThreads / kWarp);
  launch<kernel>(tiles, stream, params, tiles < kTilesAhead * warps ? 1 : grids);
}

__device__ __forceinline__ int lane_index() { return threadIdx.x % kWarp; }

__device__ __forceinline__ uint32_t warp_index() {
  return blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
}

// The same, known to the compiler to be equal in all lanes: loops over tiles then need no code for lanes that diverge.
__device__ __forceinline__ uint32_t uniform_warp_index() {
  return blockIdx.x * (kThreads / kWarp) + __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0);
}

__device__ __forceinline__ uint32_t warp_count() { return gridDim.x * (kThreads / kWarp); }

// ---- indices ----

inline int log2_of(int64_t power_of_two) {
  int log = 0;
  while ((int64_t(1) << log) < power_of_two) ++log;
  return log;
}

template <int POWER_OF_TWO>
constexpr int kLog2 = kLog2<POWER_OF_TWO / 2> + 1;

template <>
constexpr int kLog2<1> = 0;

constexpr int64_t kIndexLimit = int64_t(1) << 31;

// Blocks and rows are counted in 31 bits. A block has 32 elements or more, so that is 128 GiB of 16-bit numbers.
inline uint32_t index_of(int64_t count) {
  if (count < 0 || count >= kIndexLimit)
    throw std::invalid_argument("megatron_zpp: blocks or rows must be fewer than 2^31, got " + std::to_string(count));
  return uint32_t(count);
}

struct Quotient {
  uint32_t quotient, remainder;
};

// Divides numbers below 2^31 by a divisor that all threads share, with a multiplication (Granlund and Montgomery 1994).
class Divisor {
 public:
  explicit Divisor(int64_t divisor) : divisor_(index_of(divisor)), shift_(log2_of(divisor)) {
    if (divisor < 1)
      throw std::invalid_argument("megatron_zpp: a divisor must be positive, got " + std::to_string(divisor));
    multiplier_ = uint32_t(((uint64_t(1) << (31 + shift_)) + divisor_ - 1) / divisor_);
  }

  __device__ __forceinline__ Quotient operator()(uint32_t number) const {
    const uint32_t quotient = __umulhi(number << 1, multiplier_) >> shift_;
    return {quotient, number - quotient * divisor_};
  }

 private:
  uint32_t divisor_, multiplier_;
  int shift_;
};

// A block of a matrix, and the block of a message that holds it.
struct BlockPosition {
  uint32_t row, column_block, message, block;
};

// The rows of a message follow one another, and the blocks of a row.
class MessageOrder {
 public:
  MessageOrder(int64_t row_blocks, int64_t message_rows)
      : by_row_blocks_(row_blocks), by_message_blocks_(message_rows * row_blocks) {}

  __device__ __forceinline__ BlockPosition operator()(uint32_t index) const {
    const Quotient row = by_row_blocks_(index), message = by_message_blocks_(index);
    return {row.quotient, row.remainder, message.quotient, message.remainder};
  }

 private:
  Divisor by_row_blocks_, by_message_blocks_;
};

inline bool is_aligned(const void* address, size_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// ---- exchange between lanes ----

// The largest key of the lanes in each group of 2^log_lanes neighbours.
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t key, int log_lanes) {
  if (log_lanes == 5) return __reduce_max_sync(kAllLanes, key);
  for (int distance = 1 << log_lanes >> 1; distance > 0; distance >>= 1)
    key = max(key, __shfl_xor_sync(kAllLanes, key, distance));
  return key;
}

// Eight consecutive fp32 numbers per lane take two accesses of 16 bytes, each of which would use half of every 32-byte
// sector. So a pair of lanes accesses the 32 bytes of its even lane together, then those of its odd lane, and
// exchanges halves. `quads[h]` is at pair_quad(address of the lane's own eight, h).
template <typename T>
__device__ __forceinline__ T* pair_quad(T* eight, int h) {
  return eight + 8 * h - 4 * (lane_index() & 1);
}

__device__ __forceinline__ float4 swapped_with_neighbour(float4 x) {
  return {__shfl_xor_sync(kAllLanes, x.x, 1), __shfl_xor_sync(kAllLanes, x.y, 1), __shfl_xor_sync(kAllLanes, x.z, 1),
          __shfl_xor_sync(kAllLanes, x.w, 1)};
}

// Converts quads as they are accessed to the halves of the lane's own eight numbers, or back.
__device__ __forceinline__ void exchange_with_neighbour(float4 (&quads)[2]) {
  const bool odd = lane_index() & 1;
  const float4 received = swapped_with_neighbour(odd ? quads[0] : quads[1]);
  if (odd)
    quads[0] = received;
  else
    quads[1] = received;
}

__device__ __forceinline__ void to_eight(const float4 (&quads)[2], float (&x)[8]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    x[4 * h] = quads[h].x;
    x[4 * h + 1] = quads[h].y;
    x[4 * h + 2] = quads[h].z;
    x[4 * h + 3] = quads[h].w;
  }
}

__device__ __forceinline__ void to_quads(const float (&x)[8], float4 (&quads)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) quads[h] = {x[4 * h], x[4 * h + 1], x[4 * h + 2], x[4 * h + 3]};
}

// The sum of squares of kSquaresBlock elements, eight per lane: first those of each lane in order, then across lanes,
// lane i and lane i + 16, then i and i + 8, and so on.
__device__ __forceinline__ float sum_of_squares(const float (&x)[8]) {
  float sum = x[0] * x[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) sum += x[i] * x[i];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  return sum;
}

// Index of a warp's 16-byte quad q in shared memory. The swizzle gives eight neighbouring lanes different banks, both
// for rows of 32 quads and for lanes with 2, 4 or 8 consecutive quads.
__device__ __forceinline__ uint32_t swizzled(uint32_t q) { return q ^ (q >> 3 & 7); }

// ---- arithmetic ----

// x, computed here and kept, which the compiler would rather compute anew where it is used.
__device__ __forceinline__ float computed_once(float x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+f"(x));
#endif
  return x;
}

// Likewise an address in shared memory.
__device__ __forceinline__ uint8_t* computed_once(uint8_t* shared) {
#ifdef __CUDA_ARCH__
  uint32_t address = uint32_t(__cvta_generic_to_shared(shared));
  asm volatile("" : "+r"(address));
  return static_cast<uint8_t*>(__cvta_shared_to_generic(address));
#else
  return shared;
#endif
}

// Roots of numbers from 2^-100 to 2^100 and quotients of numbers from 2^-60 to 2^60, as sqrtf and / round them: the same
// instructions, without the branches that other numbers need.
struct Root {
  float root, inverse;  // the inverse is approximate

  __device__ explicit __forceinline__ Root(float x) {
#ifdef __CUDA_ARCH__
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    const float near = x * inverse;
    root = fmaf(fmaf(-near, near, x), 0.5f * inverse, near);
#else
    root = sqrtf(x);
    inverse = 1.f / root;
#endif
  }
};

__device__ __forceinline__ float quotient_of(float x, float y) {
#ifdef __CUDA_ARCH__
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(y));
  const float inverse = fmaf(fmaf(-y, near, 1.f), near, near);
  const float quotient = x * inverse;
  return fmaf(fmaf(-y, quotient, x), inverse, quotient);
#else
  return x / y;
#endif
}

// ---- memory ----

// STREAMING data is evicted first from the caches. That is faster where sums are written to other addresses than were
// read. It is slower where little is written per byte read, or where what was read is overwritten.
template <typename Vector, bool STREAMING = false>
__device__ __forceinline__ Vector load_vector(const void* address) {
  const Vector* vector = static_cast<const Vector*>(address);
  if constexpr (STREAMING)
    return __ldcs(vector);
  else
    return *vector;
}

// ALIGNED is a template argument because a run-time branch becomes predicates, which make loads wait for each other.
template <bool ALIGNED, bool STREAMING = false>
__device__ __forceinline__ float4 load_quad(const float* address) {
  if constexpr (ALIGNED)
    return load_vector<float4, STREAMING>(address);
  else
    return {address[0], address[1], address[2], address[3]};
}

template <bool ALIGNED>
__device__ __forceinline__ void store_quad(float* address, float4 quad) {
  if constexpr (ALIGNED) {
    *reinterpret_cast<float4*>(address) = quad;
  } else {
    address[0] = quad.x;
    address[1] = quad.y;
    address[2] = quad.z;
    address[3] = quad.w;
  }
}

// Eight numbers of a lane as loaded, so that many loads can be in flight before the first is converted.
template <typename T, bool ALIGNED, bool STREAMING = false>
class Eight {
 public:
  __device__ __forceinline__ void load(const T* address) {
    if constexpr (ALIGNED) {
      words_ = load_vector<uint4, STREAMING>(address);
    } else {
      const uint16_t* bits = reinterpret_cast<const uint16_t*>(address);
      words_ = {bits[0] | uint32_t(bits[1]) << 16, bits[2] | uint32_t(bits[3]) << 16,
                bits[4] | uint32_t(bits[5]) << 16, bits[6] | uint32_t(bits[7]) << 16};
    }
  }

  __device__ __forceinline__ void to_floats(float (&x)[8]) const {
    const uint32_t words[4] = {words_.x, words_.y, words_.z, words_.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[2 * k] = to_float(T{uint16_t(words[k])});
      x[2 * k + 1] = to_float(T{uint16_t(words[k] >> 16)});
    }
  }

 private:
  uint4 words_;
};

template <bool ALIGNED, bool STREAMING>
class Eight<float, ALIGNED, STREAMING> {
 public:
  // Both lanes of a pair must call both functions.
  __device__ __forceinline__ void load(const float* address) {
#pragma unroll
    for (int h = 0; h < 2; ++h) quads_[h] = load_quad<ALIGNED, STREAMING>(pair_quad(address, h));
  }

  __device__ __forceinline__ void to_floats(float (&x)[8]) const {
    float4 quads[2] = {quads_[0], quads_[1]};
    exchange_with_neighbour(quads);
    to_eight(quads, x);
  }

 private:
  float4 quads_[2];
};

__device__ __forceinline__ uint32_t pair_of(Bf16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t pair_of(Fp16, float low, float high) {
  return saturate<Fp16>(low).bits | uint32_t(saturate<Fp16>(high).bits) << 16;
}

// Both lanes of a pair must call this, `active` or not.
template <bool ALIGNED, typename T>
__device__ __forceinline__ void store_eight(T* address, const float (&x)[8], bool active) {
  if constexpr (sizeof(T) == 4) {
    float4 quads[2];
    to_quads(x, quads);
    exchange_with_neighbour(quads);
    if (!active) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) store_quad<ALIGNED>(pair_quad(address, h), quads[h]);
  } else if constexpr (ALIGNED) {
    const uint4 words = {pair_of(T(), x[0], x[1]), pair_of(T(), x[2], x[3]), pair_of(T(), x[4], x[5]),
                         pair_of(T(), x[6], x[7])};
    if (active) *reinterpret_cast<uint4*>(address) = words;
  } else if (active) {
#pragma unroll
    for (int i = 0; i < 8; ++i) address[i] = saturate<T>(x[i]);
  }
}

// ---- copies ----

// Asynchronous copies to shared memory (cp.async of the PTX ISA). Groups of copies complete in order, and a lane sees
// the data of its own copies after waiting for them.

// 16 bytes pass by the L1 cache; 4 or 8 cannot.
template <int BYTES>
__device__ __forceinline__ void copy_bytes(void* shared, const void* address) {
  const uint32_t target = uint32_t(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(address) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(address), "n"(BYTES) : "memory");
}

__device__ __forceinline__ void end_group_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int GROUPS>
__device__ __forceinline__ void wait_for_all_groups_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

}  // namespace megatron_zpp::cuda
