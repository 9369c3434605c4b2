// adamw_compact on a GPU: a warp steps a block of states, four neighbouring elements per lane.
//
// Instructions limit the rate. So ordinary blocks, which almost all are, take a path without special cases; the others
// take that of state_codes.h. Both give the same bits.
#include "device.cuh"

namespace megatron_zpp::cuda {

namespace {

// New first moments of ordinary blocks and roots of second ones are from the least on and below the limit; weights are
// finite. Root and quotient_of are then exact, and 1 / scale in the grid's exponents is not subnormal.
constexpr float kLeastOrdinary = 0x1p-50f, kOrdinaryLimit = 0x1p15f;

// Four numbers as they are in memory: 4 to 16 bytes.
struct Quad {
  uint4 words;

  // The size is the same for all threads, so this branch costs little.
  __device__ __forceinline__ void load(const void* values, int bytes_each) {
    if (bytes_each == 4) {
      words = load_vector<uint4>(values);
    } else {
      const uint2 two = load_vector<uint2>(values);
      words.x = two.x;
      words.y = two.y;
    }
  }

  __device__ __forceinline__ void load_bytes(const void* values) { words.x = load_vector<uint32_t>(values); }

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

__device__ __forceinline__ void store_halves(void* values, const uint32_t (&x)[4]) {
  *static_cast<uint2*>(values) = {x[0] | x[1] << 16, x[2] | x[3] << 16};
}

__device__ __forceinline__ void store_bytes(void* values, const uint32_t (&x)[4]) {
  *static_cast<uint32_t*>(values) = x[0] | x[1] << 8 | x[2] << 16 | x[3] << 24;
}

__device__ __forceinline__ void store_floats(void* values, const float (&x)[4]) {
  *static_cast<float4*>(values) = {x[0], x[1], x[2], x[3]};
}

__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) { return word >> (8 * i) & 0xFFu; }

__device__ __forceinline__ uint32_t upper_halves(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x7632);
}

// NaN if one of them is.
__device__ __forceinline__ float largest_magnitude(const float (&x)[4]) {
  float largest = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < 4; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(x[i])));
  return largest;
}

// ---- fp8: two elements per operation ----

// The numbers of four codes over 2^8 and the scale. As fp16 a code has a bit of exponent more, and another bias.
template <bool SECOND>
__device__ __forceinline__ void fp8_numbers(uint32_t codes, float (&x)[4]) {
  const uint32_t even = SECOND ? codes << 6 & 0x3FC03FC0u : (codes << 8 & 0x80008000u) | (codes << 7 & 0x3F803F80u);
  const uint32_t odd = SECOND ? codes >> 2 & 0x3FC03FC0u : (codes & 0x80008000u) | (codes >> 1 & 0x3F803F80u);
  const float2 of_even = __half22float2(reinterpret_cast<const __half2&>(even));
  const float2 of_odd = __half22float2(reinterpret_cast<const __half2&>(odd));
  x[0] = of_even.x;
  x[1] = of_odd.x;
  x[2] = of_even.y;
  x[3] = of_odd.y;
}

// Four codes of an ordinary block: of first moments, or of roots of second ones.
template <typename Scaled, bool SECOND>
__device__ __forceinline__ uint32_t fp8_codes(const float (&x)[4], uint32_t stored, const Random8& draws) {
  constexpr int dropped = Scaled::Grid::kDropped;
  const float factor = float_of((134 - stored) << 23);  // of Inverse and code_of at once
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t z = bits_of(x[i] * factor);
    const Draw draw{draws.word[i]};
    if constexpr (SECOND)
      bits[i] = min(raised_bits<dropped>(max(z, 1u << dropped), draw.second()), (1u << 27) - 1);
    else
      bits[i] = raised_bits<dropped>(z, draw.first());
  }
  const uint32_t even = upper_halves(bits[0], bits[2]), odd = upper_halves(bits[1], bits[3]);
  if constexpr (SECOND) {
    return (even >> 3 & 0x00FF00FFu) | (odd << 5 & 0xFF00FF00u);
  } else {
    const uint32_t codes = (even >> 4 & 0x00FF00FFu) | (odd << 4 & 0xFF00FF00u);  // 128 instead of 127 at most
    const uint32_t signs = (even >> 8 & 0x00800080u) | (odd & 0x80008000u);
    return (codes - (codes >> 7 & 0x01010101u)) | signs;
  }
}

