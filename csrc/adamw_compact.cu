// adamw_compact on a GPU: a warp steps a block of states, four neighbouring elements per lane.
#include "adamw.cuh"

namespace megatron_zpp::cuda {

namespace {

constexpr int kBlocksAtOnce = 2;  // whose loads are in flight together

// Four numbers as they are in memory: 4 to 16 bytes.
struct Quad {
  uint4 words;

  // The size is the same for all threads, so this branch costs little.
  __device__ __forceinline__ void load(const void* values, int64_t at, int bytes_each) {
    const uint8_t* address = static_cast<const uint8_t*>(values) + at * bytes_each;
    if (bytes_each == 4) {
      words = load_vector<uint4>(address);
    } else {
      const uint2 two = load_vector<uint2>(address);
      words.x = two.x;
      words.y = two.y;
    }
  }

  __device__ __forceinline__ void load_bytes(const void* values, int64_t at) {
    words.x = load_vector<uint32_t>(static_cast<const uint8_t*>(values) + at);
  }

  __device__ __forceinline__ void to_floats(float (&x)[4]) const {
    x[0] = float_of(words.x);
    x[1] = float_of(words.y);
    x[2] = float_of(words.z);
    x[3] = float_of(words.w);
  }

  __device__ __forceinline__ void halves(uint32_t (&x)[4]) const {
    x[0] = words.x & 0xFFFFu;
    x[1] = words.x >> 16;
    x[2] = words.y & 0xFFFFu;
    x[3] = words.y >> 16;
  }
};

__device__ __forceinline__ void store_halves(void* values, int64_t at, const uint32_t (&x)[4]) {
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(values) + at) = {x[0] | x[1] << 16, x[2] | x[3] << 16};
}

__device__ __forceinline__ void store_bytes(void* values, int64_t at, const uint32_t (&x)[4]) {
  *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(values) + at) = x[0] | x[1] << 8 | x[2] << 16 | x[3] << 24;
}

__device__ __forceinline__ void store_floats(void* values, int64_t at, const float (&x)[4]) {
  *reinterpret_cast<float4*>(static_cast<float*>(values) + at) = {x[0], x[1], x[2], x[3]};
}

__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) { return word >> (8 * i) & 0xFFu; }

// A moment of one block. FP8 is known when compiling, the other forms when running.
template <bool FP8, bool SECOND>
struct Moment {
  Quad raw;
  uint32_t stored;  // the scale

  __device__ __forceinline__ void load(const StateTensor& state, uint32_t block, int64_t at) {
    if constexpr (FP8) {
      raw.load_bytes(state.values, at);
      stored = state.scales[block];
    } else {
      raw.load(state.values, at, state.form == StateForm::fp32 ? 4 : 2);
      stored = state.form == StateForm::fp16 ? state.scales[block] : 0;
    }
  }

