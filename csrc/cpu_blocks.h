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

// ---- scales ----

inline uint32_t largest_key(const float* x, int n) {
  uint32_t key = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t other = peak_key(x[i]);
    key = key < other ? other : key;
  }
  return key;
}

inline void store_scale(float stored, uint8_t* scales, int64_t block) {
  const uint16_t bits = uint16_t(bits_of(stored) >> 16);  // exact: rounded already
  std::memcpy(scales + 2 * block, &bits, sizeof bits);
}

inline float load_scale(const uint8_t* scales, int64_t block) {
  uint16_t bits = 0;
  std::memcpy(&bits, scales + 2 * block, sizeof bits);
  return float_of(uint32_t(bits) << 16);
}

// ---- codes ----

inline float smaller(float a, float b) { return a < b ? a : b; }

// The low bits are the code. Only the upper end needs a clamp: elements with the sign of the peak are at most
// 2^(bits-1) * (1 + 2^-8) steps, because of the rounding of the scale to bf16, and that rounds to -2^(bits-1).
template <CodeType C>
inline uint32_t integer_nearest(float x, float inverse) {
  constexpr float top = kRound + float((1 << (bits_of_code(C) - 1)) - 1);
  return bits_of(smaller(fmaf(x, inverse, kRound), top));
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

// Encodes one block x (n,) with this scale.
template <CodeType C>
void encode(const float* x, int n, const BlockScale& scale, uint8_t* codes) {
  if (scale.code_mask == 0) {
    std::memset(codes, 0, size_t(n) * bits_of_code(C) / 8);
    return;
  }
  const float inverse = scale.inverse;
  uint8_t wide[C == CodeType::int4 ? kLargestBlock : 1];
  uint8_t* target = C == CodeType::int4 ? wide : codes;
  for (int i = 0; i < n; ++i) target[i] = uint8_t(integer_nearest<C>(x[i], inverse));
  if constexpr (C == CodeType::int4) pack_int4(wide, codes, n);
}

// Calls use(i, value) with every element of one block.
template <CodeType C, typename Use>
void decode(const uint8_t* codes, int n, float stored, Use&& use) {
  if constexpr (C == CodeType::int8) {
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

  // Encodes x (format.block,) as this block. Writes the padding too if it is the last block.
  template <CodeType C>
  void write(int64_t block, const float* x) const {
    const BlockScale scale = block_scale(largest_key(x, format.block), scale_factor(C));
    encode<C>(x, format.block, scale, message + block * (format.block * bits_of_code(C) / 8));
    store_scale(scale.stored, message + layout.code_bytes, block);
    if (block == layout.blocks - 1) std::memset(message + layout.used_bytes, 0, layout.bytes - layout.used_bytes);
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
    const float stored = load_scale(message + layout.code_bytes, block);
    decode<C>(message + block * (format.block * bits_of_code(C) / 8), format.block, stored, use);
  }
};

}  // namespace megatron_zpp::cpu
