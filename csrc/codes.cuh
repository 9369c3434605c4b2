// Encodes the numbers of one lane to words of codes, decodes them, and reads messages.
#pragma once

#include "device.cuh"

namespace megatron_zpp::cuda {

// 32-bit words of n codes.
template <CodeType C>
__host__ __device__ constexpr int words_of(int n) {
  return n * bits_of_code(C) / 32;
}

// ---- encoding ----

// Integers are encoded as code + half of the range, which is never negative, in pairs, one in each half of a word.
// Pairs need half as many clamping instructions, and packing numbers that are not negative needs no borrows.
template <CodeType C>
constexpr uint32_t kHalfRange = 1u << (bits_of_code(C) - 1);

// kRound + code + half of the range, not clamped. Half of the range is even, so ties round as without it.
template <CodeType C>
__device__ __forceinline__ float shifted_nearest(float x, float inverse) {
  return fmaf(x, inverse, kRound + float(kHalfRange<C>));
}

// The low halves of two such numbers, clamped to the range of the codes.
template <CodeType C>
__device__ __forceinline__ uint32_t clamped_pair(float low, float high) {
  constexpr uint32_t largest = 2 * kHalfRange<C> - 1;
#if __CUDA_ARCH__ >= 900
  return __vimin_s16x2_relu(__byte_perm(bits_of(low), bits_of(high), 0x5410), largest << 16 | largest);
#else  // older GPUs lack the instruction and would call a function
  const float first = fmaxf(fminf(low, kRound + float(largest)), kRound);
  const float second = fmaxf(fminf(high, kRound + float(largest)), kRound);
  return __byte_perm(bits_of(first), bits_of(second), 0x5410);
#endif
}

// Packs eight int4 codes into a word. Codes i and i + 4 are a pair, so that each half of `sum` has four codes in order.
template <CodeType C>
__device__ __forceinline__ void pack(const float (&shifted)[8], uint32_t mask, uint32_t (&words)[1]) {
  uint32_t sum = clamped_pair<C>(shifted[3], shifted[7]);
#pragma unroll
  for (int i = 2; i >= 0; --i) sum = sum * 16 + clamped_pair<C>(shifted[i], shifted[i + 4]);
  words[0] = (sum ^ 0x88888888u) & mask;
}

// Packs eight int8 codes into two words.
template <CodeType C>
__device__ __forceinline__ void pack(const float (&shifted)[8], uint32_t mask, uint32_t (&words)[2]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t low = clamped_pair<C>(shifted[4 * k], shifted[4 * k + 1]);
    const uint32_t high = clamped_pair<C>(shifted[4 * k + 2], shifted[4 * k + 3]);
    words[k] = (__byte_perm(low, high, 0x6420) ^ 0x80808080u) & mask;
  }
}

// Encodes eight numbers, rounded to nearest, and masks the words.
template <CodeType C>
__device__ __forceinline__ void encode_eight(const float (&x)[8], float inverse, uint32_t mask,
                                             uint32_t (&words)[words_of<C>(8)]) {
  float shifted[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) shifted[i] = shifted_nearest<C>(x[i], inverse);
  pack<C>(shifted, mask, words);
}

// ---- decoding ----

// Each code becomes the mantissa of a number with the exponent of 2^23, and a subtraction makes it a number, because
// conversion instructions are slow.
__device__ __forceinline__ void decode_int8(uint32_t word, float* values) {
  const uint32_t positive = word ^ 0x80808080u;  // code + 128
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = float_of(__byte_perm(positive, 0x4B000000u, 0x7440 + i)) - (0x1p23f + 128.f);
}

// (bits & mask) ^ magic in one instruction, where the compiler would make two.
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

// Likewise in pairs of fp16, with the exponent of 2^10: codes i and i + 4 are in the two halves of a word. Odd codes
// are 16 times too large until the fma. All operations are exact.
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

// Decodes codes to numbers, not yet multiplied by the scale.
template <CodeType C, int N>
__device__ __forceinline__ void decode_codes(const uint32_t (&words)[words_of<C>(N)], float (&values)[N]) {
#pragma unroll
  for (int k = 0; k < words_of<C>(N); ++k) {
    if constexpr (C == CodeType::int8) decode_int8(words[k], values + 4 * k);
    if constexpr (C == CodeType::int4) decode_int4(words[k], values + 8 * k);
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

// Byte selectors of the scales of even and odd blocks in a word.
constexpr uint32_t kEvenScale = 0x1044, kOddScale = 0x3244;

// Reads messages of one format.
struct Reader {
  const uint8_t* messages;
  int64_t code_bytes, bytes;  // of one message
  int log_block;

  Reader(const uint8_t* messages, const Format& format, int64_t elements)
      : messages(messages), log_block(log2_of(format.block)) {
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

  // A scale is loaded as the aligned word that contains it and its neighbour's, and extracted later.
  __device__ __forceinline__ const uint8_t* scale_word_at(const uint8_t* message, uint64_t element) const {
    return message + code_bytes + 4 * (element >> (log_block + 1));
  }

  // The byte selector of a scale in its word; the same for all messages.
  __device__ __forceinline__ uint32_t scale_selector(uint64_t element) const {
    return element >> log_block & 1 ? kOddScale : kEvenScale;
  }

  // The same by the number of a run of RUN elements in the message, which takes fewer 64-bit instructions.
  template <int RUN>
  __device__ __forceinline__ const uint8_t* scale_word_of_run(const uint8_t* message, uint32_t run) const {
    return message + code_bytes + 4 * uint64_t(run >> (log_block + 1 - kLog2<RUN>));
  }

  template <int RUN>
  __device__ __forceinline__ uint32_t scale_selector_of_run(uint32_t run) const {
    return run >> (log_block - kLog2<RUN>)&1 ? kOddScale : kEvenScale;
  }
};

}  // namespace megatron_zpp::cuda
