// sum_rotated on a GPU.
#include "rotation.cuh"

namespace megatron_zpp::cuda {

namespace {

template <int BITS>
struct SumRotatedParams {
  Messages<BITS> messages;
  uint32_t count;          // of messages
  uint32_t blocks, tiles;  // of one message
  float* shard;
  Signs signs;
  bool add;
};

// The codes and scales of a tile of one message, as loaded.
template <int BITS, typename S>
struct LoadedTile {
  uint32_t codes[S::kAtOnce][S::kRuns], scales[S::kAtOnce];

  // Lanes past the end load the last block again.
  __device__ __forceinline__ void load(const Message<BITS>& message, uint32_t tile, uint32_t blocks) {
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint32_t block = min(S::block(tile, b), blocks - 1);
      scales[b] = *message.scale(block);
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) codes[b][v] = message.load_run(S::run_of_message(block, v));
    }
  }
};

// Adds a tile to the sum, or begins the sum with it.
template <int BITS, typename S>
__device__ __forceinline__ void add_tile(const LoadedTile<BITS, S>& tile, float level, bool begins,
                                         float (&sum)[S::kAtOnce][S::kRuns][8]) {
#pragma unroll
  for (int b = 0; b < S::kAtOnce; ++b) {
    const float scale = float_of(tile.scales[b] << 16);
#pragma unroll
    for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float value = level_of<BITS>(level, Message<BITS>::code(tile.codes[b][v], i)) * scale;
        sum[b][v][i] = begins ? value : sum[b][v][i] + value;
      }
    }
  }
}

// Puts a rotated sum where it belongs in the shard, or adds it there.
template <bool ADD>
__device__ __forceinline__ void put(float* shard, const float (&sum)[8], float rotation, uint32_t signs) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = signs & 1u << i ? -(sum[i] * rotation) : sum[i] * rotation;
  if constexpr (ADD) {
    Run<float> old;
    float before[8];
    old.load(shard);
    old.to_floats(before);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = before[i] + x[i];
  }
  float4 quads[2];
  to_quads(x, quads);
#pragma unroll
  for (int h = 0; h < 2; ++h) store_quad<true>(shard + 4 * h, quads[h]);
}

template <int BITS, typename S>
__global__ void __launch_bounds__(kThreads, S::kRuns > 4 ? 1 : S::kRuns > 1 ? 4 : 3) sum_rotated_kernel(
    const __grid_constant__ SumRotatedParams<BITS> p) {
  __shared__ WarpSigns::Storage storage[kThreads / kWarp];
  WarpSigns signs(storage[threadIdx.x / kWarp]);
  const float level = level_of_lane<BITS>();
  LoadedTile<BITS, S> loaded, next;
  uint32_t tile = uniform_warp_index() * kTilesOfSigns<S>;
  if (tile < p.tiles) loaded.load(p.messages[0], tile, p.blocks);
  while (tile < p.tiles) {
    const uint32_t after = tile_after<S>(tile), of_signs = tile % kTilesOfSigns<S>;
    if (of_signs == 0) signs.draw(p.signs, p.signs.first + uint64_t(tile) * S::kTileElements);
    const auto load_next = [&](uint32_t m) {
      if (m < p.count)
        next.load(p.messages[m], tile, p.blocks);
      else if (after < p.tiles)
        next.load(p.messages[0], after, p.blocks);
    };
    float sum[S::kAtOnce][S::kRuns][8];
    load_next(1);
    add_tile(loaded, level, true, sum);
    loaded = next;
    for (uint32_t m = 1; m < p.count; ++m) {
      load_next(m + 1);
      add_tile(loaded, level, false, sum);
      loaded = next;
    }
    const auto put_all = [&](auto add) {
#pragma unroll
      for (int b = 0; b < S::kAtOnce; ++b) {
        const uint32_t block = S::block(tile, b);
        if (block >= p.blocks) continue;
        float* shard = p.shard + uint64_t(block) * S::kBlock + 8 * S::member();
#pragma unroll
        for (int v = 0; v < S::kRuns; ++v)
          put<add.value>(shard + 8 * S::kLanes * v, sum[b][v], kRotationFactor<S>,
                         signs.of_run(S::run_of_tile(b, v) + of_signs * (S::kTileElements / 8)));
      }
    };
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) butterflies<S>(sum[b]);
    if (p.add)
      put_all(std::true_type());
    else
      put_all(std::false_type());
    tile = after;
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
                                         tiles_of<S>(blocks),
                                         op.shard,
                                         op.signs,
                                         op.add};
    launch<sum_rotated_kernel<kBits, S>>(warps_of<S>(params.tiles), stream, params);
  });
}

}  // namespace megatron_zpp::cuda
