// sum_into on a GPU.
#include "sums.cuh"

namespace megatron_zpp::cuda {

namespace {

// Elements per lane: 16 bytes of a message.
template <CodeType C>
constexpr int kRun = 128 / bits_of_code(C);

// Quads per lane.
template <CodeType C>
constexpr int kQuads = kRun<C> / 4;

struct SumIntoParams {
  Addends addends;
  float* shard;
  int64_t elements;
  uint32_t runs;
  bool add;
};

template <CodeType C>
using Sums = TileSums<C, kRun<C>, 3>;

// The new value of a quad of the shard.
__device__ __forceinline__ float4 put(const float4& sum, const float4& old, bool add) {
  if (!add) return sum;
  return {old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w};
}

// Exchanges the lanes' runs through shared memory, so that the warp accesses the shard in contiguous rows.
template <CodeType C, bool ALIGNED>
__device__ __forceinline__ void store_tile(const SumIntoParams& p, uint32_t tile, const float (&sum)[kRun<C>],
                                           float4 (&shared)[kWarp * kQuads<C>]) {
  __syncwarp();  // all lanes have read the last tile
#pragma unroll
  for (int q = 0; q < kQuads<C>; ++q)
    shared[swizzled(lane_index() * kQuads<C> + q)] = {sum[4 * q], sum[4 * q + 1], sum[4 * q + 2], sum[4 * q + 3]};
  __syncwarp();
  const int64_t start = int64_t(tile) * (kWarp * kRun<C>) + 4 * lane_index();
  float* shard = p.shard + start;
  constexpr int kRow = 4 * kWarp, kRows = 4;  // elements per row; rows loaded at a time
#pragma unroll
  for (int first = 0; first < kQuads<C>; first += kRows) {
    float4 old[kRows] = {};
    if (p.add) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = first + r;
        if (start + row * kRow < p.elements) old[r] = load_quad<ALIGNED>(shard + row * kRow);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first + r;
      const float4 quad = put(shared[swizzled(row * kWarp + lane_index())], old[r], p.add);
      if (start + row * kRow < p.elements) store_quad<ALIGNED>(shard + row * kRow, quad);
    }
  }
}

template <CodeType C, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, C == CodeType::int4 ? 3 : 4)
    sum_into_kernel(const __grid_constant__ SumIntoParams p) {
  __shared__ float4 shared[kThreads / kWarp][kWarp * kQuads<C>];
  __shared__ typename Sums<C>::Stages stages[kThreads / kWarp];
  const uint32_t tiles = (p.runs + kWarp - 1) / kWarp;
  uint32_t tile = warp_index();
  if (tile >= tiles) return;
  Sums<C> sums(p.addends, stages[threadIdx.x / kWarp], tile, warp_count(), p.runs);
  for (; tile < tiles; tile += warp_count()) {
    float x[kRun<C>];
    sums.next(tile, x);
    store_tile<C, ALIGNED>(p, tile, x, shared[threadIdx.x / kWarp]);
  }
}

}  // namespace

void run(const SumInto& op, CUstream_st* stream) {
  with_code_type(op.format.code_type, [&](auto code_type) {
    constexpr CodeType C = decltype(code_type)::value;
    const SumIntoParams params{
        Addends(op.messages, op.format, op.elements, op.message_count),
        op.shard,
        op.elements,
        uint32_t(op.elements / kRun<C>),
        op.add,
    };
    const int64_t tiles = (params.runs + kWarp - 1) / kWarp;
    if (is_aligned(op.shard, 16))
      launch_loading_ahead<sum_into_kernel<C, true>>(tiles, stream, params);
    else
      launch_loading_ahead<sum_into_kernel<C, false>>(tiles, stream, params);
  });
}

}  // namespace megatron_zpp::cuda
