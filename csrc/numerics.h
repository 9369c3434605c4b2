// The arithmetic of one number, of the scale of a block and of a step of AdamW: the same bits on host and device.
//
// fl(.) below is one fp32 rounding to nearest even that keeps subnormal numbers. The compiler must neither contract
// nor approximate operations, so build with
//   nvcc -O3 -std=c++17 --fmad=false                                (never --use_fast_math)
//   g++  -O3 -std=c++17 (or newer) -ffp-contract=off -march=native  (never -ffast-math)
// An fma is written as fmaf where it is intended. -fno-math-errno changes no number, and with it g++ vectorises the
// square root of AdamW, which is then seven times faster.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define ZPP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZPP_HOST_DEVICE inline
#endif

#ifdef __FAST_MATH__
#error "codes must match bit for bit: build without -ffast-math"
#endif

namespace megatron_zpp {

enum class CodeType : int { int8, int4 };

ZPP_HOST_DEVICE constexpr int bits_of_code(CodeType code_type) { return code_type == CodeType::int4 ? 4 : 8; }

// The bits of a 16-bit number. An fp32 number is a float.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

ZPP_HOST_DEVICE uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

ZPP_HOST_DEVICE float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;

// ---- 16-bit formats ----

ZPP_HOST_DEVICE float to_float(float x) { return x; }

ZPP_HOST_DEVICE float to_float(Bf16 x) { return float_of(uint32_t(x.bits) << 16); }

ZPP_HOST_DEVICE float to_float(Fp16 x) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t magnitude = x.bits & 0x7FFFu, sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);  // exact, subnormal numbers included
  return float_of(sign | (magnitude < 0x7C00u ? finite : finite | kInfinityBits));
#endif
}

// Rounds to nearest even. x must not be NaN.
ZPP_HOST_DEVICE uint32_t bf16_bits(float x) {
  const uint32_t bits = bits_of(x);
  return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}

// Converts as IEEE 754 says, rounding to nearest even.
template <typename T>
T narrow(float x);

template <>
ZPP_HOST_DEVICE float narrow<float>(float x) {
  return x;
}

template <>
ZPP_HOST_DEVICE Bf16 narrow<Bf16>(float x) {
#ifdef __CUDA_ARCH__
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const bool is_nan = (bits_of(x) & ~kSignBit) > kInfinityBits;
  return {uint16_t(is_nan ? 0x7FC0u : bf16_bits(x))};
#endif
}

template <>
ZPP_HOST_DEVICE Fp16 narrow<Fp16>(float x) {
#ifdef __CUDA_ARCH__
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const uint32_t magnitude = bits_of(x) & ~kSignBit, sign = bits_of(x) >> 16 & 0x8000u;
  // Below 2^-14 fp16 has steps of 2^-24, which is also the fp32 spacing from 0.5 to 1: adding 0.5 rounds to a step.
  const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1)) >> 13;
  const uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const uint32_t large = magnitude > kInfinityBits ? 0x7E00u : 0x7C00u;
  return {uint16_t(sign | (magnitude < 0x477FF000u ? finite : large))};
#endif
}

// Converts as `narrow` does, except that finite numbers beyond the range of fp16 become +-65504.
template <typename T>
ZPP_HOST_DEVICE T saturate(float x) {
  return narrow<T>(x);
}

template <>
ZPP_HOST_DEVICE Fp16 saturate<Fp16>(float x) {
  const uint32_t magnitude = bits_of(x) & ~kSignBit;
  const uint32_t limit = 0x477FE000u;  // 65504
  const bool too_large = magnitude > limit && magnitude < kInfinityBits;
  return narrow<Fp16>(too_large ? float_of((bits_of(x) & kSignBit) | limit) : x);
}

// ---- the scale of a block ----

// Keys order numbers by magnitude, the positive one of two equal magnitudes first, with infinity and NaN above all
// finite numbers. The largest key of a block is therefore its signed peak, found by an integer maximum.
constexpr uint32_t kFirstNonFiniteKey = kInfinityBits << 1;

ZPP_HOST_DEVICE uint32_t peak_key(float x) {
  const uint32_t bits = bits_of(x);
  return ((bits << 1) | (bits >> 31)) ^ 1;
}

ZPP_HOST_DEVICE float peak_of_key(uint32_t key) { return float_of((key >> 1) | ((key & 1) ? 0 : kSignBit)); }

