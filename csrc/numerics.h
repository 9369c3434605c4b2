// The arithmetic of one number, one block's scale and one step of AdamW: the same bits on host and device.
//
// fl(.) below is one fp32 rounding, nearest even, subnormal numbers kept. That holds only if nothing is contracted
// or approximated, so build with
//   nvcc -O3 -std=c++17 --fmad=false                              (never --use_fast_math)
//   g++  -O3 -std=c++17 (or newer) -ffp-contract=off -march=native  (never -ffast-math)
// An fma is written out where one is meant. -fno-math-errno changes no number and lets g++ vectorise the square root
// of AdamW, which is then seven times faster.
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

enum class Codes : int { int8, int4, fp8 };

ZPP_HOST_DEVICE constexpr int bits_of_code(Codes codes) { return codes == Codes::int4 ? 4 : 8; }

// The 16-bit formats as they lie in memory; fp32 is float.
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
  const uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);  // exact, also for subnormal numbers
  return float_of(sign | (magnitude < 0x7C00u ? finite : finite | kInfinityBits));
#endif
}

// Nearest even of a number that is not NaN.
ZPP_HOST_DEVICE uint32_t bf16_bits(float x) {
  const uint32_t bits = bits_of(x);
  return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}

// `narrow` is IEEE's conversion, nearest even.
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
  // 2^-24, the step below 2^-14, is the last place of numbers from 0.5 to 1.
  const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1)) >> 13;
  const uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const uint32_t large = magnitude > kInfinityBits ? 0x7E00u : 0x7C00u;
  return {uint16_t(sign | (magnitude < 0x477FF000u ? finite : large))};
#endif
}

// `saturate` is `narrow` where a finite number that fp16 has no room for becomes +-65504.
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

// Keys order numbers by magnitude, + above -, with infinity and NaN above all that is finite. So the largest key of
// a block is its signed peak, and a reduction needs one integer maximum.
constexpr uint32_t kFirstNonFiniteKey = kInfinityBits << 1;

ZPP_HOST_DEVICE uint32_t peak_key(float x) {
  const uint32_t bits = bits_of(x);
  return ((bits << 1) | (bits >> 31)) ^ 1;
}

ZPP_HOST_DEVICE float peak_of_key(uint32_t key) { return float_of((key >> 1) | ((key & 1) ? 0 : kSignBit)); }

// The whole two's complement range is used: the largest magnitude gets the code -2^(bits-1), so the scale has the
// opposite sign, and a number of the other sign and nearly that magnitude is clipped by one code. For fp8 it gets 256.
// Both are powers of two, so the division is exact; a bf16 scale is rounded after it, and the largest magnitude with it.
ZPP_HOST_DEVICE constexpr float scale_factor(Codes codes) {
  return codes == Codes::int8 ? -0x1p-7f : codes == Codes::int4 ? -0x1p-3f : 0x1p-8f;
}

struct BlockScale {
  float stored;        // what the message carries
  float inverse;       // fl(1 / stored)
  uint32_t code_mask;  // all ones, or zero where every code is zero: a block of zeros, of subnormals, or not finite
};

ZPP_HOST_DEVICE BlockScale block_scale(uint32_t key, float factor, bool bf16_scales) {
  float scale = peak_of_key(key) * factor;
  if (bf16_scales) scale = float_of(bf16_bits(scale) << 16);
  const bool finite = key < kFirstNonFiniteKey;
  const bool usable = finite && (bits_of(scale) & ~kSignBit) >= 0x00800000u;  // 2^-126
  const float stored = usable ? scale : finite ? 0.f : float_of(kNanBits);
  return {stored, 1.f / (usable ? scale : 1.f), usable ? ~0u : 0u};
}

// What an encoding lost of x. Near the end of fp32 the scale's rounding can make the decoded value infinite: that the
// receiver sees, but fed back it would live on.
ZPP_HOST_DEVICE float lost_of(float x, float decoded) {
  const float lost = x - decoded;
  return (bits_of(lost) & ~kSignBit) < kInfinityBits ? lost : 0.f;
}

// ---- codes: encoding ----

// Added to a number below 2^22, this leaves the nearest integer (ties to even) in the low bits, in two's complement.
constexpr float kRound = 0x1.8p23f;

ZPP_HOST_DEVICE float uniform(uint32_t random16) { return float_of(0x3F800000u | random16 << 7) - 1.f; }

constexpr uint32_t kE4m3Largest = 0x7E;                // 448
constexpr uint32_t kE4m3FirstNormalBits = 0x3C800000;  // 2^-6 as fp32
constexpr uint32_t kE4m3Rebias = (127 - 7) << 3;

ZPP_HOST_DEVICE uint32_t e4m3_sign(float y) { return bits_of(y) >> 24 & 0x80; }

