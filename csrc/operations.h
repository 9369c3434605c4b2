// The parameters of each operation, and the functions that run it on a CPU or a GPU.
//
// bindings.cpp checks every argument before it fills one of these structs.
#pragma once

#include <cstdint>

#include "message.h"
#include "state_codes.h"

struct CUstream_st;  // cudaStream_t, declared here so that CUDA's headers are not needed

namespace megatron_zpp {

enum class DType : int { fp32, bf16, fp16 };

// Message g holds the rows / message_count rows of the (rows, columns) input from g * rows / message_count on.
struct Quantize {
  const void* input;
  DType input_dtype;
  int64_t rows, columns, row_stride;  // in elements
  uint8_t* messages;
  int64_t message_count;
  Format format;
};

// The inverse of Quantize.
struct Dequantize {
  const uint8_t* messages;
  int64_t message_count;
  Format format;
  void* output;
  DType output_dtype;
  int64_t rows, columns, row_stride;  // in elements
};

// Part g of the sum of all messages becomes message g of the output.
struct SumQuantize {
  const uint8_t* messages;
  int64_t message_count;
  int64_t elements;  // of one message
  Format format;     // of messages and output
  uint8_t* output;
  int64_t output_count;
};

// shard = sum of all messages, or shard += that if `add`.
struct SumInto {
  const uint8_t* messages;
  int64_t message_count;
  int64_t elements;  // of one message
  Format format;
  float* shard;
  bool add;
};

// shard = sum of all parts, or shard += that if `add`.
struct SumParts {
  const void* parts;
  DType part_dtype;
  int64_t part_count;
  int64_t elements;    // of one part
  int64_t distance;    // elements from the beginning of one part to that of the next
  const void* own;     // null, or the part of rank `group_rank`, read instead of that row of `parts`
  int64_t group_rank;
  float* shard;        // may be one of the parts
  bool add;
  float* squares;      // null, or the sums of squares of the new shard, as SumSquares computes them
};

// sums[k] = sum of the squares of input[k * kSquaresBlock : (k + 1) * kSquaresBlock].
constexpr int kSquaresBlock = 256;

struct SumSquares {
  const void* input;
  DType input_dtype;
  int64_t elements;
  float* sums;
};

// What a step of AdamW takes besides the tensors of a shard; the same for all shards of a step.
struct AdamwScalars {
  // In the memory of the tensors' device, so that a step does not wait for it:
  const float* divisor;           // gradients are divided by it
  const float* found_inf;         // the step is skipped unless this is 0
  const float* bias_corrections;  // 1 - beta1^t and 1 - beta2^t
  AdamwConstants constants;
};

// One step on the states of a shard. Both operators below contain it; they differ in what they write besides.
struct AdamwStep {
  float* master;
  const void* gradient;
  DType gradient_dtype;
  float* exp_avg;
  float* exp_avg_sq;
  int64_t elements;
  int64_t decayed;  // the first `decayed` elements have weight decay
  AdamwScalars scalars;
};

struct Adamw {
  AdamwStep step;
  void* gather_source;  // null, or where the new weights are also written in 16 bits
  DType gather_source_dtype;
};

struct AdamwQuantize {
  AdamwStep step;
  uint8_t* message;  // of the new weights
  Format format;
};

// A moment of AdamW. fp16 and fp8 have a scale per block of kStateBlock elements.
struct StateTensor {
  void* values;
  uint8_t* scales;  // null without
  StateForm form;
};

// One step on states of which some take fewer bytes than fp32, in whole blocks of kStateBlock elements.
struct AdamwCompact {
  void* master;  // fp32; if `split`, the bytes of SplitWeight, whose bf16 part is the gather source
  bool split;
  const void* gradient;
  DType gradient_dtype;
  StateTensor exp_avg, exp_avg_sq;
  int64_t elements;
  int64_t decayed;  // the first `decayed` elements have weight decay
  void* gather_source;  // null, or where the new weights are also written in 16 bits
  DType gather_source_dtype;
  AdamwScalars scalars;
  Rounding rounding;
};

namespace cpu {
void run(const Quantize&);
void run(const Dequantize&);
void run(const SumQuantize&);
void run(const SumInto&);
void run(const SumParts&);
void run(const SumSquares&);
void run(const Adamw&);
void run(const AdamwQuantize&);
void run(const AdamwCompact&);
}  // namespace cpu

namespace cuda {
void run(const Quantize&, CUstream_st*);
void run(const Dequantize&, CUstream_st*);
void run(const SumQuantize&, CUstream_st*);
void run(const SumInto&, CUstream_st*);
void run(const SumParts&, CUstream_st*);
void run(const SumSquares&, CUstream_st*);
void run(const Adamw&, CUstream_st*);
void run(const AdamwQuantize&, CUstream_st*);
void run(const AdamwCompact&, CUstream_st*);
}  // namespace cuda

}  // namespace megatron_zpp