  __device__ __forceinline__ void to_floats(const StateTensor& state, float (&x)[4]) const {
    const float scale = scale_value(stored);
    if constexpr (FP8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (SECOND)
          x[i] = SecondFp8::decode(byte_of(raw.words.x, i), scale);
        else
          x[i] = FirstFp8::decode<8>(raw.words.x << (24 - 8 * i), scale);
      }
    } else if (state.form == StateForm::fp32) {
      raw.to_floats(x);
    } else {
      uint32_t codes[4];
      raw.halves(codes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (state.form == StateForm::bf16)
          x[i] = float_of(codes[i] << 16);
        else if constexpr (SECOND)
          x[i] = SecondFp16::decode(codes[i], scale);
        else
          x[i] = FirstFp16::decode<16>(codes[i] << 16, scale);
      }
    }
  }

  // All lanes must call this.
  __device__ __forceinline__ static void store(const StateTensor& state, uint32_t block, int64_t at, float (&x)[4],
                                               const Random8& draws, bool active) {
    if constexpr (FP8) {
      uint32_t codes[4];
      const uint32_t stored = encode<FirstFp8, SecondFp8, 8>(x, draws, codes);
      if (!active) return;
      store_bytes(state.values, at, codes);
      if (lane_index() == 0) state.scales[block] = uint8_t(stored);
    } else if (state.form == StateForm::fp16) {
      uint32_t codes[4];
      const uint32_t stored = encode<FirstFp16, SecondFp16, 16>(x, draws, codes);
      if (!active) return;
      store_halves(state.values, at, codes);
      if (lane_index() == 0) state.scales[block] = uint8_t(stored);
    } else if (state.form == StateForm::bf16) {
      uint32_t codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = rounded_bf16(x[i], draw_of(draws, i));
      if (active) store_halves(state.values, at, codes);
    } else if (active) {
      store_floats(state.values, at, x);
    }
  }

 private:
  __device__ __forceinline__ static uint32_t draw_of(const Random8& draws, int i) {
    const Draw draw{draws.word[i]};
    return SECOND ? draw.second() : draw.first();
  }

  // Writes the codes of the lane and returns the scale of its block.
  template <typename First, typename Second, int BITS>
  __device__ __forceinline__ static uint32_t encode(float (&x)[4], const Random8& draws, uint32_t (&codes)[4]) {
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (SECOND) x[i] = Second::root_of(x[i]);
      peak = max(peak, First::peak_bits(x[i]));
    }
    peak = largest_of_lanes(peak, 5);
    if constexpr (SECOND) {
      const uint32_t stored = Second::Grid::scale_of(peak);
      const Inverse inverse(stored);
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = Second::encode(x[i], inverse, draw_of(draws, i));
      return stored;
    } else {
      const uint32_t stored = First::Grid::scale_of(peak);
      const Inverse inverse(stored);
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = First::template encode<BITS>(x[i], inverse, draw_of(draws, i));
      return stored;
    }
  }
};

// The weights of a block: fp32, or bf16 and a byte.
template <bool SPLIT>
struct Weights {
  Quad raw, corrections;

  __device__ __forceinline__ void load(const AdamwCompact& op, int64_t at) {
    if constexpr (SPLIT) {
      raw.load(op.gather_source, at, 2);
      corrections.load_bytes(op.master, at);
    } else {
      raw.load(op.master, at, 4);
    }
  }

  __device__ __forceinline__ void to_floats(float (&x)[4]) const {
    if constexpr (SPLIT) {
      uint32_t upper[4];
      raw.halves(upper);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = joined_weight({upper[i], byte_of(corrections.words.x, i)});
    } else {
      raw.to_floats(x);
    }
  }

  __device__ __forceinline__ static void store(const AdamwCompact& op, int64_t at, const float (&x)[4],
                                               const Random8& draws) {
    uint32_t halves[4];
    if constexpr (SPLIT) {
      uint32_t bytes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const SplitWeight split = split_weight(x[i], Draw{draws.word[i]}.weight());
        halves[i] = split.bf16;
        bytes[i] = split.correction;
      }
      store_bytes(op.master, at, bytes);
    } else {
      store_floats(op.master, at, x);
      if (op.gather_source == nullptr) return;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        halves[i] = op.gather_source_dtype == DType::bf16 ? narrow<Bf16>(x[i]).bits : narrow<Fp16>(x[i]).bits;
    }
    store_halves(op.gather_source, at, halves);
  }
};

__device__ __forceinline__ void gradients_of(const Quad& raw, DType dtype, float (&x)[4]) {
  if (dtype == DType::fp32) return raw.to_floats(x);
  uint32_t halves[4];
  raw.halves(halves);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = dtype == DType::bf16 ? to_float(Bf16{uint16_t(halves[i])}) : to_float(Fp16{uint16_t(halves[i])});
}

