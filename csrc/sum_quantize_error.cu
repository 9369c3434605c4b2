// sum_quantize with error feedback on a GPU.
#include "sum_quantize.cuh"

namespace megatron_zpp::cuda {

namespace {

// Sixteen bytes of errors, of a lane's elements from x[at] on.
template <typename T>
struct ErrorQuad {
  static constexpr int kSize = 8;

  template <int RUN>
  __device__ __forceinline__ static void add(const uint4& quad, float (&x)[RUN], int at) {
    const uint32_t pairs[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[at + 2 * k] += to_float(T{uint16_t(pairs[k])});
      x[at + 2 * k + 1] += to_float(T{uint16_t(pairs[k] >> 16)});
    }
  }

  template <int RUN>
  __device__ __forceinline__ static uint4 of(const float (&x)[RUN], int at) {
    return {pair_of(T(), x[at], x[at + 1]), pair_of(T(), x[at + 2], x[at + 3]), pair_of(T(), x[at + 4], x[at + 5]),
            pair_of(T(), x[at + 6], x[at + 7])};
  }
};

template <>
struct ErrorQuad<float> {
  static constexpr int kSize = 4;

  template <int RUN>
  __device__ __forceinline__ static void add(const uint4& quad, float (&x)[RUN], int at) {
    x[at] += float_of(quad.x);
    x[at + 1] += float_of(quad.y);
    x[at + 2] += float_of(quad.z);
    x[at + 3] += float_of(quad.w);
  }

  template <int RUN>
  __device__ __forceinline__ static uint4 of(const float (&x)[RUN], int at) {
    return {bits_of(x[at]), bits_of(x[at + 1]), bits_of(x[at + 2]), bits_of(x[at + 3])};
  }
};

// The errors of tiles. Neighbouring lanes access neighbouring 16 bytes of memory, and exchange them through shared
// memory for runs of elements, kTogether quads per lane at a time.
template <typename T, int RUN>
class TileErrors {
 public:
  static constexpr int kQuads = RUN / ErrorQuad<T>::kSize, kTogether = 128 / RUN;
  using Shared = uint4[kWarp * kTogether];

  __device__ __forceinline__ TileErrors(const SumQuantizeParams& p, Shared& shared)
      : errors_(static_cast<uint4*>(p.error)), runs_(p.runs), shared_(shared) {}

  // Loads the errors of `tile`, to be added by the next call of `add`.
  __device__ __forceinline__ void load(uint32_t tile) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) loaded_[q] = load_vector<uint4>(errors_ + min(quad_of(tile, q), last_quad()));
  }

  __device__ __forceinline__ void add(float (&x)[RUN]) {
#pragma unroll
    for (int first = 0; first < kQuads; first += kTogether) {
      __syncwarp();  // all lanes have read the shared memory's previous contents
#pragma unroll
      for (int q = 0; q < kTogether; ++q) shared_[swizzled(q * kWarp + lane_index())] = loaded_[first + q];
      __syncwarp();
#pragma unroll
      for (int q = 0; q < kTogether; ++q)
        ErrorQuad<T>::add(shared_[swizzled(lane_index() * kTogether + q)], x, (first + q) * ErrorQuad<T>::kSize);
    }
  }

  // Stores the errors of a tile, except those of lanes without `change`.
  __device__ __forceinline__ void store(uint32_t tile, const float (&lost)[RUN], bool change) {
    const uint32_t changed = __ballot_sync(kAllLanes, change);
#pragma unroll
    for (int first = 0; first < kQuads; first += kTogether) {
      __syncwarp();
#pragma unroll
      for (int q = 0; q < kTogether; ++q)
        shared_[swizzled(lane_index() * kTogether + q)] =
            ErrorQuad<T>::of(lost, (first + q) * ErrorQuad<T>::kSize);
      __syncwarp();
#pragma unroll
      for (int q = 0; q < kTogether; ++q) {
        if (changed >> owner_of(q) & 1)
          errors_[quad_of(tile, first + q)] = shared_[swizzled(q * kWarp + lane_index())];
      }
    }
  }

 private:
  // The lane that owns the errors which this lane accesses as its quad q, and the index of that quad in memory.
  __device__ __forceinline__ static uint32_t owner_of(int q) {
    return (q % kTogether * kWarp + lane_index()) / kTogether;
  }

  __device__ __forceinline__ static uint64_t quad_of(uint32_t tile, int q) {
    return (uint64_t(tile) * kWarp + owner_of(q)) * kQuads + q / kTogether * kTogether + lane_index() % kTogether;
  }

  __device__ __forceinline__ uint64_t last_quad() const { return uint64_t(runs_) * kQuads - 1; }

  uint4* errors_;
  uint32_t runs_;
  Shared& shared_;
  uint4 loaded_[kQuads];
};

template <CodeType In, CodeType Out, typename T, int RUN, int SCALES>
__global__ void __launch_bounds__(kThreads, RUN == 32 ? 2 : 1)
    sum_quantize_error_kernel(const __grid_constant__ SumQuantizeParams p) {
  // Within 48 KiB together with `shared`, which takes 16 KiB for 32 elements per lane and 8 KiB for 64.
  using Sums = BlockSums<In, RUN, SCALES, RUN == 32 ? 30 << 10 : 40 << 10>;
  using Errors = TileErrors<T, RUN>;
  __shared__ typename Sums::Stages stages[kThreads / kWarp];
  __shared__ typename Errors::Shared shared[kThreads / kWarp];
  uint32_t tile = warp_index();
  if (tile >= p.tiles) return;
  Sums sums(p.addends, stages[threadIdx.x / kWarp], tile, warp_count(), p.runs);
  Errors errors(p, shared[threadIdx.x / kWarp]);
  errors.load(tile);
  for (; tile < p.tiles; tile += warp_count()) {
    float x[1][RUN];
    sums.next(tile, x[0]);
    errors.add(x[0]);
    if (tile + warp_count() < p.tiles) errors.load(tile + warp_count());  // in flight while this tile is encoded
    const Target target = target_of(p, tile);
    const auto keep_lost = [&](int, const auto& words, const BlockScale& scale) {
      float lost[RUN];
      decode_codes<Out>(words, lost);
#pragma unroll
      for (int i = 0; i < RUN; ++i) lost[i] = lost_of(x[0][i], lost[i] * scale.stored);
      const bool finite = bits_of(scale.stored) != kNanBits;  // a NaN would be fed back for ever
      errors.store(tile, lost, target.active && finite);
    };
    const Quotient output = p.by_message_blocks(target.block);
    write_block<Out>(p.writer, p.lanes, p.writer.message(output.quotient), output.remainder, first_element(p, target),
                     x, target.active, keep_lost);
  }
}

template <CodeType In, CodeType Out, typename T>
void launch_codes(const SumQuantize& op, CUstream_st* stream) {
  if (op.output_format.block <= kWarp * 32)  // a warp must hold a whole block
    return launch_tiles<sum_quantize_error_kernel<In, Out, T, 32, 1>>(op, 32, stream);
  launch_tiles<sum_quantize_error_kernel<In, Out, T, 64, 2>>(op, 64, stream);
}

}  // namespace

void run_with_error(const SumQuantize& op, CUstream_st* stream) {
  with_code_type(op.format.code_type, [&](auto in) {
    with_code_type(op.output_format.code_type, [&](auto out) {
      with_dtype(op.error_dtype, [&](auto dtype) {
        launch_codes<decltype(in)::value, decltype(out)::value, typename decltype(dtype)::type>(op, stream);
      });
    });
  });
}

}  // namespace megatron_zpp::cuda
