// quantize_rotated on a GPU.
#include "rotation.cuh"

namespace megatron_zpp::cuda {

namespace {

template <int BITS>
struct QuantizeRotatedParams {
  const void* input;
  uint32_t blocks, tiles;  // of all messages
  Messages<BITS> messages;
  Signs signs;
  Feedback feedback;
};

struct Nothing {};

// What a lane's runs of a tile owe.
template <typename S>
class OwedTile {
 public:
  // Lanes past the end load the last block again.
  template <typename PARAMS>
  __device__ __forceinline__ void load(const PARAMS& p, uint32_t tile) {
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const Bf16* block = place(p, min(S::block(tile, b), p.blocks - 1));
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) runs_[b][v].load(block + 8 * S::kLanes * v);
    }
  }

  // Adds run v of block b, negated where the bit in `signs` is set.
  __device__ __forceinline__ void add_to(int b, int v, uint32_t signs, float divisor, float (&x)[8]) const {
    float owed[8];
    runs_[b][v].to_floats(signs, owed);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += owed[i] * divisor;
  }

  // The lane's first run of a block.
  template <typename PARAMS>
  __device__ static __forceinline__ Bf16* place(const PARAMS& p, uint32_t block) {
    const Quotient message = p.messages.by_blocks(block);
    return p.feedback.lost + message.quotient * p.feedback.distance + uint64_t(message.remainder) * S::kBlock +
           S::run(0);
  }

 private:
  Run<Bf16> runs_[S::kAtOnce][S::kRuns];
};

// A tile of a warp in shared memory, with a gap behind every eight 16-byte quads, so that neighbouring lanes that read
// whole runs use different banks.
template <typename S, typename T>
class StagedTile {
 public:
  // Begins to copy a tile. All lanes of the warp must have read the last one.
  __device__ __forceinline__ void load(const T* input, uint32_t tile, uint32_t blocks) {
    __syncwarp();
    const uint4* first = reinterpret_cast<const uint4*>(input) + uint64_t(tile) * kQuads + lane_index();
    if ((tile + 1) * S::kTileBlocks <= blocks) {
#pragma unroll
      for (uint32_t q = 0; q < kQuads; q += kWarp) copy(q, first + q);
    } else {
      const uint32_t quads = (blocks - tile * S::kTileBlocks) * (kQuads / S::kTileBlocks);
#pragma unroll 1
      for (uint32_t q = 0; q + lane_index() < quads; q += kWarp) copy(q, first + q);
    }
    end_group_of_copies();
  }

  // All lanes of a warp must call this after `load`.
  __device__ __forceinline__ void wait() const {
    wait_for_all_groups_but<0>();
    __syncwarp();
  }

  // Run v of block b of the lane, negated where the bit in `signs` is set.
  __device__ __forceinline__ void to_floats(int b, int v, uint32_t signs, float (&x)[8]) const {
    const uint32_t lane_quad = (S::group() * S::kLanes * S::kRuns + S::member()) * kRunQuads;
    const uint32_t quad = (b * S::kGroups * S::kRuns + v) * S::kLanes * kRunQuads;
    Run<T> run;
    run.load(reinterpret_cast<const T*>(quads_ + padded(lane_quad) + padded(quad)));
    run.to_floats(signs, x);
  }

 private:
  static constexpr uint32_t kQuads = S::kTileElements * sizeof(T) / 16, kRunQuads = sizeof(T) / 2;

  __device__ static constexpr uint32_t padded(uint32_t quad) { return quad + quad / 8; }

  __device__ __forceinline__ void copy(uint32_t quad, const uint4* address) {
    copy_bytes<16>(quads_ + padded(lane_index()) + padded(quad), address);
  }

  uint4 quads_[kQuads + kQuads / 8];
};

// A tile of a warp in registers.
template <typename S, typename T>
class LoadedTile {
 public:
  // Lanes past the end load the last block again.
  __device__ __forceinline__ void load(const T* input, uint32_t tile, uint32_t blocks) {
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint64_t block = min(S::block(tile, b), blocks - 1);
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) runs_[b][v].load(input + block * S::kBlock + S::run(v));
    }
  }

  __device__ __forceinline__ void wait() const {}

  __device__ __forceinline__ void to_floats(int b, int v, uint32_t signs, float (&x)[8]) const {
    runs_[b][v].to_floats(signs, x);
  }

 private:
  Run<T> runs_[S::kAtOnce][S::kRuns];
};

