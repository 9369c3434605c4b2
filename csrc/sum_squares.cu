// sum_squares on a GPU.
#include "device.cuh"

namespace megatron_zpp::cuda {

namespace {

constexpr int kAtOnce = 4;  // blocks of a warp whose loads are under way together

struct SumSquaresParams {
  const void* input;
  int64_t blocks;
  float* sums;
};

// Of a block: eight elements a lane in order, then halves of the lanes onto each other.
template <typename T, bool ALIGNED>
__device__ __forceinline__ float sum_of_block(const Eight<T, ALIGNED>& loaded) {
  float x[8];
  loaded.to_floats(x);
  float sum = x[0] * x[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) sum += x[i] * x[i];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  return sum;
}

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads) sum_squares_kernel(const __grid_constant__ SumSquaresParams p) {
  const T* input = static_cast<const T*>(p.input) + 8 * lane_index();
  for (int64_t first = int64_t(warp_index()) * kAtOnce; first < p.blocks; first += int64_t(warp_count()) * kAtOnce) {
    Eight<T, ALIGNED> loaded[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j < p.blocks) loaded[j].load(input + (first + j) * kSquaresBlock);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j >= p.blocks) break;
      const float sum = sum_of_block<T, ALIGNED>(loaded[j]);
      if (lane_index() == 0) p.sums[first + j] = sum;
    }
  }
}

}  // namespace

void run(const SumSquares& op, CUstream_st* stream) {
  const SumSquaresParams params{op.input, op.elements / kSquaresBlock, op.sums};
  const int64_t tiles = (params.blocks + kAtOnce - 1) / kAtOnce;
  with_type(op.input_type, [&](auto type) {
    using T = typename decltype(type)::type;
    if (is_aligned(op.input, 16))
      launch<sum_squares_kernel<T, true>>(tiles, stream, params);
    else
      launch<sum_squares_kernel<T, false>>(tiles, stream, params);
  });
}

}  // namespace megatron_zpp::cuda
