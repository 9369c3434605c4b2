// adamw_compact on a GPU: a warp steps a block of states, four neighbouring elements per lane.
//
// Memory limits the rate, if instructions are few. So ordinary blocks, which almost all are, take a path without special
// cases; the others are loaded again and take that of state_codes.h. Both give the same bits. Meanwhile a warp's next
// blocks are on their way to shared memory, because registers cannot hold as many bytes as hide the memory's latency.
#include "device.cuh"

namespace megatron_zpp::cuda {

namespace {

// New first moments of ordinary blocks and roots of second ones are from the least on and below the limit; weights are
// finite. Root and quotient_of are then exact, and 1 / scale in the grid's exponents is not subnormal.
constexpr float kLeastOrdinary = 0x1p-50f, kOrdinaryLimit = 0x1p15f;

// So many warps walk through memory side by side, each from a block to the one so many blocks behind it: what they all
// access at once lies close together. As a constant, the distance is part of the instructions that access memory.
constexpr uint32_t kFront = 1024;

// A warp steps so many blocks at most, because each of its lanes holds the scales of one.
constexpr uint32_t kBlocksPerWarp = kWarp;

// The blocks of a warp that are on their way. Where a multiprocessor of an H200 has 32 warps, three fp8 blocks of each
// are 86 KB, which it reads in 4.6 us at the rate of a copy; a load may take half of that. More blocks of fp32 do not
// fit in the 48 KiB of shared memory that need no opt-in.
constexpr int kStages = 3;

// Four numbers as they are in memory: 4 to 16 bytes.
struct Quad {
  uint4 words;

  // The size is the same for all threads, so these branches cost little.
  __device__ __forceinline__ void load(const void* values, int bytes_each) {
    if (bytes_each == 4) {
      words = load_vector<uint4>(values);
    } else if (bytes_each == 2) {
      const uint2 two = load_vector<uint2>(values);
      words.x = two.x;
      words.y = two.y;
    } else {
      words.x = load_vector<uint32_t>(values);
    }
  }