// The scale of a block over its signed peak. Integer codes use the whole two's complement range: the peak gets the
// code -2^(bits-1), so the scale has the opposite sign, and a number near minus the peak is clipped by one code. The
// factors are powers of two, so the product is exact; the scale is then rounded to bf16, which rounds the decoded peak
// too.
ZPP_HOST_DEVICE constexpr float scale_factor(CodeType code_type) {
  return code_type == CodeType::int8 ? -0x1p-7f : -0x1p-3f;
}

struct BlockScale {
  float stored;        // in the message
  float inverse;       // fl(1 / stored)
  uint32_t code_mask;  // all ones; zero if all codes are 0, because the block is zero, subnormal or not finite
};

ZPP_HOST_DEVICE BlockScale block_scale(uint32_t key, float factor) {
  const float scale = float_of(bf16_bits(peak_of_key(key) * factor) << 16);
  const bool finite = key < kFirstNonFiniteKey;
  const bool usable = finite && (bits_of(scale) & ~kSignBit) >= 0x00800000u;  // 2^-126
  const float stored = usable ? scale : finite ? 0.f : float_of(kNanBits);
  return {stored, 1.f / (usable ? scale : 1.f), usable ? ~0u : 0u};
}

// ---- encoding ----

// The sum of this and a number below 2^22 has the nearest integer (ties to even) in its low bits, in two's complement.
constexpr float kRound = 0x1.8p23f;

// ---- random numbers ----

// Philox4x32-7 (Salmon et al. 2011). Seven rounds pass all of BigCrush; the paper's default of ten is a safety margin.
constexpr int kPhiloxRounds = 7;

struct Random8 {
  uint32_t word[4];
};

// The key of each round, computed from the seed once for all elements.
struct PhiloxKeys {
  uint32_t low[kPhiloxRounds], high[kPhiloxRounds];
};

inline PhiloxKeys philox_keys(uint64_t seed) {
  PhiloxKeys keys;
  for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
    keys.low[round] = uint32_t(seed) + round * 0x9E3779B9u;
    keys.high[round] = uint32_t(seed >> 32) + round * 0xBB67AE85u;
  }
  return keys;
}

struct Product {
  uint32_t low, high;
};

ZPP_HOST_DEVICE Product product_of(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;  // from a * b the compiler would make two multiplications, or add zeros
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
#else
  const uint64_t product = uint64_t(a) * b;
#endif
  return {uint32_t(product), uint32_t(product >> 32)};
}

ZPP_HOST_DEVICE Random8 philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, const PhiloxKeys& keys) {
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Product first = product_of(c0, 0xD2511F53u), second = product_of(c2, 0xCD9E8D57u);
    c0 = second.high ^ c1 ^ keys.low[round];
    c1 = second.low;
    c2 = first.high ^ c3 ^ keys.high[round];
    c3 = first.low;
  }
  return {{c0, c1, c2, c3}};
}

// ---- AdamW ----

// The scalars that the host knows, each rounded once from double.
struct AdamwConstants {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps;
  float learning_rate;
  float decay;  // learning_rate * weight_decay
};

// The scalars of a step that depend on the device's.
struct AdamwFactors {
  float inverse_divisor;  // fl(1 / divisor)
  float rate;             // fl(learning_rate / bias correction 1)
  float root2;            // fl(sqrt(bias correction 2))
};

ZPP_HOST_DEVICE AdamwFactors adamw_factors(const AdamwConstants& c, float divisor, const float* bias_corrections) {
  return {1.f / divisor, c.learning_rate / bias_corrections[0], sqrtf(bias_corrections[1])};
}

struct AdamwState {
  float weight, average, average_square;
};

// Decoupled Weight Decay Regularization (1711.05101), algorithm 2. Every operation is one rounding.
ZPP_HOST_DEVICE AdamwState adamw_step(AdamwState s, float gradient, bool decays, const AdamwConstants& c,
                                      const AdamwFactors& k) {
  const float g = gradient * k.inverse_divisor;
  const float decayed = s.weight - c.decay * s.weight;
  const float weight = decays ? decayed : s.weight;
  const float average = c.beta1 * s.average + c.one_minus_beta1 * g;
  const float average_square = c.beta2 * s.average_square + c.one_minus_beta2 * (g * g);
  const float denominator = sqrtf(average_square) / k.root2 + c.eps;
  return {weight - k.rate * (average / denominator), average, average_square};
}

}  // namespace megatron_zpp
