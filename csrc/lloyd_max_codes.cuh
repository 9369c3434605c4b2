// Lloyd-Max codes and messages of them on a GPU.
#pragma once

#include "lloyd_max.cuh"

namespace megatron_zpp::cuda {

// ---- codes ----

// Eight codes of BITS bits, each in four bits of a word.
using Nibbles = uint32_t;

// The code of a magnitude in units: floor(slope * magnitude), at most the highest, is the code or one less, so that one
// comparison with the boundary above that guess decides. A guess is right if slope * boundary b is in [b, b + 1) for
// all b; the slope is in the middle of what that allows.
constexpr float kSlope = 2.85f;  // of 4 bits; with 2 there is one boundary to compare with

// A table of eight numbers in the lanes of a warp: lane c has entry c % 8.
template <int BITS>
struct LaneTables {
  static constexpr int kHalf = 1 << (BITS - 1);
  float boundary;  // infinity behind the last one
  float level;     // positive

  __device__ __forceinline__ LaneTables() : boundary(float_of(kInfinityBits)), level(lloyd_max_level(BITS, 0)) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (lane_index() % kHalf != i) continue;
      if (i < kHalf - 1) boundary = lloyd_max_boundary(BITS, i);
      level = lloyd_max_level(BITS, i);
    }
    boundary = computed_once(boundary);
    level = computed_once(level);
  }
};

// 1 if x >= y, and 0 otherwise, as the one instruction that compares so.
__device__ __forceinline__ float one_if_at_least(float x, float y) {
#ifdef __CUDA_ARCH__
  float result;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x >= y ? 1.f : 0.f;
#endif
}

// Encodes a block in multiples of `unit`.
template <int BITS, typename S>
class Encoder {
 public:
  // `inverse` is 1 / unit, within a percent. All lanes of a warp must call this and `magnitude`.
  __device__ __forceinline__ Encoder(const LaneTables<BITS>& tables, float unit, float inverse)
      : unit_(unit),
        boundary_(kProducts ? unit * tables.boundary : BITS == 2 ? unit * lloyd_max_boundary(2, 0) : tables.boundary),
        guess_factor_(kSlope / kTop * inverse) {}

  // A word whose five low bits are the number of boundaries at most `size`, which is not negative.
  __device__ __forceinline__ uint32_t magnitude(float size) const {
    if constexpr (BITS == 2) return size >= boundary_ ? 1 : 0;
    const float place = __saturatef(size * guess_factor_);
    const float guess = __fmaf_rd(place, kTop, 0x1p23f);  // rounds down to an integer in the low bits
    const float entry = __shfl_sync(kAllLanes, boundary_, bits_of(guess), LaneTables<BITS>::kHalf);
    return bits_of(guess + one_if_at_least(size, kProducts ? entry : unit_ * entry));
  }

 private:
  // Each lane of a block multiplies one boundary by the unit, if the block has a lane for each.
  static constexpr bool kProducts = BITS > 2 && S::kLanes >= LaneTables<BITS>::kHalf;
  static constexpr float kTop = LaneTables<BITS>::kHalf - 0.01f;  // the guess is at most kHalf - 1
  float unit_, boundary_, guess_factor_;
};

// Packs eight words of magnitudes and the signs of x to codes, from the lowest level up. x must not be -0.
template <int BITS>
__device__ __forceinline__ Nibbles codes_of(const float (&x)[8], const uint32_t (&magnitudes)[8]) {
  uint32_t word = 0, signs = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) word = __funnelshift_r(word, magnitudes[i], 4);
#pragma unroll
  for (int i = 7; i >= 0; --i) signs = __funnelshift_l(bits_of(x[i]), signs, 4);
  const uint32_t all_bits = (signs >> 3 & 0x11111111u) * ((1u << BITS) - 1);  // of the codes of negative numbers
  return word ^ (0x11111111u << (BITS - 1)) ^ all_bits;
}

// The two low bits of eight nibbles, at the bottom: 16 bits.
__device__ __forceinline__ uint32_t squeezed_pairs(uint32_t x) {
  x &= 0x33333333u;
  x = (x | x >> 2) & 0x0F0F0F0Fu;
  x = (x | x >> 4) & 0x00FF00FFu;
  return (x | x >> 8) & 0xFFFFu;
}

// The levels of a warp: lane c has that of code c.
template <int BITS>
__device__ __forceinline__ float level_of_lane() {
  constexpr int kHalf = 1 << (BITS - 1);
  const int code = lane_index() % (2 * kHalf);
  const int i = code < kHalf ? kHalf - 1 - code : code - kHalf;
  float level = lloyd_max_level(BITS, 0);
#pragma unroll
  for (int j = 1; j < kHalf; ++j) level = i == j ? lloyd_max_level(BITS, j) : level;
  return computed_once(code < kHalf ? -level : level);
}

// The level of the code in the low bits of `word`. All lanes of a warp must call this.
template <int BITS>
__device__ __forceinline__ float level_of(float level_of_lane, uint32_t word) {
  return __shfl_sync(kAllLanes, level_of_lane, word, 1 << BITS);
}

// ---- messages ----

// One message. Codes of a run of eight elements are BITS bytes.
template <int BITS>
struct Message {
  uint8_t* bytes;
  int64_t code_bytes;

  // Runs are counted from the beginning of the message.
  __device__ __forceinline__ void store_run(uint64_t run, Nibbles codes) const {
    if constexpr (BITS == 4) {
      reinterpret_cast<uint32_t*>(bytes)[run] = codes;
    } else {
      reinterpret_cast<uint16_t*>(bytes)[run] = uint16_t(squeezed_pairs(codes));
    }
  }

  // What load_run read, as 32 bits.
  __device__ __forceinline__ uint32_t load_run(uint64_t run) const {
    if constexpr (BITS == 4) return reinterpret_cast<const uint32_t*>(bytes)[run];
    return reinterpret_cast<const uint16_t*>(bytes)[run];
  }

  // A word that has code i of a run in its low bits, with others above.
  __device__ static __forceinline__ uint32_t code(uint32_t run, int i) { return run >> BITS * i; }

  __device__ __forceinline__ uint16_t* scale(uint32_t block) const {
    return reinterpret_cast<uint16_t*>(bytes + code_bytes) + block;
  }
};

// Messages of equal sizes, one after the other, whose blocks are counted through.
template <int BITS>
struct Messages {
  uint8_t* first;
  MessageLayout layout;
  Divisor by_blocks;

  // `elements` of one message.
  Messages(const uint8_t* first, const LloydMaxFormat& format, int64_t elements)
      : first(const_cast<uint8_t*>(first)),
        layout(message_layout(format, elements)),
        by_blocks(layout.blocks) {}

  __device__ __forceinline__ Message<BITS> operator[](uint32_t index) const {
    return {first + index * layout.bytes, layout.code_bytes};
  }

  // One lane per block stores its scale, and after the last one the padding.
  __device__ __forceinline__ void store_scale(const Message<BITS>& message, uint32_t block, uint32_t bits) const {
    *message.scale(block) = uint16_t(bits);
    if (block + 1 != layout.blocks) return;
#pragma unroll 1
    for (int64_t at = layout.used_bytes; at < layout.bytes; at += 2)
      *reinterpret_cast<uint16_t*>(message.bytes + at) = 0;
  }
};

}  // namespace megatron_zpp::cuda
