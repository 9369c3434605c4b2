// Lloyd-Max codes: levels, boundaries, random signs and the layout of messages, as megatron_zpp/ops/lloyd_max.py says.
#pragma once

#include "operations.h"

namespace megatron_zpp {

struct LloydMaxFormat {
  int bits;   // 2 or 4
  int block;  // elements that share a scale: a power of two from 32 to 2048
};

// The positive levels, from the lowest one up; the negative ones mirror them.
ZPP_HOST_DEVICE constexpr float lloyd_max_level(int bits, int i) {
  constexpr float two[] = {0.45278004f, 1.5104176f};
  constexpr float four[] = {0.12839504f, 0.3880483f, 0.65675914f, 0.94234043f,
                            1.2562312f,  1.6180464f, 2.0690172f,  2.7325895f};
  return bits == 2 ? two[i] : four[i];
}

// The boundaries between them.
ZPP_HOST_DEVICE constexpr float lloyd_max_boundary(int bits, int i) {
  constexpr float two[] = {0.9815988f};
  constexpr float four[] = {0.25822166f, 0.5224037f, 0.79954976f, 1.0992858f, 1.4371388f, 1.8435318f, 2.4008033f};
  return bits == 2 ? two[i] : four[i];
}

// Scales are bf16.
inline MessageLayout message_layout(const LloydMaxFormat& format, int64_t elements) {
  const int64_t blocks = elements / format.block;
  const int64_t code_bytes = elements * format.bits / 8;
  const int64_t used_bytes = code_bytes + blocks * kScaleBytes;
  const int64_t bytes = (used_bytes + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment;
  return {blocks, code_bytes, used_bytes, bytes};
}

// The random signs of a run of elements that begins with element `first` of a unit, a multiple of 128.
struct Signs {
  PhiloxKeys keys;
  uint32_t unit, iteration;
  uint64_t first;
};

// The 128 signs of the elements from 128 * counter on: bit i % 32 of word i / 32 is that of element i.
ZPP_HOST_DEVICE Random8 random_signs(const Signs& signs, uint64_t counter) {
  return philox(uint32_t(counter), uint32_t(counter >> 32), signs.unit, signs.iteration, signs.keys);
}

// weights - reference as codes.
struct QuantizeDifference {
  const float* weights;
  const float* reference;
  int64_t elements;
  uint8_t* message;
  LloydMaxFormat format;
  const float* skip;  // null, or where not 0, the message changes nothing
  float* squares;     // null, or (2, blocks): sums of squares of the differences, and of what codes lose
};

// Part p of the reference moves by message p.
struct AddDifference {
  const uint8_t* messages;
  int64_t message_count;
  int64_t elements;  // of one message
  float* reference;
  LloydMaxFormat format;
};

// What earlier codes lost of the numbers of each message, over a divisor: codes are of the numbers and of that, and
// what they lose takes its place.
struct Feedback {
  Bf16* lost;           // null without
  int64_t distance;     // elements from the beginning of one message's to that of the next
  const float* divisor;
};

struct QuantizeRotated {
  const void* input;
  DType input_dtype;
  int64_t elements;  // of the input
  uint8_t* messages;
  int64_t message_count;
  LloydMaxFormat format;
  Signs signs;
  Feedback feedback;
};

// shard = sum of all messages, rotated back, or shard += that if `add`.
struct SumRotated {
  const uint8_t* messages;
  int64_t message_count;
  int64_t elements;  // of one message
  float* shard;
  LloydMaxFormat format;
  Signs signs;
  bool add;
};

namespace cpu {
void run(const QuantizeDifference&);
void run(const AddDifference&);
void run(const QuantizeRotated&);
void run(const SumRotated&);
}  // namespace cpu

namespace cuda {
void run(const QuantizeDifference&, CUstream_st*);
void run(const AddDifference&, CUstream_st*);
void run(const QuantizeRotated&, CUstream_st*);
void run(const SumRotated&, CUstream_st*);
}  // namespace cuda

}  // namespace megatron_zpp
