// Encodes and decodes blocks on the CPU, in loops that the compiler vectorises.
//
// A block of at most 2048 elements stays in the first-level cache, so each step is a separate loop over it.
#pragma once

#include "message.h"

namespace megatron_zpp::cpu {

constexpr int64_t kGrainElements = 1 << 15;  // about 10 microseconds of work; a thread is not worth less

template <typename T>
void load(const T* source, float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] = to_float(source[i]);
}

template <typename T>
void store(const float* x, T* target, int n) {
  for (int i = 0; i < n; ++i) target[i] = saturate<T>(x[i]);
}

// ---- rotation ----

typedef float Eight __attribute__((vector_size(32)));
typedef int EightIndices __attribute__((vector_size(32)));

// Element i of the result is element i ^ H.
template <int H>
inline Eight swapped(Eight x) {
#ifdef __clang__
  return __builtin_shufflevector(x, x, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H);
#else
  return __builtin_shuffle(x, EightIndices{0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H});
#endif
}

// One stage of the rotation: a + b at indices with bit H clear, a - b at indices with bit H set.
template <int H>
inline Eight butterfly(Eight x) {
  Eight sign;
  for (int i = 0; i < 8; ++i) sign[i] = i & H ? -1.f : 1.f;
  return swapped<H>(x) + sign * x;
}

inline void rotate(float* x, int n) {
  for (int start = 0; start < n; start += kRotation) {
    Eight v[4];
    std::memcpy(v, x + start, sizeof v);
    for (Eight& part : v) part = butterfly<4>(butterfly<2>(butterfly<1>(part)));
    const Eight a[4] = {v[0] + v[1], v[0] - v[1], v[2] + v[3], v[2] - v[3]};
    v[0] = (a[0] + a[2]) * kRotationFactor;
    v[1] = (a[1] + a[3]) * kRotationFactor;
    v[2] = (a[0] - a[2]) * kRotationFactor;
    v[3] = (a[1] - a[3]) * kRotationFactor;
    std::memcpy(x + start, v, sizeof v);
  }
}

// ---- scales ----

inline uint32_t largest_key(const float* x, int n) {
  uint32_t key = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t other = peak_key(x[i]);
    key = key < other ? other : key;
  }
  return key;
}

inline void store_scale(float stored, uint8_t* scales, int64_t block, Scales type) {
  if (type == Scales::bf16) {
    const uint16_t bits = uint16_t(bits_of(stored) >> 16);  // exact: rounded already
    std::memcpy(scales + 2 * block, &bits, sizeof bits);
  } else {
    std::memcpy(scales + 4 * block, &stored, sizeof stored);
  }
}

inline float load_scale(const uint8_t* scales, int64_t block, Scales type) {
  uint32_t bits = 0;
  if (type == Scales::bf16) {
    std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, scales + 2 * block, 2);
  } else {
    std::memcpy(&bits, scales + 4 * block, 4);
  }
  return float_of(bits);
}

// ---- codes ----

inline float smaller(float a, float b) { return a < b ? a : b; }
inline float larger(float a, float b) { return a < b ? b : a; }

// The low bits are the code. Only the upper end needs a clamp: elements with the sign of the peak are at most
// 2^(bits-1) * (1 + 2^-8) steps, because of the rounding of the scale to bf16, and that rounds to -2^(bits-1).
template <CodeType C>
inline uint32_t integer_nearest(float x, float inverse) {
  constexpr float top = kRound + float((1 << (bits_of_code(C) - 1)) - 1);
  return bits_of(smaller(fmaf(x, inverse, kRound), top));
}

// The low bits are the code.
template <CodeType C>
inline uint32_t integer_stochastic(float x, float inverse, uint32_t random16) {
  constexpr int half = 1 << (bits_of_code(C) - 1);
  const float y = x * inverse + uniform(random16);
  const float rounded = y + kRound;
  const float floored = rounded - (rounded - kRound > y ? 1.f : 0.f);  // gcc would call floorf, element by element
  return bits_of(larger(smaller(floored, kRound + float(half - 1)), kRound - float(half)));
}

// Packs int4 codes, each in a byte of `wide`, two per byte: the first in the low half.
inline void pack_int4(const uint8_t* wide, uint8_t* codes, int n) {
  for (int i = 0; i < n / 2; ++i) {
    uint16_t pair;
    std::memcpy(&pair, wide + 2 * i, sizeof pair);
    codes[i] = uint8_t((pair & 0x0F) | (pair >> 4 & 0xF0));
  }
}