  // Begins to copy four numbers to shared memory.
  __device__ __forceinline__ static void copy(void* shared, const void* values, int bytes_each) {
    if (bytes_each == 4)
      copy_bytes<16>(shared, values);
    else if (bytes_each == 2)
      copy_bytes<8>(shared, values);
    else
      copy_bytes<4>(shared, values);
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

__device__ __forceinline__ void store_halves(void* values, const uint32_t (&x)[4]) {
  *static_cast<uint2*>(values) = {x[0] | x[1] << 16, x[2] | x[3] << 16};
}

__device__ __forceinline__ void store_bytes(void* values, const uint32_t (&x)[4]) {
  *static_cast<uint32_t*>(values) = x[0] | x[1] << 8 | x[2] << 16 | x[3] << 24;
}

__device__ __forceinline__ void store_floats(void* values, const float (&x)[4]) {
  *static_cast<float4*>(values) = {x[0], x[1], x[2], x[3]};
}

__device__ __forceinline__ uint32_t upper_halves(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x7632);
}

__device__ __forceinline__ uint32_t lower_halves(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x5410);
}

// NaN if one of them is.
__device__ __forceinline__ float larger_magnitude(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(x)), "f"(fabsf(y)));
  return larger;
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
    uint32_t share;  // the draw, then a half
    if constexpr (SECOND)
      asm("lop3.b32 %0, %1, 0x00FFF000, 0x800, 0xEA;" : "=r"(share) : "r"(draws.word[i]));
    else
      asm("mad.lo.u32 %0, %1, 0x100000, 0x80000;" : "=r"(share) : "r"(draws.word[i]));
    bits[i] = bits_of(x[i] * factor) + (share >> (SECOND ? 24 - dropped : 32 - dropped));
  }
  const uint32_t even = upper_halves(bits[0], bits[2]), odd = upper_halves(bits[1], bits[3]);
  if constexpr (SECOND) {
    const auto clipped = [](uint32_t two) { return __vminu2(__vmaxu2(two, 0x00080008u), 0x07FF07FFu); };
    return __byte_perm(clipped(even) >> 3, clipped(odd) << 5, 0x7250);
  } else {
    const uint32_t codes = __byte_perm(even >> 4, odd << 4, 0x7250);  // 128 instead of 127 at most
    const uint32_t signs = __byte_perm(even, odd, 0x7351) & 0x80808080u;
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
  float factor;     // of the old codes
  uint32_t stored;  // the scale of the new codes

  __device__ __forceinline__ static int bytes_each(const StateTensor& state) {
    return FP8 ? 1 : state.form == StateForm::fp32 ? 4 : 2;
  }

  // What codes with this scale are multiplied by.
  __device__ __forceinline__ static float factor_of(uint32_t stored, float beta) {
    if constexpr (!FP8) return scale_value(stored);
    const float scale = float_of(stored << 23) * 0x1p8f;  // of NaN infinite, and 0 times that is NaN
    return (SECOND ? scale * scale : scale) * beta;  // exact if beta > 2^-31
  }

  // What a step keeps of the moments: beta times them.
  __device__ __forceinline__ void kept(const StateTensor& state, float beta, float (&x)[4]) const {
    if constexpr (FP8) {
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
          x[i] = decode(halves[i], factor);
        x[i] *= beta;
      }
    }
  }

  // The bits of the largest magnitude, but not below kLeastPeak. Those of NaN are larger than all others.
  __device__ __forceinline__ static uint32_t peak_of(const float (&x)[4]) {
    const float low = larger_magnitude(x[0], x[1]), high = larger_magnitude(x[2], x[3]);
    return __vimax3_u32(bits_of(low), bits_of(high), Scaled::Grid::kLeastPeak);
  }

  // Stores codes, and keeps the new scale. `root` is that of the second moment. All lanes must call this.
  template <bool ORDINARY>
  __device__ __forceinline__ void store(const StateTensor& state, const float (&x)[4], const float (&root)[4],
                                        const Random8& draws) {
    uint32_t codes[4];
    if (FP8 || state.form == StateForm::fp16) {
      const float(&held)[4] = SECOND ? root : x;
      const uint32_t peak = largest_of_lanes(peak_of(held), 5);
      stored = ORDINARY ? Scaled::Grid::scale_of_ordinary(peak) : Scaled::Grid::scale_of(peak);
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

  __device__ __forceinline__ void to_floats(float (&x)[4]) const {
    if constexpr (SPLIT) {  // joined_weight
      const uint32_t raised = corrections.words.x ^ 0x80808080u;  // by 128, to be from 0 on
      const uint32_t low = __byte_perm(raised, 0, 0x1404), high = __byte_perm(raised, 0, 0x3424);
      x[0] = float_of(lower_halves(low, raw.words.x) - 0x8000u);
      x[1] = float_of(upper_halves(low, raw.words.x) - 0x8000u);
      x[2] = float_of(lower_halves(high, raw.words.y) - 0x8000u);
      x[3] = float_of(upper_halves(high, raw.words.y) - 0x8000u);
    } else {
      raw.to_floats(x);
    }
  }

  template <bool ORDINARY>
  __device__ __forceinline__ static void store(const AdamwCompact& op, const float (&x)[4], const Random8& draws) {
    uint32_t bits[4], halves[4];
    if constexpr (SPLIT && ORDINARY) {  // split_weight of numbers that are not NaN, packed with fewer instructions
#pragma unroll
      for (int i = 0; i < 4; ++i) bits[i] = bits_of(x[i]) + __funnelshift_l(draws.word[i], 0x80, 8);  // 0x8000 more
      *static_cast<uint2*>(op.gather_source) = {upper_halves(bits[0], bits[1]), upper_halves(bits[2], bits[3])};
      const uint32_t low = __byte_perm(bits[0], bits[1], 0x51), high = __byte_perm(bits[2], bits[3], 0x51);
      *static_cast<uint32_t*>(op.master) = lower_halves(low, high) ^ 0x80808080u;
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

// ---- the step ----

// A lane's four elements before a step: of the moments what the step keeps.
struct Before {
  float gradient[4], weight[4], average[4], square[4];
};

// The same after the step.
struct After {
  float weight[4], average[4], square[4], root[4];
};

// The first `decaying` elements have weight decay. If ORDINARY, the result is right if it is ordinary.
template <bool ORDINARY>
__device__ __forceinline__ After stepped(const Before& before, const AdamwConstants& constants,
                                         const CompactFactors& factors, int64_t decaying) {
  After after;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const AdamwState kept = {before.weight[i], before.average[i], before.square[i]};
    const AdamwState s = compact_moments(kept, before.gradient[i], i < decaying, constants, factors);
    after.average[i] = s.average;
    after.square[i] = s.average_square;
    if constexpr (ORDINARY) {
      after.root[i] = Root(s.average_square).root;
      after.weight[i] = s.weight - factors.rate * quotient_of(s.average, after.root[i] + factors.eps);
    } else {
      after.root[i] = sqrtf(s.average_square);
      after.weight[i] = compact_weight(s, after.root[i], factors);
    }
  }
  return after;
}

// The conversion says that the memory is global. Else the compiler keeps one pointer for copies, another for stores.
template <typename T>
__device__ __forceinline__ void advance(T*& values, int64_t bytes) {
  values = (T*)((const uint8_t*)__cvta_global_to_generic((size_t)values) + bytes);
}

template <typename G, bool FIRST_FP8, bool SECOND_FP8, bool SPLIT>
struct Block {
  using First = Moment<FIRST_FP8, false>;
  using Second = Moment<SECOND_FP8, true>;

  // A block in shared memory: four rows with so many bytes of each lane, so that a lane needs one address for all.
  static constexpr bool kNarrow = FIRST_FP8 && SECOND_FP8 && SPLIT && sizeof(G) == 2;
  static constexpr int kLaneBytes = kNarrow ? 8 : 16, kRow = kWarp * kLaneBytes, kSlot = 4 * kRow;

  First first;
  Second second;
  Weights<SPLIT> weights;
  Quad gradient;

  // `op` with tensors that begin so much later: pointers need fewer instructions than indices.
  __device__ __forceinline__ static AdamwCompact advanced(AdamwCompact op, int64_t blocks, int elements = 0) {
    const int64_t all = blocks * kStateBlock + elements;
    advance(op.master, all * (SPLIT ? 1 : 4));
    advance(op.gradient, all * int64_t(sizeof(G)));
    advance(op.exp_avg.values, all * First::bytes_each(op.exp_avg));
    advance(op.exp_avg_sq.values, all * Second::bytes_each(op.exp_avg_sq));
    if (SPLIT || op.gather_source != nullptr) advance(op.gather_source, all * 2);
    return op;
  }

  // `op` with the tensors of a block in shared memory, where `slot` is the lane's part of the first row.
  __device__ __forceinline__ static AdamwCompact within(uint8_t* slot, AdamwCompact op) {
    op.gradient = slot;
    op.exp_avg.values = slot + kRow;
    op.exp_avg_sq.values = slot + (kNarrow ? kRow + 4 : 2 * kRow);
    if constexpr (SPLIT) op.gather_source = slot + (kNarrow ? 2 : 3) * kRow;
    op.master = slot + 3 * kRow + (SPLIT && !kNarrow ? 8 : 0);
    return op;
  }

  // Begins to copy to shared memory what `load` loads. Each lane copies for itself, so it need not wait for others.
  __device__ __forceinline__ static void copy(uint8_t* slot, const AdamwCompact& at) {
    const AdamwCompact to = within(slot, at);
    Quad::copy(slot, at.gradient, sizeof(G));
    Quad::copy(to.exp_avg.values, at.exp_avg.values, First::bytes_each(at.exp_avg));
    Quad::copy(to.exp_avg_sq.values, at.exp_avg_sq.values, Second::bytes_each(at.exp_avg_sq));
    if constexpr (SPLIT) Quad::copy(to.gather_source, at.gather_source, 2);
    Quad::copy(to.master, at.master, SPLIT ? 1 : 4);
  }

  __device__ __forceinline__ void load(const AdamwCompact& at) {
    gradient.load(at.gradient, sizeof(G));
    first.raw.load(at.exp_avg.values, First::bytes_each(at.exp_avg));
    second.raw.load(at.exp_avg_sq.values, Second::bytes_each(at.exp_avg_sq));
    weights.raw.load(SPLIT ? at.gather_source : at.master, SPLIT ? 2 : 4);
    if constexpr (SPLIT) weights.corrections.load(at.master, 1);
  }

  __device__ __forceinline__ Before to_floats(const AdamwCompact& op) const {
    Before x;
    gradients(x.gradient);
    weights.to_floats(x.weight);
    first.kept(op.exp_avg, op.scalars.constants.beta1, x.average);
    second.kept(op.exp_avg_sq, op.scalars.constants.beta2, x.square);
    return x;
  }

  // Of the lane's elements. Numbers from 0 on have the order of their bits.
  __device__ __forceinline__ static bool is_ordinary(const After& x) {
    const float low = fminf(fabsf(x.average[0]), fabsf(x.average[1]));
    const float high = fminf(fabsf(x.average[2]), fabsf(x.average[3]));
    const uint32_t roots = __vimin3_u32(bits_of(x.root[0]), bits_of(x.root[1]), bits_of(x.root[2]));
    const uint32_t least = min(__vimin3_u32(roots, bits_of(x.root[3]), bits_of(low)), bits_of(high));
    return (least >= bits_of(kLeastOrdinary)) & (First::peak_of(x.average) < bits_of(kOrdinaryLimit)) &
           (Second::peak_of(x.root) < bits_of(kOrdinaryLimit)) &
           (fabsf(x.weight[0] + x.weight[1] + x.weight[2] + x.weight[3]) < INFINITY);
  }

  // Stores all but the scales. All lanes must call this.
  template <bool ORDINARY>
  __device__ __forceinline__ void store(const AdamwCompact& at, const After& x, const Random8& draws) {
    first.template store<ORDINARY>(at.exp_avg, x.average, x.root, draws);
    second.template store<ORDINARY>(at.exp_avg_sq, x.square, x.root, draws);
    Weights<SPLIT>::template store<ORDINARY>(at, x.weight, draws);
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
};

template <typename G, bool FIRST_FP8, bool SECOND_FP8, bool SPLIT>
__global__ void __launch_bounds__(kThreads, FIRST_FP8 && SECOND_FP8 && SPLIT ? 4 : 3)
    adamw_compact_kernel(const __grid_constant__ AdamwCompact op) {
  using States = Block<G, FIRST_FP8, SECOND_FP8, SPLIT>;
  alignas(16) __shared__ uint8_t slots[kThreads / kWarp][kStages * States::kSlot];
  const uint32_t count = uint32_t(op.elements / kStateBlock), warp = uniform_warp_index();
  const uint32_t each = (count + warp_count() - 1) / warp_count() * kFront;
  const uint32_t first = warp / kFront * each + warp % kFront, end = min(count, first + each);
  if (first >= count || *op.scalars.found_inf != 0) return;

  uint8_t* const ring = computed_once(&slots[threadIdx.x / kWarp][lane_index() * States::kLaneBytes]);
  const uint32_t front = blockDim.x * (kFront / kThreads);  // kFront, of which multiples are added in one instruction
  AdamwCompact next = States::advanced(op, first, 4 * lane_index());
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (first + stage * kFront < end) States::copy(ring + stage * States::kSlot, next);
    end_group_of_copies();
    next = States::advanced(next, front);
  }
  // A byte is too little for such a copy. So each lane has the scales of one block: the factors of the old ones, whose
  // place the new ones take.
  const AdamwConstants& constants = op.scalars.constants;
  const uint32_t own = first + (lane_index() - first / kFront) % kWarp * kFront;
  uint32_t held[2] = {};
  if (own < end && op.exp_avg.scales != nullptr)
    held[0] = bits_of(States::First::factor_of(op.exp_avg.scales[own], constants.beta1));
  if (own < end && op.exp_avg_sq.scales != nullptr)
    held[1] = bits_of(States::Second::factor_of(op.exp_avg_sq.scales[own], constants.beta2));

  const CompactFactors factors = compact_factors(constants, *op.scalars.divisor, op.scalars.bias_corrections);
  const uint32_t step = uint32_t(*op.rounding.step), decaying = uint32_t(op.decayed / kStateBlock);

  uint64_t quad = quad_of(op.rounding, first, lane_index());
  uint32_t stage = 0;  // the bytes before the slot of the block
  for (uint32_t block = first; block < end; block += kFront) {
    States states;
    states.first.factor = float_of(__shfl_sync(kAllLanes, held[0], block / kFront));  // of the lane with this remainder
    states.second.factor = float_of(__shfl_sync(kAllLanes, held[1], block / kFront));
    wait_for_all_groups_but<kStages - 1>();
    states.load(States::within(ring + stage, op));
    const Before before = states.to_floats(op);
    if (block + kStages * kFront < end) States::copy(ring + stage, next);
    end_group_of_copies();
    stage = stage == (kStages - 1) * States::kSlot ? 0 : stage + States::kSlot;
    const AdamwCompact at = States::advanced(next, -int64_t(kStages * kFront));
    const After after = stepped<true>(before, constants, factors, block < decaying ? 4 : 0);
    const bool ordinary = States::is_ordinary(after) & (block != decaying);  // which may decay in part
    if (__all_sync(kAllLanes, ordinary)) {
      states.template store<true>(at, after, draws_of(op.rounding, step, quad));
    } else {
      states.load(at);
      const int64_t start = int64_t(block) * kStateBlock + 4 * lane_index();
      const After any = stepped<false>(states.to_floats(op), constants, factors, op.decayed - start);
      states.template store<false>(at, any, draws_of(op.rounding, step, quad));
    }
    if (block == own) {
      held[0] = states.first.stored;
      held[1] = states.second.stored;
    }
    quad += kFront * (kStateBlock / 4);
    next = States::advanced(next, front);
  }
  if (own < end && op.exp_avg.scales != nullptr) op.exp_avg.scales[own] = uint8_t(held[0]);
  if (own < end && op.exp_avg_sq.scales != nullptr) op.exp_avg_sq.scales[own] = uint8_t(held[1]);
}

template <bool FIRST_FP8, bool SECOND_FP8, bool SPLIT>
void launch_kernel(const AdamwCompact& op, CUstream_st* stream) {
  with_dtype(op.gradient_dtype, [&](auto dtype) {
    constexpr auto kernel = adamw_compact_kernel<typename decltype(dtype)::type, FIRST_FP8, SECOND_FP8, SPLIT>;
    const int64_t blocks = index_of(op.elements / kStateBlock), most = kFront * kBlocksPerWarp;
    launch<kernel>((blocks + most - 1) / most * kFront, stream, op, kGridsForAll);
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
