// sum_rotated on a GPU.
#include "lloyd_max.cuh"

namespace megatron_zpp::cuda {

namespace {

template <int BITS>
struct SumRotatedParams {
  Messages<BITS> messages;
  uint32_t count;   // of messages
  uint32_t blocks;  // of one message
  float* shard;
  Signs signs;
  float factor;
  bool add;
};

template <int BITS, typename S>
__global__ void __launch_bounds__(kThreads) sum_rotated_kernel(const __grid_constant__ SumRotatedParams<BITS> p) {
  constexpr uint32_t kTile = S::kGroups * S::kAtOnce;
  const float level = level_of_lane<BITS>();
  for (uint32_t first = warp_index() * kTile; first < p.blocks; first += warp_count() * kTile) {
    const TileSigns<S::kAtOnce * S::kRuns> signs(p.signs, p.signs.first + uint64_t(first) * S::kBlock);
    float sum[S::kAtOnce][S::kRuns][8];
    for (uint32_t m = 0; m < p.count; ++m) {
      const Message<BITS> message = p.messages[m];
      uint32_t codes[S::kAtOnce][S::kRuns], scales[S::kAtOnce];
#pragma unroll
      for (int b = 0; b < S::kAtOnce; ++b) {
        const uint32_t block = min(first + b * S::kGroups + S::group(), p.blocks - 1);
        scales[b] = *message.scale(block);
#pragma unroll
        for (int v = 0; v < S::kRuns; ++v)
          codes[b][v] = message.load_run(uint64_t(block) * S::kBlock + S::run(v));
      }
#pragma unroll
      for (int b = 0; b < S::kAtOnce; ++b) {
        const float scale = float_of(scales[b] << 16);
#pragma unroll
        for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float value = level_of(level, Message<BITS>::code(codes[b][v], i)) * scale;
            sum[b][v][i] = m == 0 ? value : sum[b][v][i] + value;
          }
        }
      }
    }
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint32_t block = first + b * S::kGroups + S::group();
      const bool active = block < p.blocks;
      const uint64_t start = uint64_t(min(block, p.blocks - 1)) * S::kBlock;
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
        float(&x)[8] = sum[b][v];
        butterflies<S>(x);
        signs.apply(b * S::kRuns + v, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= p.factor;
        if (p.add) {
          Eight<float, true> old;
          float shard[8];
          old.load(p.shard + start + S::run(v));
          old.to_floats(shard);
#pragma unroll
          for (int i = 0; i < 8; ++i) x[i] = shard[i] + x[i];
        }
        store_eight<true>(p.shard + start + S::run(v), x, active);
      }
    }
  }
}

}  // namespace

void run(const SumRotated& op, CUstream_st* stream) {
  with_shape(op.format, [&](auto bits, auto shape) {
    constexpr int kBits = decltype(bits)::value;
    using S = decltype(shape);
    const uint32_t blocks = index_of(op.elements / op.format.block);
    const SumRotatedParams<kBits> params{Messages<kBits>(op.messages, op.format, op.elements),
                                         index_of(op.message_count),
                                         blocks,
                                         op.shard,
                                         op.signs,
                                         op.factor,
                                         op.add};
    launch<sum_rotated_kernel<kBits, S>>(tiles_of<S>(blocks), stream, params);
  });
}

}  // namespace megatron_zpp::cuda
