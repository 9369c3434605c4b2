// The forms in which the states of AdamW take fewer bytes than fp32, and the rounding to them.
//
// Blocks of 128 elements share a scale, a power of two, so that it loses nothing. `Grid` says which multiples of it
// there are: floating-point numbers whose largest exponent is that of the block's peak.
//
//   form  first moment                            second moment
//   bf16  bf16, no scale                          bf16, no scale
//   fp16  fp16, scaled                            its root in fp16, scaled
//   fp8   sign, 4 bits of exponent, 3 of mantissa its root: 4 bits of exponent, 4 of mantissa
//
// Range. A block holds numbers down to 2^-17 (fp8) or 2^-39 (fp16) of its peak, roots down to 2^-18 or 2^-39: smaller
// ones round to 0 or to the smallest, a second moment above 0 never to 0, since the root divides. A block of smaller
// peaks than `SMALLEST` allows has the scale of that peak, so all decoded numbers and their squares are exact in fp32.
// Infinities become the largest number of the grid. A NaN makes its block NaN, by the scale 255.
//
// A form rounds up with a probability of the distance from the number below, so that small changes are kept on average.
// A number of the form stays as it is, and so does the exponent of a peak: decoding and encoding again changes no bit.
#pragma once

#include "numerics.h"

namespace megatron_zpp {

enum class StateForm : int { fp32, bf16, fp16, fp8 };

constexpr int kStateBlock = 128;
constexpr uint32_t kNanScale = 255;

// The random bits of one element: 12 for each moment, 8 for the weight.
struct Draw {
  uint32_t word;

  ZPP_HOST_DEVICE uint32_t first() const { return word & 0xFFFu; }
  ZPP_HOST_DEVICE uint32_t second() const { return word >> 12 & 0xFFFu; }
  ZPP_HOST_DEVICE uint32_t weight() const { return word >> 24; }
};

// What random bits depend on: elements are counted within their unit, so it does not matter which rank has them.
struct Rounding {
  PhiloxKeys keys;
  uint32_t unit;
  uint64_t first;     // number of the first block
  const float* step;  // on the device of the states
};

// The number, within the unit, of the four elements from 4 * `quad` of a block of the states on.
ZPP_HOST_DEVICE uint64_t quad_of(const Rounding& rounding, uint32_t block, uint32_t quad) {
  return (rounding.first + block) * (kStateBlock / 4) + quad;
}

// The draws of four elements.
ZPP_HOST_DEVICE Random8 draws_of(const Rounding& rounding, uint32_t step, uint64_t quad) {
  return philox(uint32_t(quad), uint32_t(quad >> 32), rounding.unit, step, rounding.keys);
}

// Adds a random share of the `DROPPED` low bits, of which 12 bits are drawn. The share is never all of it, and for bits
// that are 0 it changes no other bits.
template <int DROPPED>
ZPP_HOST_DEVICE uint32_t raised_bits(uint32_t bits, uint32_t draw) {
  return bits + ((2 * draw + 1) << (DROPPED - 13));
}

template <int DROPPED>
ZPP_HOST_DEVICE uint32_t rounded_bits(uint32_t bits, uint32_t draw) {
  return raised_bits<DROPPED>(bits, draw) >> DROPPED;
}

ZPP_HOST_DEVICE uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
ZPP_HOST_DEVICE uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Floating-point numbers from 0 on, subnormal ones included, with exponents up to TOP, times the scale of a block.
// SMALLEST and LARGEST: exponents of peaks, in fp32's bits, beyond which the scale stays the same.
template <int EXPONENT, int MANTISSA, int TOP, int SMALLEST, int LARGEST>
struct Grid {
  static constexpr int kBias = (1 << (EXPONENT - 1)) - 1;
  static constexpr uint32_t kLargest = (uint32_t(TOP + 1) << MANTISSA) - 1;
  static constexpr int kDropped = 23 - MANTISSA;
  static constexpr uint32_t kLeastPeak = uint32_t(SMALLEST) << 23;
  static constexpr float kUnit = EXPONENT == 4 ? 0x1p120f : 0x1p112f;  // fp32's exponents over the grid's
  static_assert(EXPONENT == 4 || EXPONENT == 5, "2^(127 - bias)");

  // The scale, as its exponent + 127, of a block whose largest magnitude has these bits.
  ZPP_HOST_DEVICE static uint32_t scale_of(uint32_t peak_bits) {
    const uint32_t exponent = least(most(peak_bits >> 23, SMALLEST), LARGEST);
    return peak_bits > kInfinityBits ? kNanScale : exponent - (TOP - kBias);
  }

  // The same of a peak from kLeastPeak on and below 2^15.
  ZPP_HOST_DEVICE static uint32_t scale_of_ordinary(uint32_t peak_bits) { return (peak_bits >> 23) - (TOP - kBias); }

  // The code of y, a magnitude over the scale; the largest one of infinity and NaN.
  ZPP_HOST_DEVICE static uint32_t code_of(float y, uint32_t draw) {
    // Then fp32's exponents are the grid's, and fp32's subnormal numbers are the grid's with more bits.
    const float z = y * float_of(uint32_t(kBias) << 23);
    return least(rounded_bits<kDropped>(bits_of(z), draw), kLargest);
  }
};

ZPP_HOST_DEVICE float scale_value(uint32_t stored) {
  return float_of(stored == kNanScale ? kNanBits : stored << 23);
}

// 1 / scale, and a mask that makes the codes of a NaN 0.
struct Inverse {
  float factor;
  uint32_t mask;

