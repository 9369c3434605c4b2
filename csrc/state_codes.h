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
  uint64_t first;     // number of the first element, a multiple of 128
  const float* step;  // on the device of the states
};

// The draws of the elements from 4 * `quad` of the states on.
ZPP_HOST_DEVICE Random8 draws_of(const Rounding& rounding, uint32_t step, uint64_t quad) {
  const uint64_t counter = rounding.first / 4 + quad;
  return philox(uint32_t(counter), uint32_t(counter >> 32), rounding.unit, step, rounding.keys);
}

// Adds a random share of the `DROPPED` low bits, of which 12 bits are drawn, and drops these bits. The share is never
// all of it, and for bits that are 0 it changes nothing.
template <int DROPPED>
ZPP_HOST_DEVICE uint32_t rounded_bits(uint32_t bits, uint32_t draw) {
  return (bits + ((2 * draw + 1) << (DROPPED - 13))) >> DROPPED;
}

ZPP_HOST_DEVICE uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
ZPP_HOST_DEVICE uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Floating-point numbers from 0 on, subnormal ones included, with exponents up to TOP, times the scale of a block.
// SMALLEST: the exponent of a peak, in fp32's bits, below which the scale stays the same.
template <int EXPONENT, int MANTISSA, int TOP, int SMALLEST>
struct Grid {
  static constexpr int kBias = (1 << (EXPONENT - 1)) - 1;
  static constexpr uint32_t kLargest = (uint32_t(TOP + 1) << MANTISSA) - 1;
  static constexpr int kDropped = 23 - MANTISSA;

  // The scale, as its exponent + 127, of a block whose largest magnitude has these bits.
  ZPP_HOST_DEVICE static uint32_t scale_of(uint32_t peak_bits) {
    const uint32_t exponent = least(most(peak_bits >> 23, SMALLEST), 254);
    return peak_bits > kInfinityBits ? kNanScale : exponent - (TOP - kBias);
  }

  // The code of y, a finite magnitude over the scale.
  ZPP_HOST_DEVICE static uint32_t code_of(float y, uint32_t draw) {
    constexpr uint32_t first_normal = uint32_t(128 - kBias) << 23;  // the bits of 2^(1 - bias)
    constexpr float steps = float(1 << (kBias - 1 + MANTISSA));     // of subnormal numbers in 1
    const uint32_t normal = rounded_bits<kDropped>(bits_of(y), draw) - (uint32_t(127 - kBias) << MANTISSA);
    const bool is_subnormal = bits_of(y) < first_normal;
    const float small = (is_subnormal ? y : 0.f) * steps + float(2 * draw + 1) * 0x1p-13f;
    return least(is_subnormal ? uint32_t(small) : normal, kLargest);
  }

  ZPP_HOST_DEVICE static float value_of(uint32_t code) {
    return float_of(code << kDropped) * float_of(uint32_t(254 - kBias) << 23);
  }
};

ZPP_HOST_DEVICE float scale_value(uint32_t stored) {
  return float_of(stored == kNanScale ? kNanBits : stored << 23);
}

// 1 / scale; 0 for NaN, whose codes are 0.
ZPP_HOST_DEVICE float inverse_scale(uint32_t stored) { return stored == kNanScale ? 0.f : float_of((254 - stored) << 23); }

// ---- the first moment ----

template <typename G>
struct ScaledFirst {
  using Grid = G;

  ZPP_HOST_DEVICE static uint32_t peak_bits(float average) { return bits_of(average) & ~kSignBit; }

  // A code with the sign at bit `SIGN`.
  template <int SIGN>
  ZPP_HOST_DEVICE static uint32_t encode(float average, uint32_t stored, uint32_t draw) {
    const uint32_t magnitude = least(peak_bits(average), kInfinityBits - 1);
    const uint32_t code = G::code_of(float_of(magnitude) * inverse_scale(stored), draw);
    return stored == kNanScale ? 0 : code | (bits_of(average) >> 31 << SIGN);
  }

  template <int SIGN>
  ZPP_HOST_DEVICE static float decode(uint32_t code, uint32_t stored) {
    const float magnitude = G::value_of(code & ((1u << SIGN) - 1)) * scale_value(stored);
    return float_of(bits_of(magnitude) | (code >> SIGN << 31));
  }
};

// ---- the second moment ----

template <typename G>
struct ScaledSecond {
  using Grid = G;

  // The root of the moment, which the grid holds; of infinity that of the largest number.
  ZPP_HOST_DEVICE static float root_of(float average_square) {
    const float root = sqrtf(average_square);
    return bits_of(root) == kInfinityBits ? float_of(0x5F7FFFFFu) : root;
  }

  ZPP_HOST_DEVICE static uint32_t peak_bits(float root) { return bits_of(root) & ~kSignBit; }

  ZPP_HOST_DEVICE static uint32_t encode(float root, uint32_t stored, uint32_t draw) {
    const uint32_t code = G::code_of(float_of(peak_bits(root)) * inverse_scale(stored), draw);
    return stored == kNanScale ? 0 : most(code, root > 0.f ? 1 : 0);
  }

  ZPP_HOST_DEVICE static float decode(uint32_t code, uint32_t stored) {
    const float root = G::value_of(code) * scale_value(stored);
    return root * root;
  }
};

using FirstFp8 = ScaledFirst<Grid<4, 3, 15, 32>>;
using FirstFp16 = ScaledFirst<Grid<5, 10, 30, 32>>;
using SecondFp8 = ScaledSecond<Grid<4, 4, 15, 84>>;
using SecondFp16 = ScaledSecond<Grid<5, 10, 30, 104>>;

// ---- bf16 ----

ZPP_HOST_DEVICE uint32_t rounded_bf16(float x, uint32_t draw) {
  const uint32_t magnitude = bits_of(x) & ~kSignBit;
  const uint32_t rounded = rounded_bits<16>(magnitude, draw);
  const uint32_t finite = least(rounded, 0x7F7Fu);
  const uint32_t result = magnitude < kInfinityBits ? finite : magnitude == kInfinityBits ? 0x7F80u : 0x7FC0u;
  return result | (bits_of(x) >> 31 << 15);
}

// ---- weights: bf16 and a byte ----

// The upper 24 bits of an fp32 number: bf16, rounded to nearest and in ties away from 0, and the byte behind it, which
// is of the next larger bf16 number if its first bit is set.
struct SplitWeight {
  uint32_t bf16, correction;
};

ZPP_HOST_DEVICE SplitWeight split_weight(float weight, uint32_t draw) {
  const bool is_nan = (bits_of(weight) & ~kSignBit) > kInfinityBits;
  const uint32_t upper = is_nan ? kNanBits >> 8 : (bits_of(weight) + draw) >> 8;
  return {(upper + 0x80u) >> 8, upper & 0xFFu};
}

ZPP_HOST_DEVICE float joined_weight(SplitWeight split) {
  return float_of(((split.bf16 - (split.correction >> 7)) << 16) | split.correction << 8);
}

}  // namespace megatron_zpp
