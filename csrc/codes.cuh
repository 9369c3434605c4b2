// CodeType and scales in registers: runs of numbers of one lane to words of codes, and back.
#pragma once

#include "device.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define ZPP_HAS_E4M3 1  // conversion instructions, which round and saturate as our own arithmetic does
#endif

namespace megatron_zpp::cuda {

// Words of 32 bits that n codes take.
template <CodeType C>
__host__ __device__ constexpr int words_of(int n) {
  return n * bits_of_code(C) / 32;
}

// ---- encoding ----

// Integers are encoded with half of their range added, so that all are from 0 on, and go by pairs, one in each half of
// a word: that takes half as many minima, and packing needs no care for borrows.
template <CodeType C>
constexpr uint32_t kHalfRange = 1u << (bits_of_code(C) - 1);

// kRound + code + half of the range, not yet clamped. Adding an even number changes no tie.
template <CodeType C>
__device__ __forceinline__ float shifted_nearest(float x, float inverse) {
  return fmaf(x, inverse, kRound + float(kHalfRange<C>));
}

// Rounding down makes the low bits the floor.
template <CodeType C>
__device__ __forceinline__ float shifted_stochastic(float x, float inverse, float uniform) {
  return __fadd_rd(x * inverse + uniform, kRound + float(kHalfRange<C>));
}

// The low halves of two such numbers, clamped to the codes that there are.
template <CodeType C>
__device__ __forceinline__ uint32_t clamped_pair(float low, float high) {
  constexpr uint32_t largest = 2 * kHalfRange<C> - 1;
#if __CUDA_ARCH__ >= 900
  return __vimin_s16x2_relu(__byte_perm(bits_of(low), bits_of(high), 0x5410), largest << 16 | largest);
#else  // without the instruction that would be a call
  const float first = fmaxf(fminf(low, kRound + float(largest)), kRound);
  const float second = fmaxf(fminf(high, kRound + float(largest)), kRound);
  return __byte_perm(bits_of(first), bits_of(second), 0x5410);
#endif
}

// One word of eight int4. CodeType i and i + 4 are a pair, so that each half of the sum has its four codes in order.
template <CodeType C>
__device__ __forceinline__ void pack(const float (&shifted)[8], uint32_t mask, uint32_t (&words)[1]) {
  uint32_t sum = clamped_pair<C>(shifted[3], shifted[7]);
#pragma unroll
  for (int i = 2; i >= 0; --i) sum = sum * 16 + clamped_pair<C>(shifted[i], shifted[i + 4]);
  words[0] = (sum ^ 0x88888888u) & mask;
}

// Two words of four int8.
template <CodeType C>
__device__ __forceinline__ void pack(const float (&shifted)[8], uint32_t mask, uint32_t (&words)[2]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t low = clamped_pair<C>(shifted[4 * k], shifted[4 * k + 1]);
    const uint32_t high = clamped_pair<C>(shifted[4 * k + 2], shifted[4 * k + 3]);
    words[k] = (__byte_perm(low, high, 0x6420) ^ 0x80808080u) & mask;
  }
}

__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
#ifdef ZPP_HAS_E4M3
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return e4m3_nearest(low) | e4m3_nearest(high) << 8;
#endif
}

// Eight numbers to nearest; bits that `mask` has not are zero.
template <CodeType C>
__device__ __forceinline__ void encode_eight(const float (&x)[8], float inverse, uint32_t mask,
                                             uint32_t (&words)[words_of<C>(8)]) {
  if constexpr (C == CodeType::fp8) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t low = e4m3_pair(x[4 * k] * inverse, x[4 * k + 1] * inverse);
      words[k] = (low | e4m3_pair(x[4 * k + 2] * inverse, x[4 * k + 3] * inverse) << 16) & mask;
    }
  } else {
    float shifted[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) shifted[i] = shifted_nearest<C>(x[i], inverse);
    pack<C>(shifted, mask, words);
  }
}

// `uniform` of a half of a word. Under the exponent of 2^23 it takes one instruction less.
__device__ __forceinline__ float uniform_of_half(uint32_t word, bool high) {
  return fmaf(float_of(__byte_perm(word, 0x4B000000u, high ? 0x7632 : 0x7610)), 0x1p-16f, -128.f);
}

