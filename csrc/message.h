// Where codes and scales lie in messages: arithmetic on values.
#pragma once

#include "numerics.h"

namespace megatron_zpp {

enum class Scales : int { bf16, fp32 };

struct Format {
  Codes codes;
  int block;  // elements that share a scale: a power of two
  Scales scales;
  bool rotate;
};

constexpr int kSmallestBlock = 32;
constexpr int kLargestBlock = 2048;
constexpr int kMessageAlignment = 16;  // bytes

// A message: codes, then one scale a block, then zeros up to a multiple of 16 bytes.
struct MessageLayout {
  int64_t blocks;
  int64_t code_bytes;  // where the scales begin
  int64_t used_bytes;  // where the zeros begin
  int64_t bytes;
};

inline int scale_bytes(Scales scales) { return scales == Scales::bf16 ? 2 : 4; }

inline MessageLayout message_layout(const Format& format, int64_t elements) {
  const int64_t blocks = elements / format.block;
  const int64_t code_bytes = elements * bits_of_code(format.codes) / 8;
  const int64_t used_bytes = code_bytes + blocks * scale_bytes(format.scales);
  const int64_t bytes = (used_bytes + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment;
  return {blocks, code_bytes, used_bytes, bytes};
}

}  // namespace megatron_zpp
