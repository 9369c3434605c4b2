// sum_parts on a GPU.
#include "device.cuh"

namespace megatron_zpp::cuda {

namespace {

struct SumPartsParams {
  const void* parts;
  int64_t count, elements, distance;
  const void* own;  // part `place`, if there is one
  int64_t place;
  float* shard;
  float factor;
  bool add;
  float* squares;
};

// N elements of a part as they are loaded. Not through the read-only cache: the shard may be one of the parts.
template <typename T, int N>
struct Loaded {
  T values[N];

  __device__ __forceinline__ void load(const T* address) {
    if constexpr (N == 1)
      values[0] = *address;
    else if constexpr (sizeof(T) == 4)
      *reinterpret_cast<float4*>(values) = load_once<float4>(address);
    else
      *reinterpret_cast<uint2*>(values) = load_once<uint2>(address);
  }
};

// shard[at ...] becomes the sum of N elements of all parts, in order.
template <typename T, int N>
__device__ __forceinline__ void sum_elements(const SumPartsParams& p, int64_t at) {
  constexpr int kBatch = 8;  // parts whose loads are under way together
  const T* next = static_cast<const T*>(p.parts) + at;
  const T* own = static_cast<const T*>(p.own) + at;
  float sum[N];
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = -0.f;  // + x is x, also where x is -0
  for (int64_t first = 0; first < p.count; first += kBatch) {
    alignas(16) Loaded<T, N> loaded[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j < p.count) loaded[j].load(first + j == p.place ? own : next + j * p.distance);
    }
    next += kBatch * p.distance;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j >= p.count) break;
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += to_float(loaded[j].values[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] *= p.factor;
  float* target = p.shard + at;
  if constexpr (N == 1) {
    *target = p.add ? *target + sum[0] : sum[0];
  } else {
    float4 quad = {sum[0], sum[1], sum[2], sum[3]};
    if (p.add) {
      const float4 old = *reinterpret_cast<const float4*>(target);
      quad = {old.x + quad.x, old.y + quad.y, old.z + quad.z, old.w + quad.w};
    }
    *reinterpret_cast<float4*>(target) = quad;
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(const __grid_constant__ SumPartsParams p) {
  const int64_t step = int64_t(gridDim.x) * kThreads * N;
  for (int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * N; at < p.elements; at += step)
    sum_elements<T, N>(p, at);
}

// The same, and the squares: a warp has a block of kSquaresBlock elements at a time, a lane eight of them.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_and_square_kernel(const __grid_constant__ SumPartsParams p) {
  constexpr int kBatch = 4;
  for (int64_t block = warp_index(); block < p.elements / kSquaresBlock; block += warp_count()) {
    const int64_t at = block * kSquaresBlock + 8 * lane_index();
    const T* next = static_cast<const T*>(p.parts) + at;
    const T* own = static_cast<const T*>(p.own) + at;
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = -0.f;
    for (int64_t first = 0; first < p.count; first += kBatch) {
      Eight<T, true> loaded[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j < p.count) loaded[j].load(first + j == p.place ? own : next + j * p.distance);
      }
      next += kBatch * p.distance;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j >= p.count) break;
        float x[8];
        loaded[j].to_floats(x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += x[i];
      }
    }
    float4 quads[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] *= p.factor;
    if (p.add) {
      float old[8];
#pragma unroll
      for (int h = 0; h < 2; ++h) quads[h] = *reinterpret_cast<const float4*>(pair_quad(p.shard + at, h));
      exchange_with_neighbour(quads);
      to_eight(quads, old);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = old[i] + sum[i];
    }
    const float square = sum_of_squares(sum);
    if (lane_index() == 0) p.squares[block] = square;
    to_quads(sum, quads);
    exchange_with_neighbour(quads);
#pragma unroll
    for (int h = 0; h < 2; ++h) *reinterpret_cast<float4*>(pair_quad(p.shard + at, h)) = quads[h];
  }
}

}  // namespace

void run(const SumParts& op, CUstream_st* stream) {
  const SumPartsParams params{op.parts, op.part_count,           op.elements, op.distance, op.own,
                              op.own ? op.place : op.part_count, op.shard,    op.factor,   op.add,
                              op.squares};
  with_type(op.part_type, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool parts_aligned = is_aligned(op.parts, 4 * sizeof(T)) && is_aligned(op.own, 4 * sizeof(T));
    const bool whole_fours = op.elements % 4 == 0 && (op.distance % 4 == 0 || op.part_count == 1);
    const bool whole_eights = op.distance % 8 == 0 || op.part_count == 1;
    if (op.squares && whole_eights && is_aligned(op.parts, 16) && is_aligned(op.own, 16) && is_aligned(op.shard, 16)) {
      launch<sum_and_square_kernel<T>>(op.elements / kSquaresBlock, stream, params);
      return;
    }
    if (whole_fours && parts_aligned && is_aligned(op.shard, 16))
      launch<sum_parts_kernel<T, 4>>((op.elements + 4 * kWarp - 1) / (4 * kWarp), stream, params);
    else
      launch<sum_parts_kernel<T, 1>>((op.elements + kWarp - 1) / kWarp, stream, params);
    if (op.squares) run(SumSquares{op.shard, Type::fp32, op.elements, op.squares}, stream);
  });
}

}  // namespace megatron_zpp::cuda