// Eight numbers at random; `counter` is the index of the first over 8.
template <CodeType C>
__device__ __forceinline__ void encode_eight(const float (&x)[8], float inverse, uint32_t mask,
                                             const PhiloxKeys& keys, uint64_t counter,
                                             uint32_t (&words)[words_of<C>(8)]) {
  const Random8 random = random_for_eight(keys, counter);
  float shifted[8];
#pragma unroll
  for (int w = 0; w < words_of<C>(8); ++w) words[w] = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = random.word[i / 2];
    if constexpr (C == CodeType::fp8)
      words[i / 4] |= e4m3_stochastic(x[i] * inverse, i & 1 ? word >> 16 : word & 0xFFFF) << 8 * (i % 4) & mask;
    else
      shifted[i] = shifted_stochastic<C>(x[i], inverse, uniform_of_half(word, i & 1));
  }
  if constexpr (C != CodeType::fp8) pack<C>(shifted, mask, words);
}

// ---- decoding ----

// Each code under the exponent of 2^23, so that a subtraction makes it a number: conversion instructions are slow.
__device__ __forceinline__ void decode_int8(uint32_t word, float* values) {
  const uint32_t positive = word ^ 0x80808080u;  // code + 128
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = float_of(__byte_perm(positive, 0x4B000000u, 0x7440 + i)) - (0x1p23f + 128.f);
}

// (bits & mask) ^ magic in one instruction; the compiler would make two of it.
__device__ __forceinline__ uint32_t masked_under(uint32_t bits, uint32_t mask, uint32_t magic) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(result) : "r"(bits), "r"(mask), "r"(magic));
  return result;
}

__device__ __forceinline__ __half2 as_halves(uint32_t bits) {
  __half2 pair;
  memcpy(&pair, &bits, sizeof pair);
  return pair;
}

// Likewise, but as fp16 by pairs, under the exponent of 2^10: codes i and i + 4 are in the two halves of the word, one
// above the other 16 times too large until the fma. All of it is exact.
__device__ __forceinline__ void decode_int4(uint32_t word, float* values) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t bits = word >> 4 * i;
    const uint32_t first = masked_under(bits, 0x000F000Fu, 0x64086408u);   // 1024 + code + 8
    const uint32_t second = masked_under(bits, 0x00F000F0u, 0x64806480u);  // 1024 + 16 * (code + 8)
    const __half2 even = __hsub2(as_halves(first), __float2half2_rn(1024.f + 8.f));
    const __half2 odd =
        __hfma2(as_halves(second), __float2half2_rn(1.f / 16.f), __float2half2_rn(-(1024.f / 16.f + 8.f)));
    values[i] = __low2float(even);
    values[i + 1] = __low2float(odd);
    values[i + 4] = __high2float(even);
    values[i + 5] = __high2float(odd);
  }
}

__device__ __forceinline__ void decode_fp8(uint32_t word, float* values) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#ifdef ZPP_HAS_E4M3
    uint32_t pair;  // of fp16
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16_t(word >> 16 * k)));
    values[2 * k] = to_float(Fp16{uint16_t(pair)});
    values[2 * k + 1] = to_float(Fp16{uint16_t(pair >> 16)});
#else
    values[2 * k] = e4m3_value(word >> 16 * k & 0xFF);
    values[2 * k + 1] = e4m3_value(word >> (16 * k + 8) & 0xFF);
#endif
  }
}

// CodeType as numbers, exactly.
template <CodeType C, int N>
__device__ __forceinline__ void decode_codes(const uint32_t (&words)[words_of<C>(N)], float (&values)[N]) {
#pragma unroll
  for (int k = 0; k < words_of<C>(N); ++k) {
    if constexpr (C == CodeType::int8) decode_int8(words[k], values + 4 * k);
    if constexpr (C == CodeType::int4) decode_int4(words[k], values + 8 * k);
    if constexpr (C == CodeType::fp8) decode_fp8(words[k], values + 4 * k);
  }
}