template <bool FIRST_FP8, bool SECOND_FP8, bool SPLIT>
struct Block {
  Moment<FIRST_FP8, false> first;
  Moment<SECOND_FP8, true> second;
  Weights<SPLIT> weights;
  Quad gradient;

  __device__ __forceinline__ void load(const AdamwCompact& op, uint32_t block, int64_t at) {
    gradient.load(op.gradient, at, op.gradient_dtype == DType::fp32 ? 4 : 2);
    first.load(op.exp_avg, block, at);
    second.load(op.exp_avg_sq, block, at);
    weights.load(op, at);
  }

  __device__ __forceinline__ void step(const AdamwCompact& op, const CompactFactors& factors, uint32_t step,
                                       uint32_t block, int64_t at, bool active) const {
    float g[4], w[4], average[4], square[4];
    gradients_of(gradient, op.gradient_dtype, g);
    first.to_floats(op.exp_avg, average);
    second.to_floats(op.exp_avg_sq, square);
    weights.to_floats(w);
    const int decaying = int(min(max(op.decayed - at, int64_t(0)), int64_t(4)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const AdamwState after =
          compact_step({w[i], average[i], square[i]}, g[i], i < decaying, op.scalars.constants, factors);
      w[i] = after.weight;
      average[i] = after.average;
      square[i] = after.average_square;
    }
    const Random8 draws = draws_of(op.rounding, step, uint64_t(at) / 4);
    first.store(op.exp_avg, block, at, average, draws, active);
    second.store(op.exp_avg_sq, block, at, square, draws, active);
    if (active) weights.store(op, at, w, draws);
  }
};

template <bool FIRST_FP8, bool SECOND_FP8, bool SPLIT>
__global__ void __launch_bounds__(kThreads) adamw_compact_kernel(const __grid_constant__ AdamwCompact op) {
  if (*op.scalars.found_inf != 0) return;
  const CompactFactors factors =
      compact_factors(op.scalars.constants, *op.scalars.divisor, op.scalars.bias_corrections);
  const uint32_t step = uint32_t(*op.rounding.step), count = uint32_t(op.elements / kStateBlock);
  for (uint32_t start = uniform_warp_index() * kBlocksAtOnce; start < count; start += warp_count() * kBlocksAtOnce) {
    Block<FIRST_FP8, SECOND_FP8, SPLIT> blocks[kBlocksAtOnce];
#pragma unroll
    for (int b = 0; b < kBlocksAtOnce; ++b) {
      const uint32_t block = min(start + b, count - 1);  // behind the end the last one again, which is not written
      blocks[b].load(op, block, int64_t(block) * kStateBlock + 4 * lane_index());
    }
#pragma unroll
    for (int b = 0; b < kBlocksAtOnce; ++b) {
      const uint32_t block = min(start + b, count - 1);
      blocks[b].step(op, factors, step, block, int64_t(block) * kStateBlock + 4 * lane_index(), start + b < count);
    }
  }
}

template <bool FIRST_FP8, bool SECOND_FP8>
void launch_split(const AdamwCompact& op, CUstream_st* stream) {
  const int64_t tiles = (index_of(op.elements / kStateBlock) + kBlocksAtOnce - 1) / kBlocksAtOnce;
  if (op.split)
    launch<adamw_compact_kernel<FIRST_FP8, SECOND_FP8, true>>(tiles, stream, op);
  else
    launch<adamw_compact_kernel<FIRST_FP8, SECOND_FP8, false>>(tiles, stream, op);
}

}  // namespace

void run(const AdamwCompact& op, CUstream_st* stream) {
  const bool first = op.exp_avg.form == StateForm::fp8, second = op.exp_avg_sq.form == StateForm::fp8;
  if (first && second) return launch_split<true, true>(op, stream);
  if (first) return launch_split<true, false>(op, stream);
  if (second) return launch_split<false, true>(op, stream);
  return launch_split<false, false>(op, stream);
}

}  // namespace megatron_zpp::cuda