ZPP_HOST_DEVICE uint32_t at_most_e4m3_largest(uint32_t code) { return code < kE4m3Largest ? code : kE4m3Largest; }

// y is finite.
ZPP_HOST_DEVICE uint32_t e4m3_nearest(float y) {
  const uint32_t magnitude = bits_of(y) & ~kSignBit;
  // 2^-9, the step below 2^-6, is the last place of numbers from 2^14 to 2^15.
  const uint32_t small = bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f);
  const uint32_t normal = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1)) >> 20) - kE4m3Rebias;
  return e4m3_sign(y) | at_most_e4m3_largest(magnitude < kE4m3FirstNormalBits ? small : normal);
}

// y is finite. Adding below the bits that stay carries into them as often as the cut-off part is large.
ZPP_HOST_DEVICE uint32_t e4m3_stochastic(float y, uint32_t random16) {
  const uint32_t magnitude = bits_of(y) & ~kSignBit;
  const uint32_t normal = ((magnitude + (random16 << 4)) >> 20) - kE4m3Rebias;
  const bool is_small = magnitude < kE4m3FirstNormalBits;
  // From 0 to 8; truncation is the floor.
  const float steps = (is_small ? float_of(magnitude) : 0.f) * 512.f + uniform(random16);
  const uint32_t small = uint32_t(int32_t(steps));
  return e4m3_sign(y) | (is_small ? small : at_most_e4m3_largest(normal));
}

// ---- codes: decoding ----

ZPP_HOST_DEVICE float e4m3_value(uint32_t code) {
  const uint32_t magnitude = code & 0x7F;
  // Below 2^-6 there is no leading one: decode with one and take it away.
  const bool is_small = magnitude < 8;
  const float with_one = float_of((magnitude + (is_small ? 8 : 0) + kE4m3Rebias) << 20);
  const uint32_t value = bits_of(with_one - (is_small ? 0x1p-6f : 0.f));
  return float_of(value | (magnitude == 0x7F ? kNanBits : 0) | (code & 0x80) << 24);
}

// ---- random numbers ----

// Philox4x32-7 (Salmon et al. 2011): seven rounds pass all of BigCrush; ten are for safety. The low half of word k is
// for element 2k of eight, the high half for 2k + 1.
constexpr int kPhiloxRounds = 7;

struct Random8 {
  uint32_t word[4];
};

// What each round takes of the seed, made once for all elements.
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
  uint64_t product;  // the compiler would make two multiplications of it, or add zeros
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
#else
  const uint64_t product = uint64_t(a) * b;
#endif
  return {uint32_t(product), uint32_t(product >> 32)};
}

ZPP_HOST_DEVICE Random8 random_for_eight(const PhiloxKeys& keys, uint64_t counter) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Product first = product_of(c0, 0xD2511F53u), second = product_of(c2, 0xCD9E8D57u);
    c0 = second.high ^ c1 ^ keys.low[round];
    c1 = second.low;
    c2 = first.high ^ c3 ^ keys.high[round];
    c3 = first.low;
  }
  return {{c0, c1, c2, c3}};
}

// ---- rotation ----

constexpr int kRotation = 32;                         // elements that a Hadamard matrix mixes
constexpr float kRotationFactor = 0.17677669529663687f;  // the fp32 number nearest 1 / sqrt(32)

// ---- AdamW ----

struct AdamwConstants {
  float beta1, rest1;  // beta and 1 - beta, each rounded once from double
  float beta2, rest2;
  float eps;
  float learning_rate;
  float decay;  // learning_rate * weight_decay
};

// What the device's scalars make of them.
struct AdamwScalars {
  float inverse_divisor;  // fl(1 / divisor)
  float rate;             // fl(learning_rate / bias correction 1)
  float root2;            // fl(sqrt(bias correction 2))
};

ZPP_HOST_DEVICE AdamwScalars adamw_scalars(const AdamwConstants& c, float divisor, const float* bias_corrections) {
  return {1.f / divisor, c.learning_rate / bias_corrections[0], sqrtf(bias_corrections[1])};
}

struct AdamwState {
  float weight, average, average_square;
};

// Every step is one rounding.
ZPP_HOST_DEVICE AdamwState adamw_step(AdamwState s, float gradient, bool decays, const AdamwConstants& c,
                                      const AdamwScalars& k) {
  const float g = gradient * k.inverse_divisor;
  const float decayed = s.weight - c.decay * s.weight;
  const float weight = decays ? decayed : s.weight;
  const float average = c.beta1 * s.average + c.rest1 * g;
  const float average_square = c.beta2 * s.average_square + c.rest2 * (g * g);
  const float denominator = sqrtf(average_square) / k.root2 + c.eps;
  return {weight - k.rate * (average / denominator), average, average_square};
}

}  // namespace megatron_zpp