// ---- states ----

// A moment of one block. FP8 is known when compiling, the other forms when running.
template <bool FP8, bool SECOND>
struct Moment {
  using Scaled = std::conditional_t<SECOND, std::conditional_t<FP8, SecondFp8, SecondFp16>,
                                    std::conditional_t<FP8, FirstFp8, FirstFp16>>;

  Quad raw;
  uint32_t stored;  // the scale

  __device__ __forceinline__ static int bytes_each(const StateTensor& state) {
    return FP8 ? 1 : state.form == StateForm::fp32 ? 4 : 2;
  }

  __device__ __forceinline__ void load(const StateTensor& state) {
    if constexpr (FP8)
      raw.load_bytes(state.values);
    else
      raw.load(state.values, bytes_each(state));
    stored = FP8 || state.form == StateForm::fp16 ? *state.scales : 0;
  }

  // What a step keeps of the moments: beta times them.
  __device__ __forceinline__ void kept(const StateTensor& state, float beta, float (&x)[4]) const {
    if constexpr (FP8) {
      const float scale = float_of(stored << 23) * 0x1p8f;  // of NaN infinite, and 0 times that is NaN
      const float factor = (SECOND ? scale * scale : scale) * beta;  // exact if beta > 2^-31
      fp8_numbers<SECOND>(raw.words.x, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = (SECOND ? x[i] * x[i] : x[i]) * factor;
    } else {
      uint32_t halves[4];
      raw.halves(halves);
      if (state.form == StateForm::fp32) raw.to_floats(x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (state.form == StateForm::bf16)
          x[i] = float_of(halves[i] << 16);
        else if (state.form == StateForm::fp16)
          x[i] = decode(halves[i], scale_value(stored));
        x[i] *= beta;
      }
    }
  }

  // `root` is that of the second moment. All lanes must call this.
  template <bool ORDINARY>
  __device__ __forceinline__ static void store(const StateTensor& state, const float (&x)[4], const float (&root)[4],
                                               const Random8& draws) {
    uint32_t codes[4];
    if (FP8 || state.form == StateForm::fp16) {
      const float(&held)[4] = SECOND ? root : x;
      const uint32_t peak = largest_of_lanes(bits_of(largest_magnitude(held)), 5);
      const uint32_t stored = ORDINARY ? Scaled::Grid::scale_of_ordinary(peak) : Scaled::Grid::scale_of(peak);
      if (lane_index() == 0) *state.scales = uint8_t(stored);
      if constexpr (FP8 && ORDINARY) {
        *static_cast<uint32_t*>(state.values) = fp8_codes<Scaled, SECOND>(held, stored, draws);
        return;
      }
      const Inverse inverse(stored);
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = encode(held[i], inverse, draw_of(draws, i));
      if constexpr (FP8)
        store_bytes(state.values, codes);
      else
        store_halves(state.values, codes);
    } else if (state.form == StateForm::bf16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = rounded_bf16(x[i], draw_of(draws, i));
      store_halves(state.values, codes);
    } else {
      store_floats(state.values, x);
    }
  }

 private:
  __device__ __forceinline__ static float decode(uint32_t half, float scale) {
    if constexpr (SECOND)
      return Scaled::decode(half, scale);
    else
      return Scaled::template decode<16>(half << 16, scale);
  }

  __device__ __forceinline__ static uint32_t encode(float held, const Inverse& inverse, uint32_t draw) {
    if constexpr (SECOND)
      return Scaled::encode(held, inverse, draw);
    else
      return Scaled::template encode<FP8 ? 8 : 16>(held, inverse, draw);
  }

  __device__ __forceinline__ static uint32_t draw_of(const Random8& draws, int i) {
    const Draw draw{draws.word[i]};
    return SECOND ? draw.second() : draw.first();
  }
};

// The weights of a block: fp32, or bf16 and a byte.
template <bool SPLIT>
struct Weights {
  Quad raw, corrections;

