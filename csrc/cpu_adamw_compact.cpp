// adamw_compact on the CPU.
#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu_blocks.h"
#include "dispatch.h"

namespace megatron_zpp::cpu {

namespace {

constexpr int kBlock = kStateBlock;

// ---- moments ----

template <typename Scaled, typename Code>
struct FirstCodes {
  static constexpr int kBits = 8 * sizeof(Code);

  static void load(const StateTensor& state, int64_t block, float* x) {
    const Code* codes = static_cast<const Code*>(state.values) + block * kBlock;
    const float scale = scale_value(state.scales[block]);
    for (int i = 0; i < kBlock; ++i) x[i] = Scaled::template decode<kBits>(uint32_t(codes[i]) << (32 - kBits), scale);
  }

  static void store(const StateTensor& state, int64_t block, const float* x, const uint32_t* draws) {
    uint32_t peak = 0;
    for (int i = 0; i < kBlock; ++i) peak = most(peak, Scaled::peak_bits(x[i]));
    const uint32_t stored = Scaled::Grid::scale_of(peak);
    const Inverse inverse(stored);
    Code* codes = static_cast<Code*>(state.values) + block * kBlock;
    for (int i = 0; i < kBlock; ++i)
      codes[i] = Code(Scaled::template encode<kBits>(x[i], inverse, Draw{draws[i]}.first()));
    state.scales[block] = uint8_t(stored);
  }
};

template <typename Scaled, typename Code>
struct SecondCodes {
  static void load(const StateTensor& state, int64_t block, float* x) {
    const Code* codes = static_cast<const Code*>(state.values) + block * kBlock;
    const float scale = scale_value(state.scales[block]);
    for (int i = 0; i < kBlock; ++i) x[i] = Scaled::decode(codes[i], scale);
  }

  static void store(const StateTensor& state, int64_t block, const float* x, const uint32_t* draws) {
    float roots[kBlock];
    uint32_t peak = 0;
    for (int i = 0; i < kBlock; ++i) {
      roots[i] = Scaled::root_of(x[i]);
      peak = most(peak, Scaled::peak_bits(roots[i]));
    }
    const uint32_t stored = Scaled::Grid::scale_of(peak);
    const Inverse inverse(stored);
    Code* codes = static_cast<Code*>(state.values) + block * kBlock;
    for (int i = 0; i < kBlock; ++i) codes[i] = Code(Scaled::encode(roots[i], inverse, Draw{draws[i]}.second()));
    state.scales[block] = uint8_t(stored);
  }
};

// Either moment, in a form without scales.
template <bool SECOND>
struct Unscaled {
  static void load(const StateTensor& state, int64_t block, float* x) {
    if (state.form == StateForm::fp32)
      cpu::load(static_cast<const float*>(state.values) + block * kBlock, x, kBlock);
    else
      cpu::load(static_cast<const Bf16*>(state.values) + block * kBlock, x, kBlock);
  }