inline void unpack_int4(const uint8_t* codes, int8_t* wide, int n) {
  for (int i = 0; i < n / 2; ++i) {
    const uint16_t pair = uint16_t((codes[i] & 0x0F) | (codes[i] & 0xF0) << 4);
    std::memcpy(wide + 2 * i, &pair, sizeof pair);
  }
  for (int i = 0; i < n; ++i) wide[i] = int8_t((wide[i] ^ 8) - 8);
}

// Writes encode(x[i], i), the code of each element.
template <CodeType C, typename Encode>
void write_codes(const float* x, int n, uint8_t* codes, Encode&& encode) {
  uint8_t wide[C == CodeType::int4 ? kLargestBlock : 1];
  uint8_t* target = C == CodeType::int4 ? wide : codes;
  for (int i = 0; i < n; ++i) target[i] = uint8_t(encode(x[i], i));
  if constexpr (C == CodeType::int4) pack_int4(wide, codes, n);
}

// The random numbers of n elements from this index on; both must be multiples of 8.
inline void fill_random(const PhiloxKeys& keys, int64_t index, int n, uint16_t* random) {
  uint32_t words[kLargestBlock / 2];
  for (int i = 0; i < n / 8; ++i) {
    const Random8 eight = random_for_eight(keys, uint64_t(index / 8 + i));
    for (int k = 0; k < 4; ++k) words[4 * i + k] = eight.word[k];
  }
  std::memcpy(random, words, n * sizeof *random);
}

// Encodes one block x (n,) with this scale; rounds to nearest if `random` is null.
template <CodeType C>
void encode(const float* x, int n, const BlockScale& scale, const uint16_t* random, uint8_t* codes) {
  const float inverse = scale.inverse;
  if (scale.code_mask == 0) {
    std::memset(codes, 0, size_t(n) * bits_of_code(C) / 8);
  } else if constexpr (C == CodeType::fp8) {
    if (random == nullptr)
      write_codes<C>(x, n, codes, [=](float v, int) { return e4m3_nearest(v * inverse); });
    else
      write_codes<C>(x, n, codes, [=](float v, int i) { return e4m3_stochastic(v * inverse, random[i]); });
  } else {
    if (random == nullptr)
      write_codes<C>(x, n, codes, [=](float v, int) { return integer_nearest<C>(v, inverse); });
    else
      write_codes<C>(x, n, codes, [=](float v, int i) { return integer_stochastic<C>(v, inverse, random[i]); });
  }
}

// Calls use(i, value) with every element of one block.
template <CodeType C, typename Use>
void decode(const uint8_t* codes, int n, float stored, Use&& use) {
  if constexpr (C == CodeType::fp8) {
    for (int i = 0; i < n; ++i) use(i, e4m3_value(codes[i]) * stored);
  } else if constexpr (C == CodeType::int8) {
    for (int i = 0; i < n; ++i) use(i, float(int8_t(codes[i])) * stored);
  } else {
    int8_t wide[kLargestBlock];
    unpack_int4(codes, wide, n);
    for (int i = 0; i < n; ++i) use(i, float(wide[i]) * stored);
  }
}

// ---- messages ----

// Writes one message.
struct Writer {
  uint8_t* message;
  Format format;
  MessageLayout layout;

  // Encodes x (format.block,) as this block and returns its scale. Writes the padding too if it is the last block.
  template <CodeType C>
  BlockScale write(int64_t block, const float* x, const uint16_t* random) const {
    const BlockScale scale =
        block_scale(largest_key(x, format.block), scale_factor(C), format.scales == Scales::bf16);
    encode<C>(x, format.block, scale, random, codes<C>(block));
    store_scale(scale.stored, message + layout.code_bytes, block, format.scales);
    if (block == layout.blocks - 1) std::memset(message + layout.used_bytes, 0, layout.bytes - layout.used_bytes);
    return scale;
  }

  template <CodeType C>
  uint8_t* codes(int64_t block) const {
    return message + block * (format.block * bits_of_code(C) / 8);
  }
};

// Reads one message.
struct Reader {
  const uint8_t* message;
  Format format;
  MessageLayout layout;

  // Calls use(i, value) with every element of this block.
  template <CodeType C, typename Use>
  void read(int64_t block, Use&& use) const {
    const float stored = load_scale(message + layout.code_bytes, block, format.scales);
    decode<C>(message + block * (format.block * bits_of_code(C) / 8), format.block, stored, use);
  }
};

}  // namespace megatron_zpp::cpu