  __device__ __forceinline__ void load(const AdamwCompact& op) {
    if constexpr (SPLIT) {
      raw.load(op.gather_source, 2);
      corrections.load_bytes(op.master);
    } else {
      raw.load(op.master, 4);
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

  template <bool ORDINARY>
  __device__ __forceinline__ static void store(const AdamwCompact& op, const float (&x)[4], const Random8& draws) {
    uint32_t bits[4], halves[4];
    if constexpr (SPLIT && ORDINARY) {  // split_weight of numbers that are not NaN, packed with fewer instructions
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bits[i] = bits_of(x[i]) + Draw{draws.word[i]}.weight();
        halves[i] = bits[i] + 0x8000u;
      }
      *static_cast<uint2*>(op.gather_source) = {upper_halves(halves[0], halves[1]), upper_halves(halves[2], halves[3])};
      const uint32_t low = __byte_perm(bits[0], bits[1], 0x51), high = __byte_perm(bits[2], bits[3], 0x51);
      *static_cast<uint32_t*>(op.master) = __byte_perm(low, high, 0x5410);
    } else if constexpr (SPLIT) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const SplitWeight split = split_weight(x[i], Draw{draws.word[i]}.weight());
        halves[i] = split.bf16;
        bits[i] = split.correction;
      }
      store_bytes(op.master, bits);
      store_halves(op.gather_source, halves);
    } else {
      store_floats(op.master, x);
      if (op.gather_source == nullptr) return;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        halves[i] = op.gather_source_dtype == DType::bf16 ? narrow<Bf16>(x[i]).bits : narrow<Fp16>(x[i]).bits;
      store_halves(op.gather_source, halves);
    }
  }
};

template <typename G, bool FIRST_FP8, bool SECOND_FP8, bool SPLIT>
struct Block {
  Moment<FIRST_FP8, false> first;
  Moment<SECOND_FP8, true> second;
  Weights<SPLIT> weights;
  Quad gradient;

  __device__ __forceinline__ void load(const AdamwCompact& op) {
    gradient.load(op.gradient, sizeof(G));
    first.load(op.exp_avg);
    second.load(op.exp_avg_sq);
    weights.load(op);
  }

  // `decaying`: the number of blocks in which each of the four has weight decay. All lanes must call this.
  __device__ __forceinline__ void step(const AdamwCompact& op, const CompactFactors& factors, uint32_t step,
                                       uint32_t block, const uint32_t (&decaying)[4]) const {
    const AdamwConstants& constants = op.scalars.constants;
    float g[4], w[4], average[4], square[4], root[4], weight[4], least[4];
    gradients(g);
    first.kept(op.exp_avg, constants.beta1, average);
    second.kept(op.exp_avg_sq, constants.beta2, square);
    weights.to_floats(w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const AdamwState kept = {w[i], average[i], square[i]};
      const AdamwState s = compact_moments(kept, g[i], block < decaying[i], constants, factors);
      w[i] = s.weight;
      average[i] = s.average;
      square[i] = s.average_square;
      root[i] = Root(square[i]).root;
      weight[i] = w[i] - factors.rate * quotient_of(average[i], root[i] + factors.eps);
      least[i] = fminf(fabsf(average[i]), root[i]);
    }
    const bool ordinary = (fminf(fminf(least[0], least[1]), fminf(least[2], least[3])) >= kLeastOrdinary) &
                          (largest_magnitude(average) < kOrdinaryLimit) & (largest_magnitude(root) < kOrdinaryLimit) &
                          (fabsf(weight[0] + weight[1] + weight[2] + weight[3]) < INFINITY);
    const Random8 draws = draws_of(op.rounding, step, block, lane_index());
    if (__all_sync(kAllLanes, ordinary)) return store<true>(op, weight, average, square, root, draws);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      root[i] = sqrtf(square[i]);
      weight[i] = compact_weight({w[i], average[i], square[i]}, root[i], factors);
    }
    store<false>(op, weight, average, square, root, draws);
  }

 private:
  __device__ __forceinline__ void gradients(float (&x)[4]) const {
    if constexpr (std::is_same_v<G, float>) {
      gradient.to_floats(x);
    } else {
      uint32_t halves[4];
      gradient.halves(halves);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = to_float(G{uint16_t(halves[i])});
    }
  }

  template <bool ORDINARY>
  __device__ __forceinline__ static void store(const AdamwCompact& op, const float (&weight)[4],
                                               const float (&average)[4], const float (&square)[4],
                                               const float (&root)[4], const Random8& draws) {
    Moment<FIRST_FP8, false>::template store<ORDINARY>(op.exp_avg, average, root, draws);
    Moment<SECOND_FP8, true>::template store<ORDINARY>(op.exp_avg_sq, square, root, draws);
    Weights<SPLIT>::template store<ORDINARY>(op, weight, draws);
  }
};