  static void store(const StateTensor& state, int64_t block, const float* x, const uint32_t* draws) {
    if (state.form == StateForm::fp32)
      return cpu::store(x, static_cast<float*>(state.values) + block * kBlock, kBlock);
    uint16_t* values = static_cast<uint16_t*>(state.values) + block * kBlock;
    for (int i = 0; i < kBlock; ++i) {
      const Draw draw{draws[i]};
      values[i] = uint16_t(rounded_bf16(x[i], SECOND ? draw.second() : draw.first()));
    }
  }
};

// Calls run(moment) with what loads and stores this form.
template <typename Run>
void with_first(StateForm form, Run&& run) {
  switch (form) {
    case StateForm::fp16: return run(FirstCodes<FirstFp16, uint16_t>());
    case StateForm::fp8: return run(FirstCodes<FirstFp8, uint8_t>());
    default: return run(Unscaled<false>());
  }
}

template <typename Run>
void with_second(StateForm form, Run&& run) {
  switch (form) {
    case StateForm::fp16: return run(SecondCodes<SecondFp16, uint16_t>());
    case StateForm::fp8: return run(SecondCodes<SecondFp8, uint8_t>());
    default: return run(Unscaled<true>());
  }
}

// ---- weights ----

void load_weights(const AdamwCompact& op, int64_t start, float* weights) {
  if (!op.split) return load(static_cast<const float*>(op.master) + start, weights, kBlock);
  const uint16_t* upper = static_cast<const uint16_t*>(op.gather_source) + start;
  const uint8_t* corrections = static_cast<const uint8_t*>(op.master) + start;
  for (int i = 0; i < kBlock; ++i) weights[i] = joined_weight({upper[i], corrections[i]});
}

void store_weights(const AdamwCompact& op, int64_t start, const float* weights, const uint32_t* draws) {
  if (op.split) {
    uint16_t* upper = static_cast<uint16_t*>(op.gather_source) + start;
    uint8_t* corrections = static_cast<uint8_t*>(op.master) + start;
    for (int i = 0; i < kBlock; ++i) {
      const SplitWeight split = split_weight(weights[i], Draw{draws[i]}.weight());
      upper[i] = uint16_t(split.bf16);
      corrections[i] = uint8_t(split.correction);
    }
    return;
  }
  store(weights, static_cast<float*>(op.master) + start, kBlock);
  if (op.gather_source == nullptr) return;
  with_dtype(op.gather_source_dtype, [&](auto dtype) {
    auto* target = static_cast<typename decltype(dtype)::type*>(op.gather_source) + start;
    for (int i = 0; i < kBlock; ++i) target[i] = narrow<typename decltype(dtype)::type>(weights[i]);
  });
}

template <typename First, typename Second, typename G>
void step_blocks(const AdamwCompact& op, const CompactFactors& factors, uint32_t step, int64_t begin, int64_t end) {
  float weights[kBlock], averages[kBlock], squares[kBlock];
  uint32_t draws[kBlock];
  const AdamwConstants constants = op.scalars.constants;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t start = block * kBlock;
    const G* gradient = static_cast<const G*>(op.gradient) + start;
    First::load(op.exp_avg, block, averages);
    Second::load(op.exp_avg_sq, block, squares);
    load_weights(op, start, weights);
    for (int i = 0; i < kBlock; i += 4) {
      const Random8 drawn = draws_of(op.rounding, step, quad_of(op.rounding, uint32_t(block), uint32_t(i / 4)));
      std::copy_n(drawn.word, 4, draws + i);
    }
    for (int i = 0; i < kBlock; ++i) {
      const AdamwState kept = {weights[i], constants.beta1 * averages[i], constants.beta2 * squares[i]};
      const AdamwState after =
          compact_moments(kept, to_float(gradient[i]), start + i < op.decayed, constants, factors);
      weights[i] = compact_weight(after, sqrtf(after.average_square), factors);
      averages[i] = after.average;
      squares[i] = after.average_square;
    }
    First::store(op.exp_avg, block, averages, draws);
    Second::store(op.exp_avg_sq, block, squares, draws);
    store_weights(op, start, weights, draws);
  }
}

}  // namespace

void run(const AdamwCompact& op) {
  if (*op.scalars.found_inf != 0) return;
  const CompactFactors factors =
      compact_factors(op.scalars.constants, *op.scalars.divisor, op.scalars.bias_corrections);
  const uint32_t step = uint32_t(*op.rounding.step);
  with_first(op.exp_avg.form, [&](auto first) {
    with_second(op.exp_avg_sq.form, [&](auto second) {
      with_dtype(op.gradient_dtype, [&](auto dtype) {
        at::parallel_for(0, op.elements / kBlock, kGrainElements / kBlock, [&](int64_t begin, int64_t end) {
          step_blocks<decltype(first), decltype(second), typename decltype(dtype)::type>(op, factors, step, begin, end);
        });
      });
    });
  });
}

}  // namespace megatron_zpp::cpu
