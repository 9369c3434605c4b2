// sum_parts on a GPU.
#include "device.cuh"

namespace megatron_zpp::cuda {

namespace {

struct SumPartsParams {
  const void* parts;
  int64_t elements, distance;
  const void* own;  // the part of rank `group_rank`, if it is stored elsewhere
  float* shard;
  float* squares;
  int count, group_rank;  // group_rank is -1 without `own`
  bool add;
};

// One element per thread, for the rest after whole blocks and for unaligned tensors. Loads must not use the read-only
// cache, because the shard may be one of the parts.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_elements_kernel(const __grid_constant__ SumPartsParams p) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x; at < p.elements; at += step) {
    const T* next = static_cast<const T*>(p.parts) + at;
    float sum = -0.f;  // -0 + x is x, even if x is -0
    for (int j = 0; j < p.count; ++j, next += p.distance)
      sum += to_float(j == p.group_rank ? static_cast<const T*>(p.own)[at] : *next);
    p.shard[at] = p.add ? p.shard[at] + sum : sum;
  }
}

// Thread blocks per multiprocessor: the most without spilled registers.
template <typename T>
constexpr int kResident = sizeof(T) == 4 ? 5 : 6;

// A warp sums kSquaresBlock elements at a time, eight per lane.
template <typename T, bool SQUARES>
__global__ void __launch_bounds__(kThreads, kResident<T>) sum_blocks_kernel(const __grid_constant__ SumPartsParams p) {
  constexpr int kBatch = 2;  // parts whose loads are in flight together
  for (int64_t block = warp_index(); block < p.elements / kSquaresBlock; block += warp_count()) {
    const int64_t at = block * kSquaresBlock + 8 * lane_index();
    const T* next = static_cast<const T*>(p.parts) + at;
    const T* own = static_cast<const T*>(p.own) + at;
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = -0.f;
    for (int first = 0; first < p.count; first += kBatch) {
      Eight<T, true, true> loaded[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j < p.count) loaded[j].load(first + j == p.group_rank ? own : next);
        next += p.distance;
      }
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
    if (p.add) {
      float old[8];
#pragma unroll
      for (int h = 0; h < 2; ++h) quads[h] = *reinterpret_cast<const float4*>(pair_quad(p.shard + at, h));
      exchange_with_neighbour(quads);
      to_eight(quads, old);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = old[i] + sum[i];
    }
    if constexpr (SQUARES) {
      const float square = sum_of_squares(sum);
      if (lane_index() == 0) p.squares[block] = square;
    }
    to_quads(sum, quads);
    exchange_with_neighbour(quads);
#pragma unroll
    for (int h = 0; h < 2; ++h) *reinterpret_cast<float4*>(pair_quad(p.shard + at, h)) = quads[h];
  }
}

}  // namespace

void run(const SumParts& op, CUstream_st* stream) {
  with_dtype(op.part_dtype, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    SumPartsParams params{op.parts,
                          op.elements,
                          op.distance,
                          op.own,
                          op.shard,
                          op.squares,
                          int(op.part_count),
                          op.own ? int(op.group_rank) : -1,
                          op.add};
    const bool aligned = is_aligned(op.parts, 16) && is_aligned(op.own, 16) && is_aligned(op.shard, 16) &&
                         (op.distance * sizeof(T) % 16 == 0 || op.part_count == 1);
    const int64_t blocks = aligned ? op.elements / kSquaresBlock : 0;
    if (blocks && op.squares)
      launch<sum_blocks_kernel<T, true>>(blocks, stream, params, kGridsForAll);
    else if (blocks)
      launch<sum_blocks_kernel<T, false>>(blocks, stream, params, kGridsForAll);
    const int64_t done = blocks * kSquaresBlock;
    params.parts = static_cast<const T*>(op.parts) + done;
    if (op.own) params.own = static_cast<const T*>(op.own) + done;
    params.shard += done;
    params.elements -= done;
    if (params.elements) launch<sum_elements_kernel<T>>((params.elements + kWarp - 1) / kWarp, stream, params);
    if (op.squares && !blocks) run(SumSquares{op.shard, DType::fp32, op.elements, op.squares}, stream);
  });
}

}  // namespace megatron_zpp::cuda