template <typename T>
__device__ __forceinline__ void advance(T*& values, int64_t bytes) {
  values = (T*)((const uint8_t*)values + bytes);
}

template <typename G, bool FIRST_FP8, bool SECOND_FP8, bool SPLIT>
__global__ void __launch_bounds__(kThreads) adamw_compact_kernel(const __grid_constant__ AdamwCompact op) {
  if (*op.scalars.found_inf != 0) return;
  const CompactFactors factors =
      compact_factors(op.scalars.constants, *op.scalars.divisor, op.scalars.bias_corrections);
  const uint32_t step = uint32_t(*op.rounding.step), count = uint32_t(op.elements / kStateBlock);
  uint32_t decaying[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    decaying[i] = uint32_t((op.decayed + kStateBlock - 1 - 4 * lane_index() - i) / kStateBlock);

  AdamwCompact at = op;  // its tensors begin with the lane's four elements: to advance pointers is cheaper than indices
  const auto advance_all = [&at](uint32_t blocks, int elements) {
    const int64_t all = int64_t(blocks) * kStateBlock + elements;
    advance(at.master, all * (SPLIT ? 1 : 4));
    advance(at.gradient, all * int64_t(sizeof(G)));
    advance(at.exp_avg.values, all * Moment<FIRST_FP8, false>::bytes_each(at.exp_avg));
    advance(at.exp_avg.scales, blocks);
    advance(at.exp_avg_sq.values, all * Moment<SECOND_FP8, true>::bytes_each(at.exp_avg_sq));
    advance(at.exp_avg_sq.scales, blocks);
    if (SPLIT || at.gather_source != nullptr) advance(at.gather_source, all * 2);
  };
  uint32_t block = uniform_warp_index();
  advance_all(block, 4 * lane_index());
  for (; block < count; block += warp_count()) {
    Block<G, FIRST_FP8, SECOND_FP8, SPLIT> states;
    states.load(at);
    states.step(at, factors, step, block, decaying);
    advance_all(warp_count(), 0);
  }
}

template <bool FIRST_FP8, bool SECOND_FP8, bool SPLIT>
void launch_kernel(const AdamwCompact& op, CUstream_st* stream) {
  with_dtype(op.gradient_dtype, [&](auto dtype) {
    using G = typename decltype(dtype)::type;
    launch<adamw_compact_kernel<G, FIRST_FP8, SECOND_FP8, SPLIT>>(index_of(op.elements / kStateBlock), stream, op);
  });
}

template <bool FIRST_FP8, bool SECOND_FP8>
void launch_split(const AdamwCompact& op, CUstream_st* stream) {
  if (op.split)
    launch_kernel<FIRST_FP8, SECOND_FP8, true>(op, stream);
  else
    launch_kernel<FIRST_FP8, SECOND_FP8, false>(op, stream);
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