// A number over a power up to this is not so small that it rounds to 0: bf16 numbers are multiples of 2^-133, and so
// are sums of them; fp32 numbers of 2^-149, and a rotation's factor makes them smaller.
template <typename T>
constexpr float kLargestSafePower = sizeof(T) == 2 ? 0x1p12f : 1.f;

// A rotated block of sums of T that is `factor` too large, as a block of a message. With OWED, x becomes what the codes
// lose of it.
template <int BITS, typename S, typename T, bool OWED>
__device__ __forceinline__ void write_block(const QuantizeRotatedParams<BITS>& p, const LaneTables<BITS>& tables,
                                            uint32_t block, float (&x)[S::kRuns][8], float factor) {
  const Power power(bits_of(float_of(largest_magnitude<S>(x)) * factor));
  multiply(x, power.inverse() * factor);
  // Numbers are -0 again if they were so small that the product rounded to it; inputs and sums have larger steps.
  if (power.power > kLargestSafePower<T>) {
#pragma unroll
    for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[v][i] += 0.f;
    }
  }
  const float squares = product_of_block<S>(x, x);
  const Root unit(squares * (1.f / S::kBlock));
  const Encoder<BITS, S> encoder(tables, unit.root, unit.inverse);
  Nibbles codes[S::kRuns];
  float products[S::kRuns];
#pragma unroll
  for (int v = 0; v < S::kRuns; ++v) {
    uint32_t magnitudes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float size = fabsf(x[v][i]);
      magnitudes[i] = encoder.magnitude(size);
      const float product = size * level_of<BITS - 1>(tables.level, magnitudes[i]);
      products[v] = i == 0 ? product : products[v] + product;
    }
    codes[v] = codes_of<BITS>(x[v], magnitudes);
  }
  const float ratio = quotient_of(squares, sum_of_block<S>(products));
  const uint32_t stored = power.stored(power.power * ratio);
  const float scale = float_of(stored << 16);
  const uint32_t kept = scale > 0.f ? ~0u : 0u;  // neither 0 nor NaN
  if constexpr (OWED) {
    const float level = level_of_lane<BITS>();
#pragma unroll
    for (int v = 0; v < S::kRuns; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        x[v][i] = x[v][i] * power.power - level_of<BITS>(level, (codes[v] & kept) >> 4 * i) * scale;
    }
  }
  if (block >= p.blocks) return;
  const Quotient message = p.messages.by_blocks(block);
  const Message<BITS> to = p.messages[message.quotient];
#pragma unroll
  for (int v = 0; v < S::kRuns; ++v)
    to.store_run(S::run_of_message(message.remainder, v), codes[v] & kept);
  if (S::member() == 0) p.messages.store_scale(to, message.remainder, stored);
}

