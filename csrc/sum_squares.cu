// sum_squares on a GPU.
#include "device.cuh"

namespace megatron_zpp::cuda {

namespace {

constexpr int kAtOnce = 4;  // blocks per warp whose loads are in flight together

struct SumSquaresParams {
  const void* input;
  int64_t blocks;
  float* sums;
};

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads) sum_squares_kernel(const __grid_constant__ SumSquaresParams p) {
  const T* input = static_cast<const T*>(p.input) + 8 * lane_index();
  for (int64_t first = int64_t(warp_index()) * kAtOnce; first < p.blocks; first += int64_t(warp_count()) * kAtOnce) {
    Eight<T, ALIGNED, true> loaded[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j < p.blocks) loaded[j].load(input + (first + j) * kSquaresBlock);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j >= p.blocks) break;
      float x[8];
      loaded[j].to_floats(x);
      const float sum = sum_of_squares(x);
      if (lane_index() == 0) p.sums[first + j] = sum;
    }
  }
}

}  // namespace

void run(const SumSquares& op, CUstream_st* stream) {
  const SumSquaresParams params{op.input, op.elements / kSquaresBlock, op.sums};
  const int64_t tiles = (params.blocks + kAtOnce - 1) / kAtOnce;
  with_dtype(op.input_dtype, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    if (is_aligned(op.input, 16))
      launch<sum_squares_kernel<T, true>>(tiles, stream, params);
    else
      launch<sum_squares_kernel<T, false>>(tiles, stream, params);
  });
}

}  // namespace megatron_zpp::cuda
