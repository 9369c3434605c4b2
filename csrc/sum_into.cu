// sum_into on a GPU.
#include "sums.cuh"

namespace megatron_zpp::cuda {

namespace {

constexpr int kRuns = 2;  // of eight elements, a lane at a time

struct SumIntoParams {
  Addends addends;
  float* shard;
  int64_t runs;
  float factor;
  bool add, rotate;
};

// What becomes of a quad of the shard.
__device__ __forceinline__ float4 put(const float4& sum, const float4& old, float factor, bool add) {
  const float4 r = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
  if (!add) return r;
  return {old.x + r.x, old.y + r.y, old.z + r.z, old.w + r.w};
}

// Neighbouring lanes hold neighbouring runs: four of them are the 32 elements of a rotation.
template <Codes C, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, C == Codes::int4 ? 3 : 4)
    sum_into_kernel(const __grid_constant__ SumIntoParams p) {
  constexpr int kTile = kWarp * kRuns;
  for (int64_t first = int64_t(warp_index()) * kTile; first < p.runs; first += int64_t(warp_count()) * kTile) {
    uint32_t runs[kRuns];
    uint64_t start[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      // Lanes behind the end read the last runs once more. Pairs of lanes are all before or all behind it.
      const int64_t run = first + r * kWarp + lane_index();
      runs[r] = uint32_t(run < p.runs ? run : p.runs - 2 + (lane_index() & 1));
      start[r] = 8 * uint64_t(runs[r]);
    }
    float sum[kRuns][8];
    RunSum<C, 8, kRuns> messages;
    messages.begin(p.addends, runs);
    messages.finish(p.addends, sum);
    float4 old[kRuns][2] = {};
    if (p.add) {
#pragma unroll
      for (int i = 0; i < 2 * kRuns; ++i)
        old[i / 2][i % 2] = load_quad<ALIGNED>(pair_quad(p.shard + start[i / 2], i % 2));
    }
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if (p.rotate) rotate(sum[r]);
      float4 quads[2];
      to_quads(sum[r], quads);
      exchange_with_neighbour(quads);
      if (first + r * kWarp + lane_index() >= p.runs) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_quad<ALIGNED>(pair_quad(p.shard + start[r], h), put(quads[h], old[r][h], p.factor, p.add));
    }
  }
}

}  // namespace

void run(const SumInto& op, CUstream_st* stream) {
  const SumIntoParams params{
      Addends(op.messages, op.format, op.elements, op.message_count),
      op.shard,
      op.elements / 8,
      op.factor,
      op.add,
      op.format.rotate,
  };
  const int64_t tiles = (params.runs + kWarp * kRuns - 1) / (kWarp * kRuns);
  with_codes(op.format.codes, [&](auto codes) {
    constexpr Codes C = decltype(codes)::value;
    if (is_aligned(op.shard, 16))
      launch<sum_into_kernel<C, true>>(tiles, stream, params);
    else
      launch<sum_into_kernel<C, false>>(tiles, stream, params);
  });
}

}  // namespace megatron_zpp::cuda
