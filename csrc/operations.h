// The operations: what each takes, and who runs it, CPU or CUDA. Arguments are checked before (bindings.cpp).
#pragma once

#include <cstdint>

#include "message.h"

struct CUstream_st;  // cudaStream_t without CUDA's headers

namespace megatron_zpp {

enum class Type : int { fp32, bf16, fp16 };

inline int type_bytes(Type type) { return type == Type::fp32 ? 4 : 2; }

// With a seed, rounding is stochastic; without one, to nearest.
struct Seed {
  bool given;
  uint64_t value;
};

// Row r of the (rows, columns) input becomes part r / messages of message r % messages.
struct Quantize {
  const void* input;
  Type input_type;
  int64_t rows, columns, row_stride;  // elements
  uint8_t* messages;
  int64_t message_count;
  Format format;
  Seed seed;
};

// The inverse.
struct Dequantize {
  const uint8_t* messages;
  int64_t message_count;
  Format format;
  void* output;
  Type output_type;
  int64_t rows, columns, row_stride;  // elements
};

// Part g of the sum of the messages becomes message g of the output.
struct SumQuantize {
  const uint8_t* messages;
  int64_t message_count;
  int64_t elements;  // of one message
  Format format;
  uint8_t* output;
  int64_t output_count;
  Format output_format;
  void* error;  // null: none
  Type error_type;
  Seed seed;
};

struct SumInto {
  const uint8_t* messages;
  int64_t message_count;
  int64_t elements;  // of one message
  Format format;
  float* shard;
  float factor;
  bool add;
};

struct SumParts {
  const void* parts;
  Type part_type;
  int64_t part_count;
  int64_t elements;  // of one part
  int64_t distance;  // elements from one part to the next
  const void* own;   // null, or part `place`, in place of what lies there among the others
  int64_t place;
  float* shard;      // may be one of the parts
  float factor;
  bool add;
  float* squares;  // null, or those of the shard as SumSquares has them
};

// Sum k is that of the squares of the input's elements from k * kSquaresBlock on.
constexpr int kSquaresBlock = 256;

struct SumSquares {
  const void* input;
  Type input_type;
  int64_t elements;
  float* sums;
};

struct Adamw {
  float* master;
  const void* gradient;
  Type gradient_type;
  float* exp_avg;
  float* exp_avg_sq;
  int64_t elements;
  int64_t decayed;  // how many elements, the first ones, have weight decay
  const float* divisor;
  const float* found_inf;
  const float* bias_corrections;
  AdamwConstants constants;
};

struct AdamwPublish {
  Adamw step;
  void* published;  // null: none
  Type published_type;
};

struct AdamwQuantize {
  Adamw step;
  uint8_t* message;
  Format format;
};

// Overloads, one an operation.
namespace cpu {
void run(const Quantize&);
void run(const Dequantize&);
void run(const SumQuantize&);
void run(const SumInto&);
void run(const SumParts&);
void run(const SumSquares&);
void run(const AdamwPublish&);
void run(const AdamwQuantize&);
}  // namespace cpu

namespace cuda {
void run(const Quantize&, CUstream_st*);
void run(const Dequantize&, CUstream_st*);
void run(const SumQuantize&, CUstream_st*);
void run(const SumInto&, CUstream_st*);
void run(const SumParts&, CUstream_st*);
void run(const SumSquares&, CUstream_st*);
void run(const AdamwPublish&, CUstream_st*);
void run(const AdamwQuantize&, CUstream_st*);
}  // namespace cuda

}  // namespace megatron_zpp
