// The layout of messages, as arithmetic on values.
#pragma once

#include "numerics.h"

namespace megatron_zpp {

struct Format {
  CodeType code_type;
  int block;  // elements that share a scale: a power of two
};

constexpr int kSmallestBlock = 32;
constexpr int kLargestBlock = 2048;
constexpr int kMessageAlignment = 16;  // bytes
constexpr int kScaleBytes = 2;         // bf16

// A message is all codes, then one scale per block, then zeros up to a multiple of 16 bytes.
struct MessageLayout {
  int64_t blocks;
  int64_t code_bytes;  // offset of the scales
  int64_t used_bytes;  // offset of the zeros
  int64_t bytes;
};

inline MessageLayout message_layout(const Format& format, int64_t elements) {
  const int64_t blocks = elements / format.block;
  const int64_t code_bytes = elements * bits_of_code(format.code_type) / 8;
  const int64_t used_bytes = code_bytes + blocks * kScaleBytes;
  const int64_t bytes = (used_bytes + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment;
  return {blocks, code_bytes, used_bytes, bytes};
}

}  // namespace megatron_zpp