// What codes have lost of a rotated block goes to the place of what it owed.
template <int BITS, typename S, typename SIGNS>
__device__ __forceinline__ void write_owed(const QuantizeRotatedParams<BITS>& p, uint32_t block,
                                           float (&x)[S::kRuns][8], SIGNS&& signs_of_run, float inverse) {
  butterflies<S>(x);
  multiply(x, kRotationFactor<S>);
  if (block >= p.blocks) return;
  Bf16* owed = OwedTile<S>::place(p, block);
#pragma unroll
  for (int v = 0; v < S::kRuns; ++v) {
    const uint32_t signs = signs_of_run(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[v][i] = (signs & 1u << i ? -x[v][i] : x[v][i]) * inverse;
    store_eight<true>(owed + 8 * S::kLanes * v, x[v], true);
  }
}

// TILE is where the tile that a warp encodes next waits.
template <int BITS, typename S, typename T, bool OWED, typename TILE>
__device__ __forceinline__ void quantize_tiles(const QuantizeRotatedParams<BITS>& p, TILE& loaded, WarpSigns signs) {
  using Sum = std::conditional_t<OWED, float, T>;
  // From 16-bit numbers, butterflies make no bits so low that a power of two loses them.
  constexpr bool kLater = sizeof(Sum) == 2 && (kRotated<S> == 256 || kRotated<S> == 64);
  const LaneTables<BITS> tables;
  const float divisor = OWED ? *p.feedback.divisor : 1.f, inverse = 1.f / divisor;
  const T* input = static_cast<const T*>(p.input);
  uint32_t tile = uniform_warp_index() * kTilesOfSigns<S>;
  if (tile < p.tiles) loaded.load(input, tile, p.blocks);
  for (; tile < p.tiles; tile = tile_after<S>(tile)) {
    const uint32_t of_signs = tile % kTilesOfSigns<S>;
    if (of_signs == 0) signs.draw(p.signs, p.signs.first + uint64_t(tile) * S::kTileElements);
    const auto signs_of = [&](int b, int v) {
      return signs.of_run(S::run_of_tile(b, v) + of_signs * (S::kTileElements / 8));
    };
    std::conditional_t<OWED, OwedTile<S>, Nothing> owed;
    if constexpr (OWED) owed.load(p, tile);
    loaded.wait();
    float x[S::kAtOnce][S::kRuns][8];
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
        loaded.to_floats(b, v, signs_of(b, v), x[b][v]);
        if constexpr (OWED) owed.add_to(b, v, signs_of(b, v), divisor, x[b][v]);
      }
    }
    if (tile_after<S>(tile) < p.tiles) loaded.load(input, tile_after<S>(tile), p.blocks);
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      butterflies<S>(x[b]);
      if constexpr (!kLater) multiply(x[b], kRotationFactor<S>);
      const uint32_t block = S::block(tile, b);
      write_block<BITS, S, Sum, OWED>(p, tables, block, x[b], kLater ? kRotationFactor<S> : 1.f);
      if constexpr (OWED) write_owed<BITS, S>(p, block, x[b], [&](int v) { return signs_of(b, v); }, inverse);
    }
  }
}

// Whether the tiles of all warps of a thread block fit in the 48 KiB of shared memory that need no opt-in.
template <typename S, typename T>
constexpr bool kStaged = S::kTileElements * sizeof(T) <= 4096;

template <int BITS, typename S, typename T, bool OWED>
__global__ void __launch_bounds__(kThreads, S::kRuns > 4 ? 1 : OWED ? 3 : 4) quantize_rotated_kernel(
    const __grid_constant__ QuantizeRotatedParams<BITS> p) {
  __shared__ WarpSigns::Storage storage[kThreads / kWarp];
  const WarpSigns signs(storage[threadIdx.x / kWarp]);
  if constexpr (kStaged<S, T>) {
    __shared__ StagedTile<S, T> tiles[kThreads / kWarp];
    quantize_tiles<BITS, S, T, OWED>(p, tiles[threadIdx.x / kWarp], signs);
  } else {
    LoadedTile<S, T> tile;
    quantize_tiles<BITS, S, T, OWED>(p, tile, signs);
  }
}

}  // namespace

void run(const QuantizeRotated& op, CUstream_st* stream) {
  with_shape(op.format, [&](auto bits, auto shape) {
    constexpr int kBits = decltype(bits)::value;
    using S = decltype(shape);
    const uint32_t blocks = index_of(op.elements / op.format.block);
    const QuantizeRotatedParams<kBits> params{
        op.input, blocks, tiles_of<S>(blocks), Messages<kBits>(op.messages, op.format, op.elements / op.message_count),
        op.signs, op.feedback};
    with_dtype(op.input_dtype, [&](auto dtype) {
      using T = typename decltype(dtype)::type;
      if (op.feedback.lost == nullptr)
        launch<quantize_rotated_kernel<kBits, S, T, false>>(warps_of<S>(params.tiles), stream, params);
      else
        launch<quantize_rotated_kernel<kBits, S, T, true>>(warps_of<S>(params.tiles), stream, params);
    });
  });
}

}  // namespace megatron_zpp::cuda