// ---- memory ----

template <int WORDS>
__device__ __forceinline__ void load_words(const uint8_t* address, uint32_t (&words)[WORDS]) {
  if constexpr (WORDS == 1) {
    words[0] = load_vector<uint32_t>(address);
  } else if constexpr (WORDS == 2) {
    const uint2 two = load_vector<uint2>(address);
    words[0] = two.x;
    words[1] = two.y;
  } else {
    static_assert(WORDS % 4 == 0, "whole loads");
#pragma unroll
    for (int k = 0; k < WORDS; k += 4) {
      const uint4 four = load_vector<uint4>(address + 4 * k);
      words[k] = four.x;
      words[k + 1] = four.y;
      words[k + 2] = four.z;
      words[k + 3] = four.w;
    }
  }
}

template <int WORDS>
__device__ __forceinline__ void store_words(uint8_t* address, const uint32_t (&words)[WORDS]) {
  if constexpr (WORDS == 1) {
    *reinterpret_cast<uint32_t*>(address) = words[0];
  } else if constexpr (WORDS == 2) {
    *reinterpret_cast<uint2*>(address) = {words[0], words[1]};
  } else {
    static_assert(WORDS % 4 == 0, "whole stores");
#pragma unroll
    for (int k = 0; k < WORDS; k += 4)
      reinterpret_cast<uint4*>(address)[k / 4] = {words[k], words[k + 1], words[k + 2], words[k + 3]};
  }
}

__device__ __forceinline__ uint32_t load_scale_word(const uint8_t* address) {
  return *reinterpret_cast<const uint32_t*>(address);
}

__device__ __forceinline__ float scale_of_word(uint32_t word, uint32_t selector) {
  return float_of(__byte_perm(word, 0, selector));
}

// Messages to read, all of one format.
struct Reader {
  const uint8_t* messages;
  int64_t code_bytes, bytes;  // of one message
  int log_block;
  int log_scale_word;                        // elements whose scales are in one word
  uint32_t even_selector, odd_selector;  // what takes the scales of even and odd blocks out of it

  Reader(const uint8_t* messages, const Format& format, int64_t elements)
      : messages(messages), log_block(log2_of(format.block)) {
    const bool fp32_scales = format.scales == Scales::fp32;
    log_scale_word = fp32_scales ? log_block : log_block + 1;
    even_selector = fp32_scales ? 0x3210 : 0x1044;
    odd_selector = fp32_scales ? 0x3210 : 0x3244;
    const MessageLayout layout = message_layout(format, elements);
    code_bytes = layout.code_bytes;
    bytes = layout.bytes;
    index_of(layout.blocks);
  }

  __device__ __forceinline__ const uint8_t* message(uint32_t index) const { return messages + index * bytes; }

  template <CodeType C>
  __device__ __forceinline__ const uint8_t* codes_at(const uint8_t* message, uint64_t element) const {
    return message + (element * bits_of_code(C) >> 3);
  }

  // A scale is read as the aligned word that it is in and taken out of it later: were there a load for each type of
  // scales, other loads would wait for it.
  __device__ __forceinline__ const uint8_t* scale_word_at(const uint8_t* message, uint64_t element) const {
    return message + code_bytes + 4 * (element >> log_scale_word);
  }

  // What takes the scale out of its word; the same for all messages.
  __device__ __forceinline__ uint32_t scale_selector(uint64_t element) const {
    return element >> log_block & 1 ? odd_selector : even_selector;
  }

  // The same for runs of RUN elements, counted from the beginning of a message: less work with 64 bits.
  template <int RUN>
  __device__ __forceinline__ const uint8_t* scale_word_of_run(const uint8_t* message, uint32_t run) const {
    return message + code_bytes + 4 * uint64_t(run >> (log_scale_word - kLog2<RUN>));
  }

  template <int RUN>
  __device__ __forceinline__ uint32_t scale_selector_of_run(uint32_t run) const {
    return run >> (log_block - kLog2<RUN>)&1 ? odd_selector : even_selector;
  }
};

}  // namespace megatron_zpp::cuda