  ZPP_HOST_DEVICE explicit Inverse(uint32_t stored)
      : factor(float_of((254 - stored) << 23)), mask(stored == kNanScale ? 0 : ~0u) {}
};

// ---- the first moment ----

template <typename G>
struct ScaledFirst {
  using Grid = G;

  ZPP_HOST_DEVICE static uint32_t peak_bits(float average) { return bits_of(average) & ~kSignBit; }

  // A code of `BITS`, the first of which is the sign.
  template <int BITS>
  ZPP_HOST_DEVICE static uint32_t encode(float average, const Inverse& inverse, uint32_t draw) {
    const uint32_t code = G::code_of(fabsf(average) * inverse.factor, draw);
    return (code | (bits_of(average) >> (32 - BITS) & 1u << (BITS - 1))) & inverse.mask;
  }

  // The code is in the upper `BITS` of the word, and lower bits do not matter.
  template <int BITS>
  ZPP_HOST_DEVICE static float decode(uint32_t word, float scale) {
    constexpr int below_sign = 8 - (BITS - 1 - (23 - G::kDropped));  // the bits of fp32's exponent that are 0
    constexpr uint32_t mask = kSignBit | ((1u << (BITS - 1)) - 1) << G::kDropped;
    return float_of(uint32_t(int32_t(word) >> below_sign) & mask) * G::kUnit * scale;
  }
};

// ---- the second moment ----

template <typename G>
struct ScaledSecond {
  using Grid = G;

  // What the grid holds.
  ZPP_HOST_DEVICE static float root_of(float average_square) { return sqrtf(average_square); }

  ZPP_HOST_DEVICE static uint32_t peak_bits(float root) { return bits_of(root) & ~kSignBit; }

  ZPP_HOST_DEVICE static uint32_t encode(float root, const Inverse& inverse, uint32_t draw) {
    const uint32_t code = G::code_of(fabsf(root) * inverse.factor, draw);
    return most(code, least(peak_bits(root), 1)) & inverse.mask;
  }

  ZPP_HOST_DEVICE static float decode(uint32_t code, float scale) {
    const float root = float_of(code << G::kDropped) * G::kUnit * scale;
    return root * root;
  }
};

using FirstFp8 = ScaledFirst<Grid<4, 3, 15, 32, 254>>;
using FirstFp16 = ScaledFirst<Grid<5, 10, 30, 32, 254>>;
using SecondFp8 = ScaledSecond<Grid<4, 4, 15, 84, 190>>;
using SecondFp16 = ScaledSecond<Grid<5, 10, 30, 104, 190>>;

// ---- bf16 ----

ZPP_HOST_DEVICE uint32_t rounded_bf16(float x, uint32_t draw) {
  const uint32_t magnitude = bits_of(x) & ~kSignBit;
  const uint32_t rounded = rounded_bits<16>(magnitude, draw);
  const uint32_t finite = least(rounded, 0x7F7Fu);
  const uint32_t result = magnitude < kInfinityBits ? finite : magnitude == kInfinityBits ? 0x7F80u : 0x7FC0u;
  return result | (bits_of(x) >> 31 << 15);
}

// ---- the step ----

// The factors of a step whose states are rounded anyway: one division per element, not two.
struct CompactFactors {
  float inverse_divisor;  // fl(1 / divisor)
  float rate;             // fl(fl(learning_rate / bias correction 1) * root2), root2 = fl(sqrt(bias correction 2))
  float eps;              // fl(eps * root2)
};

ZPP_HOST_DEVICE CompactFactors compact_factors(const AdamwConstants& c, float divisor, const float* bias_corrections) {
  const AdamwFactors k = adamw_factors(c, divisor, bias_corrections);
  return {k.inverse_divisor, k.rate * k.root2, c.eps * k.root2};
}

// adamw_step with the bias correction of the second moment in the factors: the new moments, and the weight before the
// update. `kept` are the weight and what is kept of the moments: beta * moment.
ZPP_HOST_DEVICE AdamwState compact_moments(AdamwState kept, float gradient, bool decays, const AdamwConstants& c,
                                           const CompactFactors& k) {
  const float g = gradient * k.inverse_divisor;
  const float decayed = kept.weight - c.decay * kept.weight;
  return {decays ? decayed : kept.weight, kept.average + c.one_minus_beta1 * g,
          kept.average_square + c.one_minus_beta2 * (g * g)};
}

// The new weight; `root` is that of the second moment.
ZPP_HOST_DEVICE float compact_weight(const AdamwState& s, float root, const CompactFactors& k) {
  return s.weight - k.rate * (s.average / (root + k.eps));
}

// ---- weights: bf16 and a byte ----

// The upper 24 bits of an fp32 number: bf16, rounded to nearest and in ties away from 0, and the byte behind it, which
// is of the next larger bf16 number if its first bit is set.
struct SplitWeight {
  uint32_t bf16, correction;
};

ZPP_HOST_DEVICE SplitWeight split_weight(float weight, uint32_t draw) {
  const bool is_nan = (bits_of(weight) & ~kSignBit) > kInfinityBits;
  const uint32_t rounded = is_nan ? kNanBits : bits_of(weight) + draw;
  return {(rounded + 0x8000u) >> 16, rounded >> 8 & 0xFFu};
}

ZPP_HOST_DEVICE float joined_weight(SplitWeight split) {
  return float_of((split.bf16 << 16) + uint32_t(int8_t(split.correction)) * 256);
}

}  // namespace megatron_zpp
